"""The run folder: every file whole, every key there, read back by a follower. The digest of a run's code."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import xxhash

import shardkeep
from shardkeep.base.errors import UserError
from shardkeep.config import JobConfig, load_config
from shardkeep.ps.control.records import Member
from shardkeep.records.lines import Tail
from shardkeep.run.folder import NO_SUMMARY, RunFolder
from shardkeep.run.new_folder import default_run_dir, refuse_taken
from shardkeep.run.origin.code import PACKAGE, code_of
from shardkeep.run.reader import check_ours, latest_run
from tests.support.cases import every
from tests.support.records import records_in


def summary_of(folder: RunFolder) -> dict[str, Any]:
    return folder.summary() or {}


def test_a_new_folder_holds_the_config_and_a_second_run_is_refused(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", JobConfig(seed=5))
    assert load_config(folder.config_path).seed == 5
    assert folder.logs.is_dir()
    with pytest.raises(UserError, match="holds a run already; choose another folder"):
        RunFolder.create(tmp_path / "run", JobConfig())


def test_a_folder_that_cannot_be_written_or_looked_into_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        RunFolder.create(tmp_path / "file" / "run", JobConfig())
    for look in (refuse_taken, lambda path: check_ours(path, what="--run-dir")):
        with pytest.raises(UserError, match=r"--run-dir .*: cannot be read \(File name too long\)"):
            look(tmp_path / ("long" * 100))  # no permission stops root


def test_members_are_listed_with_the_coordinator_and_the_generation(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.coordinator("127.0.0.1:4000", pid=10)
    folder.members(1, [Member("server", 0, "127.0.0.1", 11), Member("worker", 0, "127.0.0.1", 12)])
    assert [(m["role"], m["index"], m["pid"], m["port"], m["generation"]) for m in folder.member_list()] == [
        ("coordinator", 0, 10, 4000, 1),
        ("server", 0, 11, None, 1),
        ("worker", 0, 12, None, 1),
    ]
    assert folder.address() == "127.0.0.1:4000"


def test_records_are_whole_lines_in_order_with_their_kind_and_time_and_telemetry_has_a_file_of_its_own(
    tmp_path: Path,
) -> None:
    folder = RunFolder.create(tmp_path / "run", JobConfig())
    folder.telemetry({"time": "2026-01-01T00:00:00.000", "kind": "telemetry", "step": 3, "loss": float("inf")})
    assert not folder.metrics_path.exists()
    folder.event({"kind": "phase", "phase": "compile", "text": "eager"})
    folder.progress({"kind": "progress", "step": 3, "loss": float("nan")})
    folder.progress({"kind": "eval", "step": 3, "auc": 0.5})
    lines = records_in(folder.metrics_path)
    assert [line["kind"] for line in lines] == ["phase", "progress", "eval"]
    assert all("time" in line for line in lines) and lines[1]["loss"] is None

    def write(thread: int) -> None:
        for _ in range(20):
            folder.event({"n": thread, "text": "x" * 500})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(records_in(folder.metrics_path)) == 3 + 160
    again = RunFolder.reopen(tmp_path / "run", JobConfig())
    again.telemetry({"time": "2026-01-02T00:00:00.000", "kind": "telemetry", "step": 4})
    assert [(r["step"], r.get("loss")) for r in records_in(again.telemetry_path)] == [(3, None), (4, None)]


def test_a_full_disk_costs_telemetry_and_one_warning_and_what_follows_a_cut_line_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path)
    folder.telemetry({"step": 0})
    folder.telemetry_path.rename(tmp_path / "kept")
    folder.telemetry_path.symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        folder.telemetry({"step": 1})
        folder.telemetry({"step": 1})
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [f"{folder.telemetry_path}: telemetry is not written (No space left on device)"]
    folder.telemetry_path.unlink()
    (tmp_path / "kept").rename(folder.telemetry_path)
    with folder.telemetry_path.open("a") as file:
        file.write('{"step": 1, "lo')  # what reached the disk
    folder.telemetry({"step": 2})
    assert [record["step"] for record in records_in(folder.telemetry_path)] == [0, 2]


def test_a_tail_gives_each_record_once_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert list(tail) == []
    path.write_text('{"a": 1}\n{"a": 2')
    assert [record.others for record in tail] == [{"a": 1}]
    assert list(tail) == []
    with path.open("a") as file:
        file.write("}\n")
    assert [record.others for record in tail] == [{"a": 2}]


def test_a_failed_job_has_every_key_of_a_summary_says_how_far_it_came_and_takes_a_better_message(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path)
    assert folder.summary() is None
    folder.progress({"step": 40, "samples": 4000})
    folder.finished("failed", "the connection ended", None)
    folder.finished("failed", "worker 1 ended", None)
    summary = summary_of(folder)
    assert (summary["status"], summary["message"]) == ("failed", "worker 1 ended")
    assert (summary["steps"], summary["samples"]) == (40, 4000)
    assert set(NO_SUMMARY) | {"versions", "machine", "commit"} <= set(summary)
    assert summary["versions"]["torch"] and summary["machine"]["cores"] >= 1


def test_a_completed_job_keeps_what_the_trainer_reported_and_the_coordinator_adds_its_own_process(
    tmp_path: Path,
) -> None:
    folder, processes = RunFolder(tmp_path), [{"role": "server", "index": 0, "peak_rss_bytes": 1}]
    reported = {"steps": 7, "eval": {"auc": 0.75}, "state_digest": "ab", "kind": "summary", "processes": processes}
    folder.finished("completed", "", reported)
    summary = summary_of(folder)
    assert (summary["steps"], summary["eval"], summary["state_digest"]) == (7, {"auc": 0.75}, "ab")
    assert next(iter(summary)) == "status" and "message" not in summary
    assert summary["processes"] == processes
    folder.coordinator("127.0.0.1:1", pid=1)
    folder.finished("completed", "", reported)
    own, *others = summary_of(folder)["processes"]
    assert (own["role"], own["index"], others) == ("coordinator", 0, processes)
    assert own["peak_rss_bytes"] > 10_000_000


def test_default_folders_are_named_after_the_job_and_never_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = default_run_dir("adult")
    assert first.parent == Path("runs") and first.name.startswith("adult-")
    RunFolder.create(first, JobConfig())
    assert not default_run_dir("adult").exists()
    assert latest_run() == first


@every(
    "content", ["", '{"address": "127.0', "[]", "\0\0", "[" * 100_000], ids=["empty", "cut", "a list", "zeros", "deep"]
)
@every("name", ["coordinator.json", "members.json", "summary.json", "code.json"])
def test_a_damaged_file_of_the_folder_is_named_in_one_line(tmp_path: Path, name: str, content: str) -> None:
    folder = RunFolder.create(tmp_path / "run", JobConfig())
    (folder.path / name).write_text(content)
    readers = {
        "coordinator.json": folder.address,
        "members.json": folder.member_list,
        "summary.json": folder.summary,
        "code.json": lambda: folder.code_folder,
    }
    with pytest.raises(UserError, match=rf"{name}: is damaged") as caught:
        readers[name]()
    assert "\n" not in str(caught.value)


@every("content", ["", "7", "{}", "[3]", '[{"began": null}]'])
def test_damaged_figures_of_starts_cost_the_figures_and_nothing_else(tmp_path: Path, content: str) -> None:
    folder = RunFolder.create(tmp_path / "run", JobConfig())
    (folder.path / "starts.json").write_text(content)
    folder.finished("completed", "", {"steps": 20})
    assert summary_of(folder)["steps"] == 20


def test_the_package_has_one_digest_of_the_sources_in_all_its_rooms() -> None:
    root = Path(shardkeep.__file__).parent
    files = [Path(folder, name) for folder, _, names in os.walk(root, followlinks=True) for name in names]
    sources = sorted(path for path in files if path.suffix == ".py")
    assert {root / "config" / "job.py", root / "workers" / "run.py", root / "automl" / "init.py"} <= set(sources)
    texts = [f"{path.relative_to(root)}\0".encode() + path.read_bytes() for path in sources]
    assert code_of(JobConfig(), None)[PACKAGE] == xxhash.xxh3_64_hexdigest(b"".join(texts))
