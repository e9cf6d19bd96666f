"""Early stopping and a plateau in `sync` while processes die: the same end, the same best model, the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chaos import JOB
from tests.support.cluster import Cluster, Command, RunFolder
from tests.support.faults import Fault, play
from tests.support.records import records_in

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.slow, pytest.mark.timeout(600)]
EVERY, PATIENCE = 20, 4


def ended(job: Command, folder: RunFolder) -> dict[str, Any]:
    done = job.end(limit_s=200)
    assert (done.code, done.err) == (0, ""), job.printed()
    summary = folder.summary() or {}
    assert summary["status"] == "completed"
    return summary


def test_deaths_in_the_middle_of_the_patience_change_neither_the_end_nor_the_best_model(cluster: Cluster) -> None:
    stopping = {"metric": "logloss", "patience": PATIENCE, "min_delta": 1.0}  # the first evaluation stays the best
    falling = {"metric": "auc", "patience": 2, "min_delta": 1.0, "factor": 0.3}
    config: dict[str, Any] = {
        **JOB,
        "train": {**JOB["train"], "early_stopping": stopping, "plateau": falling},
        "eval": {**JOB.get("eval", {}), "every_steps": EVERY},
        "checkpoint": {"every_steps": 30, "keep": 1},
    }
    whole = ended(*cluster.job(config, name="whole"))
    assert whole["steps"] == EVERY * (PATIENCE + 1) and whole["best"]["step"] == EVERY
    job, folder = cluster.job(config)
    faults = [
        Fault.kill("worker 1", at=EVERY + 5),
        Fault.kill("server 0", at=2 * EVERY + 3),
        Fault.kill("worker 0", "worker 1", at=3 * EVERY + 1),
        Fault.kill("coordinator 0", at=4 * EVERY + 2),  # the last: workers train on meanwhile, to the end
    ]
    assert not play(job, folder, faults, limit_s=200)
    summary = ended(job, folder)
    assert {r["lr_factor"] for r in records_in(folder.path / "metrics.jsonl") if r.get("phase") == "plateau"} == {
        0.3,
        0.09,
    }
    assert (summary["steps"], summary["best"], summary["eval"]) == (whole["steps"], whole["best"], whole["eval"])
    assert summary["state_digest"] == whole["state_digest"]
    assert f"step-{EVERY:08d}" in [path.name for path in (folder.path / "checkpoints").iterdir()]
