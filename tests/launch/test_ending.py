"""What is named as the end of a job, where the coordinator's verdict and the deaths that the launcher saw differ."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.errors import JobError
from shardkeep.base.exit_codes import code_of_leaving
from shardkeep.config import JobConfig
from shardkeep.launch.processes.children import Death
from shardkeep.launch.stopping.ending import Ending
from shardkeep.run.folder import RunFolder
from tests.support.cases import every

KILLED = Death("worker", 0, 70, -signal.SIGKILL, "", "the memory limit of 520.0 MB of /box was reached")
ABORTED = Death("worker", 0, 70, -signal.SIGABRT, "")
LEFT = Death("worker", 1, 71, code_of_leaving(signal.SIGTERM), "")
FAILED = Death("worker", 1, 71, 1, "no such column")
OWN_FAILURE = "worker 1 failed (exit code 1): no such column"
OF_THE_DEATH = "worker 0 (pid 70) ended: killed by SIGKILL; the memory limit of 520.0 MB of /box was"


@every(
    ("verdict", "deaths", "given_up", "text"),
    [
        ({"message": OWN_FAILURE}, [ABORTED, FAILED], False, OWN_FAILURE),
        ({"message": "worker 1 failed: worker 0 hung up", "symptom": True}, [KILLED, FAILED], False, OF_THE_DEATH),
        ({"message": "worker 1 (pid 71) left on SIGTERM; it died 4 times"}, [KILLED, LEFT], True, OF_THE_DEATH),
    ],
    ids=["another aborts after its failure", "a failure that followed from a death", "ended by the launcher"],
)
def test_the_cause_of_the_end_is_named(
    tmp_path: Path, verdict: dict[str, Any], deaths: list[Death], given_up: bool, text: str
) -> None:
    """The coordinator knows of no death."""
    config = JobConfig.model_validate({"servers": 1, "workers": 2})
    run = RunFolder.create(tmp_path / "run", config)
    run.finished("failed", verdict["message"], {"steps": 3, **verdict})
    with pytest.raises(JobError) as caught:
        Ending(config, run, step=3, given_up=given_up).conclude(deaths, interrupted=False, heard=lambda death: False)
    summary = json.loads((run.path / "summary.json").read_text())
    message, _, logs = str(caught.value).partition("; logs: ")
    assert message.startswith(text) and "SIGTERM" not in message
    assert logs == str(run.logs) and summary["message"] == message and summary["status"] == "failed"
    assert not (summary.get("symptom") and text == OF_THE_DEATH)
