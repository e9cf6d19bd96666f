"""What is named as the end of a job, where the coordinator's verdict and the deaths that the launcher saw differ."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.errors import JobError
from shardkeep.base.exit_codes import code_of_leaving
from shardkeep.config import JobConfig
from shardkeep.launch.processes.children import Death
from shardkeep.launch.stopping.ending import Ending
from shardkeep.run.folder import RunFolder

KILLED = Death("worker", 0, 70, -signal.SIGKILL, "", "the memory limit of 520.0 MB of /box was reached")
ABORTED = Death("worker", 0, 70, -signal.SIGABRT, "")
LEFT = Death("worker", 1, 71, code_of_leaving(signal.SIGTERM), "")
FAILED = Death("worker", 1, 71, 1, "no such column")


def ends(folder: Path, verdict: dict[str, Any], deaths: Sequence[Death], *, given_up: bool = False) -> str:
    """The launcher's message, which summary.json has as well; the coordinator knows of no death."""
    config = JobConfig.model_validate({"servers": 1, "workers": 2})
    run = RunFolder.create(folder / "run", config)
    if verdict:
        run.finished("failed", verdict.pop("message"), {"steps": 3, **verdict})
    ending = Ending(config, run, step=3, given_up=given_up)
    with pytest.raises(JobError) as caught:
        ending.conclude(deaths, interrupted=False, heard=lambda death: False)
    summary = json.loads((run.path / "summary.json").read_text())
    text, _, logs = str(caught.value).partition("; logs: ")
    assert logs == str(run.logs) and summary["message"] == text and summary["status"] == "failed"
    return text


def test_a_members_own_failure_stays_the_cause_when_another_aborts_after_it(tmp_path: Path) -> None:
    verdict = {"message": "worker 1 failed (exit code 1): no such column"}
    assert ends(tmp_path, verdict, [ABORTED, FAILED]) == "worker 1 failed (exit code 1): no such column"


def test_a_failure_that_followed_from_a_death_gives_way_to_the_death(tmp_path: Path) -> None:
    verdict = {"message": "worker 1 failed (exit code 1): worker 0 hung up", "symptom": True}
    text = ends(tmp_path, verdict, [KILLED, FAILED])
    assert text.startswith("worker 0 (pid 70) ended: killed by SIGKILL; the memory limit of 520.0 MB of /box was")
    assert "symptom" not in json.loads((tmp_path / "run" / "summary.json").read_text())


def test_a_job_that_the_launcher_gave_up_is_not_blamed_on_the_members_that_it_ended(tmp_path: Path) -> None:
    verdict = {"message": "worker 1 (pid 71 on 127.0.0.1) left on SIGTERM, step 3; it died 4 times"}
    text = ends(tmp_path, verdict, [KILLED, LEFT], given_up=True)
    assert text.startswith("worker 0 (pid 70) ended: killed by SIGKILL") and "SIGTERM" not in text
