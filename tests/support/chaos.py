"""A job of a few seconds that outlives deaths."""

from __future__ import annotations

from typing import Any

from shardkeep.run.folder import RunFolder
from tests.support.cluster import LEASE_S, Cluster, Command
from tests.support.golden import STEPS, TRAINED
from tests.support.hurt import MAIN, Hurt, environment, missed

JOB: dict[str, Any] = {
    **TRAINED,
    "train": {**TRAINED["train"], "report_every_s": 0.02},
    "checkpoint": {"every_steps": 65},
    "liveness": {"lease_s": LEASE_S},
}
"""Trains the model of the golden job. 100 steps take 3 CPU s, a death 2."""


EDITED: dict[str, Any] = {
    "name": "edited", "seed": 4, "servers": 1, "workers": 3, "threads": 2, "launch": {"start": "spawn"},
    "data": {"synthetic": {"train_samples": 900, "eval_samples": 90, "num_dense": 2, "table_sizes": [5, 9]}},
    "model": {"name": "dcn_v2"}, "tables": {"default": {"dim": 4, "optimizer": {"name": "adam", "lr": 0.5}}},
    "tower": {"optimizer": {"name": "sgd", "lr": 0.5}, "amp": "off"}, "train": {"batch_size": 7, "epochs": 9},
    "eval": {"every_steps": 3}, "consistency": {"mode": "async"}, "compression": {"tower": {"name": "topk"}},
    "checkpoint": {"every_steps": "off"}, "transport": {"same_host": "sockets"}, "liveness": {"lease_s": 1},
    "recovery": {"restarts": 0, "journal": "off"}, "web": {"page": "off"}, "telemetry": {"every_s": 9},
    "profile": {"steps": 2},
}  # fmt: skip
"""Another setting of every group, for a file that somebody edits while its job runs."""


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


def hurt_job(
    cluster: Cluster,
    config: dict[str, Any],
    hurts: list[Hurt],
    *arguments: str,
    name: str = "hurt",
    steps: int = STEPS,
    limit_s: float = 300.0,
    fresh: bool = False,
) -> dict[str, Any]:
    """The summary of a job that outlives the hurts, all of which have happened. `arguments`: more of `train`.
    `fresh`: as of Command."""
    # A launcher asks a dead coordinator for the last step in vain: deaths within a second count as of one step.
    config = {**config, "recovery": {"restarts": len(hurts) + 1, **config.get("recovery", {})}}
    folder = cluster.folder(f"{name}-hurts")
    job, run = cluster.job(config, *arguments, name=name, env=environment(folder, hurts), main=MAIN, fresh=fresh)
    summary = completed(job, run, steps=steps, limit_s=limit_s)
    assert not missed(folder, hurts), job.printed()
    return summary


def causes(summary: dict[str, Any]) -> str:
    """Of all recoveries: who died, and how."""
    deaths = [death["cause"] for recovery in summary["recoveries"] for death in recovery["died"]]
    return "\n".join([*deaths, *(recovery["cause"] for recovery in summary["recoveries"])])
