"""telemetry.jsonl of a job of any length: bounded, whole after a kill at any time, and followed by readers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkeep.page.records import RunRecords
from shardkeep.run.newest_records import newest_telemetry
from shardkeep.run.reader import MetricsTail
from shardkeep.run.telemetry_file import ALMOST, RECENT, RETRY_S, TelemetryFile, thinned
from tests.support.cluster import within

MEGABYTE = 1_000_000
PADDING = "x" * 900
APPENDING = """
import sys
from pathlib import Path
from shardkeep.run.telemetry_file import TelemetryFile
file = TelemetryFile(Path(sys.argv[1]), most_bytes=int(sys.argv[2]))
file.append({"role": "coordinator", "index": 0, "pid": 1, "every_s": 5.0})
file.settle()
print("done", flush=True)
input()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "telemetry.jsonl"


def worker(number: int, *, index: int = 0, pid: int = 1, padding: str = PADDING) -> dict[str, Any]:
    """The record of a worker after `number` intervals of two steps."""
    minutes, seconds = divmod(5 * number, 60)
    hours, minutes = divmod(minutes, 60)
    return {
        "time": f"2026-01-{1 + hours // 24:02}T{hours % 24:02}:{minutes:02}:{seconds:02}.000",
        "kind": "telemetry",
        "role": "worker",
        "index": index,
        "pid": pid,
        "every_s": 5.0,
        "samples": 64 * number,
        "steps": 2,
        "loss": float(number % 2),
        "step_ms": {"total": 10.0 + number % 2, "push": 10.0 + number % 2},
        "bytes": {"push": {"values": number}, "total": number},
        "host": padding,
    }


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def append(file: TelemetryFile, path: Path, record: dict[str, Any]) -> None:
    """Appends a record. Waits where a job, whose records come slowly, would not need to."""
    file.append(record)
    if path.stat().st_size > ALMOST * MEGABYTE:
        file.settle()


def filled(path: Path, *, size: int, pid: int = 1) -> int:
    """Writes records of two workers until the file has `size` bytes; the number of intervals."""
    number = 0
    with path.open("w") as file:
        while file.tell() < size:
            number += 1
            file.writelines(json.dumps(worker(number, index=index, pid=pid)) + "\n" for index in (0, 1))
    return number


def test_a_file_of_many_times_its_size_stays_below_it_and_covers_the_whole_time(path: Path) -> None:
    file = TelemetryFile(path, most_bytes=MEGABYTE)
    for number in range(1, 8001):
        append(file, path, worker(number))
        assert path.stat().st_size <= MEGABYTE
    found = records(path)
    assert sum(record["steps"] for record in found) == 2 * 8000, "no step is lost"
    assert sum(record["every_s"] for record in found) == 5.0 * 8000
    assert [record["samples"] for record in found] == sorted({record["samples"] for record in found})
    spans = [record["every_s"] for record in found]
    assert spans == sorted(spans, reverse=True) and spans[0] > 5.0
    assert sum(span == 5.0 for span in spans) * 1000 > RECENT * MEGABYTE, "the newest quarter is as it was written"
    for mean, of in ((0.5, [r["loss"] for r in found]), (10.5, [r["step_ms"]["total"] for r in found])):
        weighted = sum(value * record["steps"] for value, record in zip(of, found, strict=True)) / 16_000
        assert weighted == pytest.approx(mean, abs=1e-4), "means are of their interval"


def test_records_that_come_while_the_file_is_written_again_are_all_there(path: Path) -> None:
    size = 4 * MEGABYTE
    number = filled(path, size=int(ALMOST * size))
    file = TelemetryFile(path, most_bytes=size)
    inode = path.stat().st_ino
    added = 0
    while path.stat().st_ino == inode:
        added += 1
        assert added < 1500, "the file is full"
        file.append(worker(number + added, padding=""))
        time.sleep(0.0002)  # the other thread has the interpreter
    file.settle()
    assert path.stat().st_size < 0.8 * size
    mine = [record for record in records(path) if record["index"] == 0]
    assert mine[-1]["samples"] == 64 * (number + added)
    assert sum(record["steps"] for record in mine) == 2 * (number + added)


def test_the_last_record_of_each_process_that_died_is_kept(path: Path) -> None:
    file = TelemetryFile(path, most_bytes=MEGABYTE)
    for pid in range(40):
        for number in range(1, 101):
            append(file, path, worker(number, pid=pid))
    found = records(path)
    last = {record["pid"]: record["bytes"]["total"] for record in found}
    assert last == dict.fromkeys(range(40), 100)
    assert [record["pid"] for record in found] == sorted(record["pid"] for record in found), "in order"
    assert newest_telemetry(path)[0]["pid"] == 39


def test_of_more_dead_processes_than_there_is_room_for_the_oldest_are_dropped(path: Path) -> None:
    file = TelemetryFile(path, most_bytes=MEGABYTE)
    for pid in range(3000):
        append(file, path, worker(1, pid=pid))
    pids = [record["pid"] for record in records(path)]
    assert pids == list(range(pids[0], 3000)) and len(pids) > 400
    assert path.stat().st_size <= MEGABYTE


def test_times_of_requests_are_those_of_the_requests_since_the_last_record() -> None:
    head = {"role": "server", "index": 0, "pid": 1, "every_s": 5.0, "pushes": 0}
    told = [{**head, "pulls": n, "request_ms": ms} for n, ms in ((100, 1.0), (200, 2.0), (400, 3.0), (500, 4.5))]
    found = [json.loads(line) for line in thinned([json.dumps(record).encode() for record in told], 10.0)]
    assert [(r["pulls"], r["request_ms"], r["every_s"]) for r in found] == [(200, 1.5, 10.0), (500, 3.5, 10.0)]


def test_a_larger_file_of_an_earlier_version_is_made_smaller(path: Path) -> None:
    filled(path, size=3 * MEGABYTE)
    file = TelemetryFile(path, most_bytes=MEGABYTE)
    file.append(worker(0))
    file.settle()
    assert path.stat().st_size <= 0.55 * MEGABYTE


def test_a_record_that_fills_the_file_alone_does_not_have_it_written_again_each_time(path: Path) -> None:
    file = TelemetryFile(path, most_bytes=MEGABYTE)
    file.append(worker(1, padding="x" * 945_000))
    file.settle()
    inode = path.stat().st_ino
    file.append(worker(2))
    file.settle()
    assert path.stat().st_ino == inode and len(records(path)) == 2


@pytest.mark.parametrize("most_bytes", [None, MEGABYTE // 5], ids=["all", "the end"])
def test_a_tail_gives_each_record_once_over_a_file_that_is_written_again(path: Path, most_bytes: int | None) -> None:
    file = TelemetryFile(path, most_bytes=MEGABYTE)
    tail = MetricsTail(path, most_bytes=most_bytes)
    seen: list[int] = []
    inodes = set()
    for number in range(1, 4001):
        append(file, path, worker(number))
        if number % 100 == 0:
            inodes.add(path.stat().st_ino)
            seen += [record["samples"] // 64 for record in tail]
    assert seen == list(range(1, 4001)) and tail.restarts == 0
    assert len(inodes) > 1


def test_a_tail_that_finds_its_place_nowhere_begins_again_and_says_so(path: Path) -> None:
    path.write_text('{"a": 1}\n{"a": 2}\n')
    tail = MetricsTail(path)
    assert list(tail) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 30}\n')
    assert list(tail) == [{"a": 30}] and tail.restarts == 1
    path.write_text('{"a": 7}\n{"a": 30}\n{"a": 8}\n')
    assert list(tail) == [{"a": 8}] and tail.restarts == 1


def test_a_page_that_nobody_opened_for_long_counts_processes_that_died_once(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: job\n")
    path = tmp_path / "telemetry.jsonl"
    file = TelemetryFile(path, most_bytes=MEGABYTE)
    page = RunRecords(tmp_path)
    number = 0
    for pid, intervals in ((1, 300), (2, 300), (3, 2600), (4, 1000)):
        for count in range(1, intervals + 1):
            number += 1
            append(file, path, {**worker(number, pid=pid), "bytes": {"push": {"values": count}}})
        if pid < 3:
            page.refresh()
    page.refresh()
    assert page.bytes_by_part["push"]["values"] == 300 + 300 + 2600 + 1000
    assert page.telemetry["worker", 0]["pid"] == 4
    fresh = RunRecords(tmp_path)
    fresh.refresh()
    assert fresh.bytes_by_part == page.bytes_by_part


def test_a_file_that_cannot_be_written_again_costs_records_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / ("t" * 250)  # the name of a temporary neighbour is too long
    filled(path, size=MEGABYTE * 19 // 20)
    now = 0.0
    file = TelemetryFile(path, most_bytes=MEGABYTE, clock=lambda: now)
    with caplog.at_level(logging.WARNING):
        for number in range(200):
            now += 1.0
            file.append(worker(number))
            file.settle()
    assert path.stat().st_size <= MEGABYTE
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: telemetry cannot be made smaller (File name too long)",
        f"{path}: is full: records are lost until it is written again",
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_full_disk_costs_records_and_the_file_is_written_again_once_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", size=1_700_000) as disk:
        path, now = disk / "telemetry.jsonl", 0.0
        number = filled(path, size=MEGABYTE // 2)
        filler = disk / "filler"
        filler.write_bytes(bytes(700_000))
        file = TelemetryFile(path, most_bytes=MEGABYTE, clock=lambda: now)
        for count in range(1, 500):
            file.append(worker(number + count))
            file.settle()
        assert path.stat().st_size <= MEGABYTE and not temporary(path)
        filler.unlink()
        file.append(worker(number + 499))
        file.settle()
        assert path.stat().st_size > ALMOST * MEGABYTE, "the next attempt is not due"
        now += RETRY_S
        file.append(worker(number + 499))  # for which there is no room yet
        file.settle()
        file.append(worker(number + 500))
        assert path.stat().st_size < 0.6 * MEGABYTE
        assert list(MetricsTail(path))[-1]["samples"] == 64 * (number + 500)


@contextlib.contextmanager
def small_disk(path: Path, *, size: int) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True, timeout=30)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=30)


@pytest.mark.parametrize("kills", range(3))
def test_a_kill_while_the_file_is_written_again_leaves_it_whole(path: Path, kills: int) -> None:
    size = 16 * MEGABYTE
    number = filled(path, size=int(ALMOST * size))
    before = path.read_bytes()
    command = [sys.executable, "-c", APPENDING, str(path), str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        within(60, lambda: bool(temporary(path)), "nothing is written", lambda: process.poll() is None)
        while temporary(path) and temporary(path)[0].stat().st_size < kills * MEGABYTE:
            assert process.poll() is None
        process.kill()
        process.communicate()
    assert path.read_bytes().startswith(before), "it was killed before the new file was there"
    assert len(temporary(path)) == 1
    again = TelemetryFile(path, most_bytes=size)
    again.append(worker(number + 1))
    again.settle()
    assert not temporary(path) and path.stat().st_size < 0.6 * size
    mine = [record for record in records(path) if (record["role"], record["index"]) == ("worker", 0)]
    assert sum(record["steps"] for record in mine) == 2 * (number + 1)


def temporary(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f".{path.name}.*"))


def test_a_process_that_ends_finishes_the_file_first(path: Path) -> None:
    size = 8 * MEGABYTE
    filled(path, size=int(ALMOST * size))
    code = APPENDING.partition("file.settle")[0]
    subprocess.run([sys.executable, "-c", code, str(path), str(size)], check=True, timeout=60)
    assert path.stat().st_size < 0.6 * size and not temporary(path)


def test_the_next_process_begins_a_line_after_one_that_was_cut_off(path: Path) -> None:
    TelemetryFile(path).append(worker(1))
    with path.open("a") as file:
        file.write('{"time": "20')
    TelemetryFile(path).append(worker(2))
    assert [record["samples"] for record in MetricsTail(path)] == [64, 128]


def test_an_append_does_not_wait_for_the_file_to_be_written_again(path: Path) -> None:
    size = 16 * MEGABYTE
    number = filled(path, size=int(ALMOST * size))
    inode = path.stat().st_ino
    file = TelemetryFile(path, most_bytes=size)
    file.append(worker(number + 1))
    within(60, lambda: bool(temporary(path)), "nothing is written", lambda: True)
    file.append(worker(number + 2))
    assert path.stat().st_ino == inode, "it came before the end"
    file.settle()
    assert path.stat().st_ino != inode and records(path)[-1]["samples"] == 64 * (number + 2)
