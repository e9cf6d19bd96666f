"""A job of a few seconds that outlives kills."""

from __future__ import annotations

from typing import Any

from shardkeep.run.folder import RunFolder
from tests.support.cluster import Command
from tests.support.golden import STEPS, TRAINED

JOB: dict[str, Any] = {
    **TRAINED,
    "train": {**TRAINED["train"], "report_every_s": 0.02},
    "checkpoint": {"every_steps": 130},
    "liveness": {"lease_s": 4.0},
}
SHORT_STEPS = 200
SHORT = {
    **JOB,
    "train": {**JOB["train"], "max_steps": SHORT_STEPS},
    "eval": {"every_steps": 50},
    "checkpoint": {"every_steps": 65},
}
"""Half of it: 100 steps take 3 CPU s, a death 2."""


def completed(job: Command, folder: RunFolder, *, steps: int = STEPS, limit_s: float = 200.0) -> dict[str, Any]:
    """The summary of a job that ended well: every step applied once by every server, and nothing left behind."""
    ended = job.end(limit_s=limit_s)
    assert (ended.code, ended.err) == (0, ""), job.printed()
    summary = folder.summary() or {}
    assert (summary["status"], summary["steps"], summary["samples"]) == ("completed", steps, 100 * steps)
    servers = [p for p in summary["processes"] if p["role"] == "server"]
    assert [server["applied_steps"] for server in servers] == [steps] * len(servers)
    assert not list((folder.path / "recovery").glob("*/*")), "a completed job leaves nothing for its recovery"
    return summary
