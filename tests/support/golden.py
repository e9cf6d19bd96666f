"""The golden job: one completed `sync` job of real processes over sockets, profiled, that many tests only read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from shardkeep.run.folder import RunFolder
from tests.support.cluster import Cluster, Ended, patient
from tests.support.once import once

STEPS = 200
TRAINED: dict[str, Any] = {
    "name": "golden",
    "seed": 3,
    "servers": 2,
    "workers": 2,
    "data": {
        "synthetic": {"train_samples": 20_000, "eval_samples": 3000, "num_dense": 3, "table_sizes": [50, 90, 3000]}
    },
    "model": {"bottom": [8], "hidden": [8], "dropout": 0.1},
    "tower": {"compile": "off", "amp": "off", "optimizer": {"name": "adam"}},
    "consistency": {"mode": "sync"},
    "train": {"batch_size": 50, "report_every_s": 0.1},
    "eval": {"every_steps": 50},
    "checkpoint": {"every_steps": 40, "keep": 2},
}
"""What it trains. A test that ends a job early resumes it and compares the digest with the golden job's."""
GOLDEN = {
    **TRAINED,
    "transport": {"same_host": "sockets"},
    "profile": {"start": 5, "steps": 4},
    "telemetry": {"every_s": 0.05},
}


@dataclass(frozen=True)
class Golden:
    """Nobody writes into its folder: a test that changes a run copies it first."""

    config: dict[str, Any]
    ended: Ended
    folder: RunFolder

    @property
    def summary(self) -> dict[str, Any]:
        return self.folder.summary() or {}


def run_golden(folders: pytest.TempPathFactory) -> Golden:
    """Runs the job, once for all workers; it ends with exit code 0 and nothing on stderr."""
    found = once(folders, "golden", _run)
    return Golden(patient(GOLDEN), Ended(**found["ended"]), RunFolder(Path(found["folder"])))


def _run(folder: Path) -> dict[str, Any]:
    with Cluster(folder) as cluster:
        job, run = cluster.job(GOLDEN, name="golden")
        ended = job.end()
        assert (ended.code, ended.err) == (0, ""), job.printed()
    return {"ended": asdict(ended), "folder": str(run.path)}
