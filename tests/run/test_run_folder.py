"""The run folder: every file whole, every key there, read back by a follower."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

from shardkeep.base.errors import UserError
from shardkeep.config import JobConfig, load_config
from shardkeep.ps.control.records import Member
from shardkeep.records.lines import Tail
from shardkeep.run.folder import NO_SUMMARY, RunFolder
from shardkeep.run.new_folder import default_run_dir, refuse_taken
from shardkeep.run.reader import check_ours, latest_run
from tests.support.cases import every
from tests.support.records import records_in


def test_a_new_folder_holds_the_config_and_a_second_run_is_refused(tmp_path: Path) -> None:
    config = JobConfig(seed=5)
    folder = RunFolder.create(tmp_path / "run", config)
    assert load_config(folder.config_path).seed == 5
    assert folder.logs.is_dir()
    with pytest.raises(UserError, match="holds a run already; choose another folder"):
        RunFolder.create(tmp_path / "run", config)


def test_a_folder_that_cannot_be_written_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        RunFolder.create(tmp_path / "file" / "run", JobConfig())


def test_a_folder_that_cannot_be_looked_into_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--run-dir .*: cannot be read \(File name too long\)"):
        refuse_taken(tmp_path / ("long" * 100))  # no permission stops root
    with pytest.raises(UserError, match=r"--run-dir .*: cannot be read \(File name too long\)"):
        check_ours(tmp_path / ("long" * 100), what="--run-dir")


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


def test_records_are_lines_of_metrics_in_order_with_their_kind_and_time(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.event({"kind": "phase", "phase": "compile", "text": "eager"})
    folder.progress({"kind": "progress", "step": 3, "loss": float("nan")})
    folder.progress({"kind": "eval", "step": 3, "auc": 0.5})
    lines = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["phase", "progress", "eval"]
    assert all("time" in line for line in lines)
    assert lines[1]["loss"] is None


def test_telemetry_has_a_file_of_its_own_which_a_resumed_job_appends_to(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", JobConfig())
    folder.telemetry({"time": "2026-01-01T00:00:00.000", "kind": "telemetry", "step": 3, "loss": float("inf")})
    again = RunFolder.reopen(tmp_path / "run", JobConfig())
    again.telemetry({"time": "2026-01-02T00:00:00.000", "kind": "telemetry", "step": 4})
    assert [(r["step"], r.get("loss")) for r in records_in(again.telemetry_path)] == [(3, None), (4, None)]
    assert not folder.metrics_path.exists()


def test_a_full_disk_costs_telemetry_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder(tmp_path)
    folder.telemetry_path.symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            folder.telemetry({"time": "", "step": step})
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [f"{folder.telemetry_path}: telemetry is not written (No space left on device)"]


def test_telemetry_after_a_line_that_was_cut_off_is_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.telemetry({"step": 0})
    folder.telemetry_path.rename(tmp_path / "kept")
    folder.telemetry_path.symlink_to("/dev/full")
    folder.telemetry({"step": 1})
    folder.telemetry_path.unlink()
    (tmp_path / "kept").rename(folder.telemetry_path)
    with folder.telemetry_path.open("a") as file:
        file.write('{"step": 1, "lo')  # what reached the disk
    folder.telemetry({"step": 2})
    assert [record["step"] for record in records_in(folder.telemetry_path)] == [0, 2]


def test_lines_written_by_many_threads_stay_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    threads = [
        threading.Thread(target=lambda n=n: [folder.event({"n": n, "text": "x" * 500}) for _ in range(20)])
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([json.loads(line) for line in folder.metrics_path.read_text().splitlines()]) == 160


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


def test_a_failed_job_has_every_key_of_a_summary_and_says_how_far_it_came(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.summary() is None
    folder.progress({"step": 40, "samples": 4000})
    folder.finished("failed", "worker 1 ended", None)
    summary = folder.summary() or {}
    assert (summary["status"], summary["message"]) == ("failed", "worker 1 ended")
    assert (summary["steps"], summary["samples"]) == (40, 4000)
    assert set(NO_SUMMARY) | {"versions", "machine", "commit"} <= set(summary)
    assert summary["versions"]["torch"]
    assert summary["machine"]["cores"] >= 1


def test_a_completed_job_keeps_what_the_trainer_reported(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.finished("completed", "", {"steps": 7, "eval": {"auc": 0.75}, "state_digest": "ab", "kind": "summary"})
    summary = folder.summary() or {}
    assert (summary["steps"], summary["eval"], summary["state_digest"]) == (7, {"auc": 0.75}, "ab")
    assert next(iter(summary)) == "status"
    assert "message" not in summary


def test_the_coordinator_adds_its_own_process_and_a_reader_of_the_folder_does_not(tmp_path: Path) -> None:
    folder, summary = RunFolder(tmp_path), {"processes": [{"role": "server", "index": 0, "peak_rss_bytes": 1}]}
    folder.finished("completed", "", summary)
    assert (folder.summary() or {})["processes"] == summary["processes"]
    folder.coordinator("127.0.0.1:1", pid=1)
    folder.finished("completed", "", summary)
    own, *others = (folder.summary() or {})["processes"]
    assert (own["role"], own["index"], others) == ("coordinator", 0, summary["processes"])
    assert own["peak_rss_bytes"] > 10_000_000


def test_a_better_message_replaces_the_first(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.finished("failed", "the connection ended", None)
    folder.finished("failed", "server 0 was killed", None)
    assert (folder.summary() or {})["message"] == "server 0 was killed"


def test_default_folders_are_named_after_the_job_and_never_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = default_run_dir("adult")
    assert first.parent == Path("runs")
    assert first.name.startswith("adult-")
    RunFolder.create(first, JobConfig())
    assert not default_run_dir("adult").exists()
    assert latest_run() == first


def test_the_summary_of_a_resumed_job_lists_the_recoveries_of_its_earlier_starts(tmp_path: Path) -> None:
    config = JobConfig()
    folder = RunFolder.create(tmp_path / "run", config)
    for start, steps in enumerate((5, 9, 12)):
        folder.finished("stopped", "", {"steps": steps, "recoveries": [{"generation": start}]})
        folder = RunFolder.reopen(folder.path, config)
    folder.finished("completed", "", {"steps": 20, "recoveries": []})
    assert [r["generation"] for r in (folder.summary() or {})["recoveries"]] == [0, 1, 2]


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
    assert (folder.summary() or {})["steps"] == 20
