"""telemetry.jsonl of a job of any length: bounded, whole after a kill at any time, and followed by readers."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkeep.page.records import RunRecords
from shardkeep.records.lines import Tail, earlier, newest_of_each
from shardkeep.records.telemetry_file import TelemetryFile
from tests.support.cases import every
from tests.support.records import records_in

MEGABYTE = 1_000_000
PADDING = "x" * 900
APPENDING = """
import sys
from pathlib import Path
from shardkeep.records.telemetry_file import TelemetryFile
file = TelemetryFile(Path(sys.argv[1]), most_bytes=100_000)
for number in range(10**9):
    file.append({"kind": "telemetry", "role": "worker", "index": 0, "samples": number, "host": "x" * 900})
    print(number, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "telemetry.jsonl"


def worker(number: int, *, index: int = 0, pid: int = 1, padding: str = PADDING) -> dict[str, Any]:
    """The record of a worker after `number` intervals of two steps."""
    minutes, seconds = divmod(5 * number, 60)
    hours, minutes = divmod(minutes, 60)
    time = f"2026-01-{1 + hours // 24:02}T{hours % 24:02}:{minutes:02}:{seconds:02}.000"
    place = {"kind": "telemetry", "role": "worker", "index": index, "pid": pid, "every_s": 5.0, "host": padding}
    return {"time": time, **place, "samples": number, "bytes": {"push": {"values": number}, "total": number}}


def size_of(path: Path) -> int:
    return sum(each.stat().st_size for each in path.parent.glob("telemetry*"))


def test_a_file_of_many_times_its_size_stays_below_it_with_its_newest_records(path: Path) -> None:
    file = TelemetryFile(path, most_bytes=MEGABYTE)
    for number in range(1, 3001):
        file.append(worker(number))
        assert size_of(path) <= MEGABYTE
    samples = [record["samples"] for record in records_in(path)]
    assert samples == list(range(samples[0], 3001)) and 1000 * len(samples) > 0.4 * MEGABYTE


def test_a_larger_file_of_an_earlier_version_is_the_earlier_generation(path: Path) -> None:
    TelemetryFile(path, most_bytes=10 * MEGABYTE).append(worker(1, padding="x" * MEGABYTE))
    TelemetryFile(path, most_bytes=MEGABYTE).append(worker(2))
    assert [record["samples"] for record in records_in(path)] == [1, 2]
    assert earlier(path).stat().st_size > MEGABYTE > path.stat().st_size


def test_a_record_that_fills_the_file_alone_is_dropped(path: Path) -> None:
    file = TelemetryFile(path, most_bytes=MEGABYTE)
    for number, padding in ((1, PADDING), (2, "x" * MEGABYTE), (3, PADDING)):
        file.append(worker(number, padding=padding))
    assert [record["samples"] for record in records_in(path)] == [1, 3]


def test_a_tail_gives_each_record_once_over_generations(path: Path) -> None:
    file = TelemetryFile(path, most_bytes=MEGABYTE)
    tails = [Tail(path), Tail(path, most_bytes=MEGABYTE // 5)]
    seen = [list[int](), list[int]()]
    for number in range(1, 2501):
        file.append(worker(number))
        if number % 100 == 0:
            for tail, samples in zip(tails, seen, strict=True):
                samples += [record.to_dict()["samples"] for record in tail]
    assert seen == [list(range(1, 2501))] * 2


def test_a_tail_that_finds_its_place_nowhere_begins_again(path: Path) -> None:
    path.write_text('{"a": 1}\n{"a": 2}\n')
    tail = Tail(path)
    assert [record.others for record in tail] == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 30}\n')
    assert [record.others for record in tail] == [{"a": 30}]


def test_a_tail_from_the_end_gives_what_comes_later(path: Path) -> None:
    file = TelemetryFile(path, most_bytes=MEGABYTE)
    file.append(worker(1))
    tail = Tail(path, from_end=True)
    assert list(tail) == []
    for number in range(2, 600):  # more than one generation holds
        file.append(worker(number))
    assert [record.to_dict()["samples"] for record in tail] == list(range(2, 600))


def test_the_newest_records_are_also_in_the_earlier_generation(path: Path) -> None:
    file = TelemetryFile(path, most_bytes=MEGABYTE)
    file.append(worker(1, index=7, padding=""))
    number = 0
    while not earlier(path).exists():
        number += 1
        file.append(worker(number))
    assert [(record.index, record.to_dict()["samples"]) for record in newest_of_each(path)] == [(0, number), (7, 1)]


def test_a_page_counts_processes_that_died_once_over_generations(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: job\n")
    file, page = TelemetryFile(tmp_path / "telemetry.jsonl", most_bytes=MEGABYTE), RunRecords(tmp_path)
    for pid, intervals in ((1, 300), (2, 300), (3, 200), (4, 150)):
        for count in range(1, intervals + 1):
            file.append(worker(count, pid=pid))
        page.refresh()
    assert page.counts.bytes_by_part["push"]["values"] == 300 + 300 + 200 + 150
    assert page.counts.newest["worker", 0].pid == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_full_disk_costs_records_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "small", size=200_000) as disk, caplog.at_level(logging.WARNING):
        path = disk / "telemetry.jsonl"
        (disk / "filler").write_bytes(bytes(150_000))
        file = TelemetryFile(path, most_bytes=MEGABYTE)
        for number in range(1, 200):
            file.append(worker(number))
        (disk / "filler").unlink()
        file.append(worker(200))
        samples = [record["samples"] for record in records_in(path)]
        assert samples == [*range(1, len(samples)), 200] and 10 < len(samples) < 100
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"{path}: telemetry is not written (No space left on device)"]


@contextlib.contextmanager
def small_disk(path: Path, *, size: int) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True, timeout=30)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=30)


@every("kill_at", [40, 60, 300])
def test_a_kill_at_any_time_leaves_whole_records_and_the_next_process_goes_on(tmp_path: Path, kill_at: int) -> None:
    path = tmp_path / "telemetry.jsonl"
    with subprocess.Popen([sys.executable, "-c", APPENDING, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = next(number for number in map(int, process.stdout) if number >= kill_at)
        process.kill()
    TelemetryFile(path, most_bytes=100_000).append(worker(10**9))
    samples = [record["samples"] for record in records_in(path)]
    assert samples[-1] == 10**9 and samples[:-1] == list(range(samples[0], samples[-2] + 1))
    assert last <= samples[-2] and size_of(path) <= 100_000


def test_the_next_process_begins_a_line_after_one_that_was_cut_off(path: Path) -> None:
    TelemetryFile(path).append(worker(1))
    with path.open("a") as file:
        file.write('{"time": "20')
    TelemetryFile(path).append(worker(2))
    assert [record["samples"] for record in records_in(path)] == [1, 2]
