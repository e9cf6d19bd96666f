"""Jobs whose processes are killed and stalled at exact points: they end with the model of an undisturbed job.

CI plays one job for each role, mode and kind of fault; `make chaos` plays all points in both ways, and many at random.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import os
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.harness import write
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.run.folder import RunFolder
from tests.support.cases import every
from tests.support.chaos import JOB, causes, completed, hurt_job
from tests.support.cluster import Cluster, within
from tests.support.golden import STEPS, Golden
from tests.support.hurt import (
    EXPIRED,
    MAIN,
    POINTS,
    SILENT,
    WRITE,
    Astray,
    Hurt,
    environment,
    in_turn,
    missed,
    pid_of,
    strayed,
)

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(600)]
RANDOM_KILLS = int(os.environ.get("RANDOM_KILLS", "200"))
"""Kills of one job at random."""


def check_undisturbed(summary: dict[str, Any], golden: Golden) -> None:
    assert summary["recoveries"]
    assert summary["state_digest"] == golden.summary["state_digest"]
    assert summary["eval"] == golden.summary["eval"]


def nothing_lost(summary: dict[str, Any]) -> bool:
    return not any(recovery["went_back"] or recovery["lost_steps"] for recovery in summary["recoveries"])


def test_in_sync_deaths_of_every_role_change_no_bit_of_the_model(cluster: Cluster, golden: Golden) -> None:
    hurts = in_turn(
        Hurt("coordinator 0", "progress", 2), Hurt("server 0", "push received", 60, companions=("worker 1",))
    )
    summary = hurt_job(cluster, JOB, hurts)
    check_undisturbed(summary, golden)
    assert nothing_lost(summary) and "the coordinator was restarted" in causes(summary)


@every("function", sorted({WRITE, EXPIRED, SILENT, *(point.function for point in POINTS.values())}))
def test_every_function_that_is_hurt_exists(function: str) -> None:
    """The other tests here run long: a renamed function is seen here."""
    module, _, name = function.partition(":")
    assert callable(attrgetter(name)(importlib.import_module(module)))


# ---- one job for each role, mode and kind of fault ----

HURTS: dict[str, tuple[dict[str, int], ...]] = {
    "server 1": (
        {"formed": 1, "torn": 50, "push journaled": 50, "push staged": 50, "applied": 25, "snapshotting": 2},
        {"forming": 1, "pull received": 50, "rows ready": 50, "push received": 50, "read received": 3, "leaving": 1},
    ),
    "worker 1": (
        {"formed": 1, "pushing": 60, "push sent": 60, "closed": 1},
        {"forming": 1, "pulling": 60, "pull sent": 60, "closing": 1},
        {"evaluating": 2, "leaving": 1},
    ),
    "worker 0": ({"committing": 1, "committed": 2, "saving tower": 1, "closed": 1},),
    "coordinator 0": (
        {"hello": 2, "join": 2, "progress": 10, "eval told": 2},
        {"checkpoint told": 2, "summary told": 1, "member left": 1},
    ),
}
"""By member, for each job: the points at which the member is hurt (tests/support/hurt.py), and how often one of its
processes has come there by then. Each hurt ends one process, and its replacement meets the next."""
HOW = {"killed": ("SIGKILL",), "stalled": ("SIGSTOP",), "in turn": ("SIGKILL", "SIGSTOP")}
IN_CI = [(member, 0, "in turn") for member in ("server 1", "worker 1", "coordinator 0")]
IN_CHAOS = [(m, number, how) for m in HURTS for number in range(len(HURTS[m])) for how in ("killed", "stalled")]


@pytest.mark.group("hurt roles")
@pytest.mark.parametrize(
    ("member", "number", "how"),
    [*(pytest.param(*case, marks=pytest.mark.slow) for case in IN_CI),
     *(pytest.param(*case, marks=pytest.mark.chaos) for case in IN_CHAOS)],
)  # fmt: skip
def test_a_hurt_at_each_point_of_a_role_changes_no_bit(
    cluster: Cluster, golden: Golden, member: str, number: int, how: str
) -> None:
    pairs = zip(HURTS[member][number].items(), itertools.cycle(HOW[how]), strict=False)
    summary = hurt_job(cluster, JOB, [Hurt(member, *point, signal=name) for point, name in pairs])
    check_undisturbed(summary, golden)
    if member != "coordinator 0" and how == "in turn":
        assert f"{member} (pid" in causes(summary) and "sent no heartbeat for 150 s (lease_s)" in causes(summary)


@pytest.mark.group("a lease that ends")
@pytest.mark.slow  # the one job here whose lease ends by the clock
def test_a_stalled_worker_is_replaced_when_its_lease_ends_and_never_wakes_up(cluster: Cluster, golden: Golden) -> None:
    stall = Hurt("worker 1", "pushing", 60, "SIGSTOP", silent=False)
    summary = hurt_job(cluster, {**JOB, "liveness": {"lease_s": 15.0}}, [stall])
    check_undisturbed(summary, golden)
    assert "worker 1 (pid" in causes(summary) and "sent no heartbeat for 15 s" in causes(summary)


@pytest.mark.slow
def test_deaths_at_each_point_of_a_push_leave_each_step_applied_once(cluster: Cluster) -> None:
    """Without a barrier between steps, unlike in sync."""
    points = {
        "server 1": ["push received", "torn", "push journaled", "applied"],
        "worker 1": ["pull sent", "push sent"],
    }
    hurts = in_turn(*(Hurt(member, point, 12) for member in points for point in points[member]))
    summary = hurt_job(cluster, {**JOB, "consistency": {"mode": "bounded"}}, hurts)
    died = Counter((d["role"], d["index"]) for r in summary["recoveries"] for d in r["died"])
    assert died == {("server", 1): 4, ("worker", 1): 2}
    assert nothing_lost(summary)


@pytest.mark.slow
def test_messages_that_go_astray_between_processes_count_once(cluster: Cluster, golden: Golden, tmp_path: Path) -> None:
    """Late, in another order, twice, and one in 300 lost, or its answer: then all begin a new generation."""
    config = {**JOB, "recovery": {"restarts": 10}}
    config["liveness"] = {**JOB["liveness"], "step_timeout_s": 10.0}  # the wait for a message that is lost
    astray = [Astray(worker=0, lost=300), Astray(worker=1, lost=0)]
    job, folder = cluster.job(config, env=environment(tmp_path, astray=astray), main=MAIN)
    summary = completed(job, folder)
    counts = strayed(tmp_path)
    assert counts["twice"] > 200 and counts["lost"] >= 1
    assert not any(recovery["lost_steps"] for recovery in summary["recoveries"])
    check_undisturbed(summary, golden)


@pytest.mark.slow
def test_a_server_without_a_journal_goes_on_from_the_last_checkpoint_beside_the_others(
    cluster: Cluster, tmp_path: Path
) -> None:
    config = {**JOB, "consistency": {"mode": "bounded"}, "checkpoint": {"every_steps": 40}}
    config["recovery"] = {"journal": "off", "max_lost_steps": STEPS}
    hurts = [Hurt("server 1", "applied", 350)]
    job, folder = cluster.job(config, env=environment(tmp_path, hurts), main=MAIN)
    ended, summary = job.end(), folder.summary() or {}
    assert ended.code == 0 and not missed(tmp_path, hurts), job.printed()
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    (recovery,) = summary["recoveries"]
    (died,) = recovery["died"]
    assert (died["role"], died["index"], recovery["went_back"]) == ("server", 1, False)
    assert died["lost_from"] in (40, 80, 120, 160)
    assert recovery["lost_steps"] == recovery["step"] - died["lost_from"] > 0
    assert f"server 1 lost its updates since step {died['lost_from']}" in job.printed()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(path)], check=True)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_disk_that_is_full_for_a_while_costs_no_step_and_no_bit(
    cluster: Cluster, small_disk: Path, tmp_path: Path
) -> None:
    """It is filled while a worker is stopped at step 60, and has room again while it is at step 110."""
    config = {**JOB, "checkpoint": {"every_steps": 20}, "train": {**JOB["train"], "epochs": 2}}
    whole = completed(*cluster.job(config, name="whole"), steps=2 * STEPS)
    folder = RunFolder(small_disk / "run")
    checkpoints = Checkpoints(folder.path / "checkpoints")
    full, free = (Hurt("worker 1", "pushing", 2 * step, "SIGSTOP", silent=False) for step in (60, 110))
    place = (str(cluster.write(config)), "--run-dir", str(folder.path))
    job = cluster.command("train", *place, env=environment(tmp_path, [full, free]), main=MAIN)
    within(200, lambda: not missed(tmp_path, [full]), "not stopped", lambda: job.running)
    within(200, lambda: bool(checkpoints.complete()), "no checkpoint", lambda: job.running)
    filler = small_disk / "filler"
    for size in (1 << 20, 1 << 12):
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
            while file.write(bytes(size)):
                pass
    worker = psutil.Process(pid_of(tmp_path, "worker 1"))
    worker.resume()
    stopped = lambda: not missed(tmp_path, [free]) and worker.status() == psutil.STATUS_STOPPED  # noqa: E731
    within(200, stopped, "no step 110", lambda: job.running)
    filler.unlink()
    worker.resume()
    summary = completed(job, folder, steps=2 * STEPS)
    assert summary["state_digest"] == whole["state_digest"] and not summary["recoveries"]
    assert any("No space left on device" in text for text in summary["warnings"])


# ---- only in `make chaos` ----


STEADY = {
    "worker": {"pulling": 60, "pull sent": 60, "pushing": 60, "push sent": 60},
    "server": {"pull received": 60, "rows ready": 60, "push received": 60, "torn": 60, "push journaled": 60,
               "push staged": 60, "applied": 30},
    "coordinator": {"progress": 12},
}  # fmt: skip
"""By role: points to which each step comes, and how often within some 30 steps."""


def random_hurts(count: int, *, seed: int) -> list[Hurt]:
    """Kills of random members at random points; one in ten is of two members, one in eight while the last one is
    recovered."""
    rng = random.Random(seed)
    hurts: list[Hurt] = []
    for _ in range(count):
        member, other = rng.sample(["coordinator 0", "server 0", "server 1", "worker 0", "worker 1"], 2)
        point, times = rng.choice(list(STEADY[member[:-2]].items()))
        hurt = Hurt(member, point, rng.randint(1, times), companions=(other,) if rng.random() < 0.1 else ())
        if hurts and rng.random() < 0.125 and not hurts[-1].member.startswith("coordinator"):
            hurt = replace(hurt, point="join" if member.startswith("coordinator") else "forming", times=1)
        hurts.append(hurt)
    return in_turn(*hurts)


@pytest.mark.chaos
@pytest.mark.timeout(1600 + 20 * RANDOM_KILLS)
def test_many_random_kills_change_no_bit(cluster: Cluster) -> None:
    epochs = math.ceil(RANDOM_KILLS * 30 / STEPS)
    config = {**JOB, "train": {**JOB["train"], "epochs": epochs}, "eval": {"every_steps": 1000}}
    config["recovery"] = {"restarts": 5}
    whole, folder = cluster.job(config, name="whole")
    digest = completed(whole, folder, steps=epochs * STEPS, limit_s=600.0)["state_digest"]
    hurts = random_hurts(RANDOM_KILLS, seed=5)
    summary = hurt_job(cluster, config, hurts, steps=epochs * STEPS, limit_s=4000.0)
    assert summary["state_digest"] == digest
    assert not any(recovery["went_back"] for recovery in summary["recoveries"])
    if (path := os.environ.get("CHAOS_JSON")) is not None:
        kills = Counter(member for hurt in hurts for member in (hurt.member, *hurt.companions))
        seconds = sorted(recovery["seconds"] for recovery in summary["recoveries"] if recovery["seconds"])
        told = {"kills by process": dict(kills), "steps": summary["steps"], "seconds without a group": seconds}
        write(Path(path), f"chaos: {RANDOM_KILLS} random kills", told)
