"""telemetry.jsonl of a job of any length: bounded, whole after a kill at any time, and followed by readers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardkeep.page.records import RunRecords
from shardkeep.records.lines import Tail, earlier, newest_of_each
from shardkeep.records.telemetry_file import TelemetryFile
from tests.support.cases import every
from tests.support.records import records_in

SIZE = 200_000
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
    minutes, seconds = divmod(5 * number, 60)
    hours, minutes = divmod(minutes, 60)
    time = f"2026-01-{1 + hours // 24:02}T{hours % 24:02}:{minutes:02}:{seconds:02}.000"
    place = {"kind": "telemetry", "role": "worker", "index": index, "pid": pid, "every_s": 5.0, "host": padding}
    return {"time": time, **place, "samples": number, "bytes": {"push": {"values": number}, "total": number}}


def size_of(path: Path) -> int:
    return sum(each.stat().st_size for each in path.parent.glob("telemetry*"))


def test_a_file_of_many_times_its_size_stays_below_it_with_its_newest_records(path: Path) -> None:
    file = TelemetryFile(path, most_bytes=SIZE)
    for number in range(1, 601):
        file.append(worker(number))
        assert size_of(path) <= SIZE
    samples = [record["samples"] for record in records_in(path)]
    assert samples == list(range(samples[0], 601)) and 1000 * len(samples) > 0.4 * SIZE


def test_a_larger_file_of_an_earlier_version_is_the_earlier_generation(path: Path) -> None:
    TelemetryFile(path, most_bytes=10 * SIZE).append(worker(1, padding="x" * SIZE))
    TelemetryFile(path, most_bytes=SIZE).append(worker(2))
    assert [record["samples"] for record in records_in(path)] == [1, 2]
    assert earlier(path).stat().st_size > SIZE > path.stat().st_size


def test_a_record_that_fills_the_file_alone_is_dropped_and_a_line_that_was_cut_off_ends(path: Path) -> None:
    file = TelemetryFile(path, most_bytes=SIZE)
    for number, padding in ((1, PADDING), (2, "x" * SIZE), (3, PADDING)):
        file.append(worker(number, padding=padding))
    with path.open("a") as lines:
        lines.write('{"time": "20')
    TelemetryFile(path).append(worker(4))
    assert [record["samples"] for record in records_in(path)] == [1, 3, 4]


def test_a_tail_gives_each_record_once_over_generations(path: Path) -> None:
    file = TelemetryFile(path, most_bytes=SIZE)
    tails = [Tail(path), Tail(path, most_bytes=SIZE // 5)]
    seen = [list[int](), list[int]()]
    for number in range(1, 501):
        file.append(worker(number))
        if number % 20 == 0:
            for tail, samples in zip(tails, seen, strict=True):
                samples += [record.to_dict()["samples"] for record in tail]
    assert seen == [list(range(1, 501))] * 2


def test_a_tail_from_the_end_gives_what_comes_later_and_one_that_finds_its_place_nowhere_begins_again(
    path: Path,
) -> None:
    file = TelemetryFile(path, most_bytes=SIZE)
    file.append(worker(1))
    tail = Tail(path, from_end=True)
    assert list(tail) == []
    for number in range(2, 120):  # more than one generation holds
        file.append(worker(number))
    assert [record.to_dict()["samples"] for record in tail] == list(range(2, 120))
    other = path.with_name("other.jsonl")
    other.write_text('{"a": 1}\n{"a": 2}\n')
    tail = Tail(other)
    assert [record.others for record in tail] == [{"a": 1}, {"a": 2}]
    other.write_text('{"a": 30}\n')
    assert [record.others for record in tail] == [{"a": 30}]


def test_the_newest_records_are_also_in_the_earlier_generation(path: Path) -> None:
    file = TelemetryFile(path, most_bytes=SIZE)
    file.append(worker(1, index=7, padding=""))
    number = 0
    while not earlier(path).exists():
        number += 1
        file.append(worker(number))
    assert [(record.index, record.to_dict()["samples"]) for record in newest_of_each(path)] == [(0, number), (7, 1)]


def test_a_page_counts_processes_that_died_once_over_generations(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: job\n")
    file, page = TelemetryFile(tmp_path / "telemetry.jsonl", most_bytes=SIZE), RunRecords(tmp_path)
    for pid, intervals in ((1, 60), (2, 60), (3, 40), (4, 30)):
        for count in range(1, intervals + 1):
            file.append(worker(count, pid=pid))
        page.refresh()
    assert page.counts.bytes_by_part["push"]["values"] == 60 + 60 + 40 + 30
    assert page.counts.newest["worker", 0].pid == 4


@every("kill_at", [40, 300])
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
