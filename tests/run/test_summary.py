"""`Summary` describes summary.json completely: its keys are those that jobs write. Each start in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import shardkeep
from shardkeep.config import JobConfig
from shardkeep.run.folder import NO_SUMMARY, RunFolder
from shardkeep.run.starts import Starts
from shardkeep.run.summary import Summary
from tests.support.cases import every
from tests.support.configs import ALONE
from tests.support.golden import Golden

JOB = ALONE | {"train": {"batch_size": 500}, "checkpoint": {"every_steps": "off"}}
COMPRESSED = {
    "consistency": "bounded",
    "compression": {
        "push": {"values": "int8", "pool_rows": 64, "keep": 0.5},
        "pull": {"values": "int8", "cache_rows": 64, "lease": 4},
    },
}


def unknown(model: BaseModel, path: str = "") -> Iterator[str]:
    """The keys of a parsed summary that no model describes, with the path to each."""
    yield from (f"{path}{key}" for key in model.model_extra or {})
    for name in type(model).model_fields:
        value = getattr(model, name)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, BaseModel):
                yield from unknown(each, f"{path}{name}.")


def test_every_key_of_a_job_of_processes_or_one_that_ended_early_is_described(golden: Golden) -> None:
    assert golden.summary and not list(unknown(Summary.model_validate(golden.summary)))
    assert not list(unknown(Summary.model_validate({**NO_SUMMARY, "status": "failed"})))
    found = {"status": "failed", "news": 1, "job": {"starts": 1, "more": 2}}
    assert list(unknown(Summary.model_validate(found))) == ["news", "job.more"]


@every("changes", [{}, COMPRESSED], ids=["plain", "compressed"])
def test_train_returns_what_summary_json_holds(tmp_path: Path, changes: dict[str, Any]) -> None:
    summary = shardkeep.train(JOB | changes, run_dir=tmp_path / "run", quiet=True)
    written = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert not list(unknown(summary))
    assert summary.to_dict() == written | {"run_dir": str(tmp_path / "run")}
    assert summary.status == "completed" and summary.run_dir == tmp_path / "run"
    assert (summary.residuals_and_cache is None) == (not changes)
    with pytest.raises(ValidationError, match="frozen"):
        summary.steps = 3  # type: ignore[misc]


# ---- each start of a job, and the job over all of them ----


def figures(steps: int, samples: int, *, rate: float, step_ms: float, pushed: int, read: int = 0) -> dict[str, Any]:
    counted = {"push": {"values": pushed}, "read": {"ids": read}, "control": 1, "total": pushed + read + 1}
    return {
        "steps": steps,
        "samples": samples,
        "samples_per_s": rate,
        "step_ms": {"total": step_ms},
        "bytes": {**counted, "per_sample": 7.0},
    }


def summary_of(folder: RunFolder) -> dict[str, Any]:
    found = folder.summary()
    assert found is not None
    return found


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "run", JobConfig())
    shift(folder, 1000.0)
    return folder


def shift(folder: RunFolder, seconds: float) -> None:
    """Has the running start begun so much earlier."""
    path = folder.path / "starts.json"
    starts = json.loads(path.read_text())
    starts[-1]["clock"]["monotonic"] -= seconds
    starts[-1]["began"] = (datetime.fromisoformat(starts[-1]["began"]) - timedelta(seconds=seconds)).isoformat()
    path.write_text(json.dumps(starts))


def test_the_totals_of_a_job_are_those_of_all_its_starts(folder: RunFolder) -> None:
    first = figures(30, 300, rate=10.0, step_ms=4.0, pushed=1000, read=500)
    folder.finished("stopped", "", first | {"recoveries": [{"generation": 2}]})
    summary = summary_of(folder)
    for key in ("steps", "samples", "wall_s", "samples_per_s", "step_ms"):  # one start has the same figures twice
        assert summary["job"][key] == pytest.approx(summary[key]), key
    assert summary["job"]["bytes"]["total"] == summary["bytes"]["total"] and len(summary["starts"]) == 1
    folder = RunFolder.reopen(folder.path, JobConfig(), step=30, samples=300)
    shift(folder, 500.0)
    last = figures(40, 600, rate=30.0, step_ms=8.0, pushed=2000)
    folder.finished("completed", "", last | {"recoveries": [{"generation": 5}]})
    summary, job = summary_of(folder), summary_of(folder)["job"]
    assert [(s["from_step"], s["to_step"], s["samples"], s["status"]) for s in summary["starts"]] == [
        (0, 30, 300, "stopped"),
        (30, 40, 300, "completed"),
    ]
    assert (summary["steps"], summary["samples"], summary["samples_per_s"]) == (40, 600, 30.0)
    assert 500.0 <= summary["wall_s"] < 600.0 and 1500.0 <= job["wall_s"] < 1700.0
    assert (job["starts"], job["steps"], job["samples"]) == (2, 40, 600)
    assert job["samples_per_s"] == pytest.approx(600 / (300 / 10 + 300 / 30))
    assert job["step_ms"] == {"total": 5.0}
    assert job["bytes"] == {
        "push": {"values": 3000}, "read": {"ids": 500}, "control": 2, "total": 3502, "per_sample": 3002 / 600,
    }  # fmt: skip
    assert job["bytes_unknown_of_starts"] == 0
    assert [recovery["generation"] for recovery in summary["recoveries"]] == [2, 5] and job["recoveries"] == 2


def test_what_fp32_would_have_sent_is_a_sum_over_starts_that_all_know_it(folder: RunFolder) -> None:
    first, last = (figures(steps, 10 * steps, rate=10.0, step_ms=4.0, pushed=3000) for steps in (30, 60))
    first["bytes"]["fp32"] = {"push": 9000}
    folder.finished("stopped", "", first)
    again = RunFolder.reopen(folder.path, JobConfig(), step=30, samples=300)
    again.finished("completed", "", last)
    assert "fp32" not in summary_of(again)["job"]["bytes"]
    last["bytes"]["fp32"] = {"push": 8000}
    again.finished("completed", "", last)
    assert summary_of(again)["job"]["bytes"]["fp32"] == {"push": 17_000}


def test_a_start_that_was_killed_counts_by_its_records(folder: RunFolder) -> None:
    folder.progress({"step": 20, "samples": 200, "samples_per_s": 8.0, "step_ms": {"total": 3.0}})
    folder.standing({"recoveries": {"done": [{"generation": 2}]}})
    folder = RunFolder.reopen(folder.path, JobConfig(), step=10, samples=100)
    folder.finished("completed", "", figures(40, 400, rate=30.0, step_ms=8.0, pushed=2000))
    summary = summary_of(folder)
    killed, last = summary["starts"]
    assert (killed["status"], killed["to_step"], killed["samples"], killed["bytes"]) == ("killed", 20, 200, None)
    assert 1000.0 <= killed["wall_s"] < 1100.0 and last["samples"] == 300
    assert summary["job"]["bytes_unknown_of_starts"] == 1 and summary["job"]["recoveries"] == 1
    assert [recovery["generation"] for recovery in summary["recoveries"]] == [2]


def test_a_coordinator_that_takes_over_counts_from_the_start_and_a_resumed_job_that_fails_at_once_is_where_it_was(
    folder: RunFolder,
) -> None:
    folder.progress({"step": 20, "samples": 200})
    RunFolder(folder.path).finished("failed", "server 0 was killed", None)
    summary = summary_of(folder)
    assert 1000.0 <= summary["wall_s"] < 1100.0 and (summary["steps"], summary["samples"]) == (20, 200)
    folder = RunFolder.reopen(folder.path, JobConfig(), step=20, samples=200)
    folder.finished("failed", "no data", None)
    summary = summary_of(folder)
    assert (summary["steps"], summary["samples"]) == (20, 200) and summary["starts"][-1]["samples"] == 0


def test_after_a_reboot_the_clock_on_the_wall_counts(folder: RunFolder) -> None:
    path = folder.path / "starts.json"
    path.write_text(path.read_text().replace('"boot": "', '"boot": "another'))
    wall_s = Starts(folder.path).wall_s()
    assert wall_s is not None and 1000.0 <= wall_s < 1100.0
