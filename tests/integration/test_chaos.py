"""Jobs whose processes are killed and stalled at exact points: they end with the model of an undisturbed job.

CI plays one job for each role, mode and kind of fault; `make chaos` plays all points in both ways, and many at random.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import random
import re
import shutil
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import write
from tests.support.cases import every
from tests.support.chaos import JOB, causes, completed, hurt_job
from tests.support.cluster import Cluster, gone, within
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
MEMBERS = ["coordinator 0", "server 0", "server 1", "worker 0", "worker 1"]


def check_undisturbed(summary: dict[str, Any], golden: Golden) -> None:
    """The job ends with the golden job's model."""
    assert summary["recoveries"]
    assert summary["state_digest"] == golden.summary["state_digest"]
    assert summary["eval"] == golden.summary["eval"]


def check_nothing_lost(summary: dict[str, Any]) -> None:
    assert not any(recovery["went_back"] or recovery["lost_steps"] for recovery in summary["recoveries"])


def test_in_sync_deaths_of_every_role_change_no_bit_of_the_model(cluster: Cluster, golden: Golden) -> None:
    hurts = in_turn(
        Hurt("coordinator 0", "progress", 2), Hurt("server 0", "push received", 60, companions=("worker 1",))
    )
    summary = hurt_job(cluster, JOB, hurts)
    check_undisturbed(summary, golden)
    check_nothing_lost(summary)
    assert "the coordinator was restarted" in causes(summary)


@every("function", sorted({WRITE, EXPIRED, SILENT, *(point.function for point in POINTS.values())}))
def test_every_function_that_is_hurt_exists(function: str) -> None:
    """The other tests here run long: a renamed function is seen here."""
    module, _, name = function.partition(":")
    assert callable(attrgetter(name)(importlib.import_module(module)))


# ---- one job for each role, mode and kind of fault ----

KILLED, STALLED, IN_TURN = ("SIGKILL",), ("SIGSTOP",), ("SIGKILL", "SIGSTOP")
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
IN_CI = {member: HURTS[member][0] for member in ("server 1", "worker 1", "coordinator 0")}


def hurt_at(member: str, points: dict[str, int], how: Sequence[str]) -> list[Hurt]:
    return [
        Hurt(member, *point, signal=name) for point, name in zip(points.items(), itertools.cycle(how), strict=False)
    ]


@pytest.mark.group("hurt roles")
@pytest.mark.slow
@pytest.mark.parametrize("member", IN_CI)
def test_a_hurt_at_each_point_of_a_role_changes_no_bit(cluster: Cluster, golden: Golden, member: str) -> None:
    summary = hurt_job(cluster, JOB, hurt_at(member, IN_CI[member], IN_TURN))
    check_undisturbed(summary, golden)
    assert f"{member} (pid" in causes(summary) or member == "coordinator 0"
    assert "sent no heartbeat for 150 s (lease_s)" in causes(summary) or member == "coordinator 0"


@pytest.mark.chaos
@pytest.mark.parametrize("how", [KILLED, STALLED], ids=["killed", "stalled"])
@pytest.mark.parametrize(
    ("member", "points"),
    [pytest.param(member, points, id=f"{member}: {', '.join(points)}") for member in HURTS for points in HURTS[member]],
)
def test_a_hurt_at_each_point_changes_no_bit(
    cluster: Cluster, golden: Golden, member: str, points: dict[str, int], how: Sequence[str]
) -> None:
    check_undisturbed(hurt_job(cluster, JOB, hurt_at(member, points, how)), golden)


@pytest.mark.group("a lease that ends")
@pytest.mark.slow  # the one job here whose lease ends by the clock
def test_a_stalled_worker_is_replaced_when_its_lease_ends_and_never_wakes_up(cluster: Cluster, golden: Golden) -> None:
    stall = Hurt("worker 1", "pushing", 60, "SIGSTOP", silent=False)
    summary = hurt_job(cluster, {**JOB, "liveness": {"lease_s": 15.0}}, [stall])
    check_undisturbed(summary, golden)
    assert "worker 1 (pid" in causes(summary) and "sent no heartbeat for 15 s" in causes(summary)


PUSHES = {"server 1": ["push received", "torn", "push journaled", "applied"], "worker 1": ["pull sent", "push sent"]}


@pytest.mark.parametrize(
    "mode", [pytest.param("bounded", marks=pytest.mark.slow), pytest.param("async", marks=pytest.mark.chaos)]
)
def test_deaths_at_each_point_of_a_push_leave_each_step_applied_once(cluster: Cluster, mode: str) -> None:
    hurts = in_turn(*(Hurt(member, point, 12) for member, points in PUSHES.items() for point in points))
    summary = hurt_job(cluster, {**JOB, "consistency": {"mode": mode}}, hurts)
    died = Counter((d["role"], d["index"]) for r in summary["recoveries"] for d in r["died"])
    assert died == {("server", 1): 4, ("worker", 1): 2}
    check_nothing_lost(summary)


@pytest.mark.group("messages astray")
@pytest.mark.parametrize(
    "mode", [pytest.param("sync", marks=pytest.mark.slow), pytest.param("bounded", marks=pytest.mark.chaos)]
)
def test_messages_that_go_astray_between_processes_count_once(
    cluster: Cluster, golden: Golden, tmp_path: Path, mode: str
) -> None:
    """Late, in another order, twice, and one in 300 lost, or its answer: then all begin a new generation."""
    config = {**JOB, "consistency": {"mode": mode}, "recovery": {"restarts": 10}}
    config["liveness"] = {**JOB["liveness"], "step_timeout_s": 10.0}  # the wait for a message that is lost
    astray = [Astray(worker=0, lost=300), Astray(worker=1, lost=0)]
    job, folder = cluster.job(config, env=environment(tmp_path, astray=astray), main=MAIN)
    summary = completed(job, folder)
    counts = strayed(tmp_path)
    assert counts["twice"] > 200 and counts["lost"] >= 1
    assert summary["recoveries"] and not any(recovery["lost_steps"] for recovery in summary["recoveries"])
    if mode == "sync":
        assert summary["state_digest"] == golden.summary["state_digest"]


def unjournaled(cluster: Cluster, tmp_path: Path, *, saves: int | str) -> tuple[dict[str, Any], str]:
    """The one recovery of a bounded job that keeps no journal and whose server 1 dies, and what the job printed."""
    config = {**JOB, "consistency": {"mode": "bounded"}, "checkpoint": {"every_steps": saves}}
    config["recovery"] = {"journal": "off", "max_lost_steps": STEPS}
    hurts = [Hurt("server 1", "applied", 350)]
    job, folder = cluster.job(config, env=environment(tmp_path, hurts), main=MAIN)
    ended = job.end()
    assert ended.code == 0 and not missed(tmp_path, hurts), job.printed()
    summary = folder.summary() or {}
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    (recovery,) = summary["recoveries"]
    assert [(d["role"], d["index"]) for d in recovery["died"]] == [("server", 1)]
    return dict(recovery), job.printed()


@pytest.mark.slow
def test_a_server_without_a_journal_goes_on_from_the_last_checkpoint_beside_the_others(
    cluster: Cluster, tmp_path: Path
) -> None:
    recovery, printed = unjournaled(cluster, tmp_path, saves=40)
    lost_from = recovery["died"][0]["lost_from"]
    assert not recovery["went_back"] and lost_from in (40, 80, 120, 160)
    assert recovery["lost_steps"] == recovery["step"] - lost_from > 0
    assert f"server 1 lost its updates since step {lost_from}" in printed


# ---- only in `make chaos` ----


@pytest.mark.chaos
def test_a_server_that_lost_all_its_updates_has_the_job_begin_anew(cluster: Cluster, tmp_path: Path) -> None:
    recovery, printed = unjournaled(cluster, tmp_path, saves="off")
    assert (recovery["step"], recovery["went_back"]) == (0, True)
    assert recovery["lost_steps"] >= 150 and "training resumes at step 0 from the beginning" in printed


@pytest.mark.chaos
def test_a_bounded_job_of_one_worker_outlives_its_death_and_applies_every_step_once(cluster: Cluster) -> None:
    config = {**JOB, "workers": 1, "consistency": {"mode": "bounded", "staleness": 2}}
    config["train"] = {**JOB["train"], "batch_size": 100}
    config["compression"] = {"push": {"keep_rows": 0.3, "pool_rows": 3000}}
    hurts = in_turn(Hurt("worker 0", "pushing", 250), Hurt("worker 0", "pushing", 80, companions=("server 0",)))
    summary = hurt_job(cluster, config, hurts)
    assert len(summary["recoveries"]) >= 2
    assert 0.5 < summary["eval"]["auc"] <= summary["eval"]["best_auc"]


@pytest.mark.chaos
@pytest.mark.parametrize("victim", ["worker 1", "server 1"])
def test_when_all_checkpoints_are_deleted_a_job_goes_on_from_what_its_members_hold_or_names_what_is_missing(
    cluster: Cluster, golden: Golden, tmp_path: Path, victim: str
) -> None:
    stopped, folder = cluster.job({**JOB, "train": {**JOB["train"], "max_steps": 130}})
    assert stopped.end().code == 0
    changes = (f"train.max_steps={STEPS}", "checkpoint.every_steps=1000", "recovery.max_lost_steps=100")
    settings = [part for change in changes for part in ("--set", change)]
    point = "pushing" if victim == "worker 1" else "push received"
    stall = Hurt(victim, point, 40, "SIGSTOP", silent=False)
    job = cluster.command(
        "train", "--resume", str(folder.path), *settings, env=environment(tmp_path, [stall]), main=MAIN
    )
    within(200, lambda: not missed(tmp_path, [stall]), "not stalled", lambda: job.running)
    for checkpoint in (folder.path / "checkpoints").glob("step-*"):
        shutil.rmtree(checkpoint)
    os.kill(pid_of(tmp_path, victim), signal.SIGKILL)
    ended = job.end()
    summary = folder.summary() or {}
    if victim == "worker 1":
        assert (ended.code, summary["state_digest"]) == (0, golden.summary["state_digest"])
    else:
        assert ended.code == 1
        missing = f"the journal of server 1 begins after the checkpoint of step 130, which is missing in {folder.path}"
        assert missing in ended.err and "would be lost by going back to step 0" in ended.err


@pytest.mark.chaos
def test_roles_that_are_asked_to_leave_are_replaced_and_change_no_bit(cluster: Cluster, golden: Golden) -> None:
    asked = {"worker 1": "SIGTERM", "server 0": "SIGTERM", "worker 0": "SIGINT"}
    points = {"worker": "pushing", "server": "push received"}
    hurts = [Hurt(member, points[member[:-2]], 60, number) for member, number in asked.items()]
    summary = hurt_job(cluster, JOB, in_turn(*hurts))
    check_undisturbed(summary, golden)
    check_nothing_lost(summary)
    left = re.findall(r"^(\w+ \d) \(pid .*?\) left on (\w+)", causes(summary), flags=re.MULTILINE)
    assert dict(left) == asked


@pytest.mark.chaos
@pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux")
def test_without_its_fork_server_a_job_trains_on_and_replacements_are_spawned(
    cluster: Cluster, golden: Golden, tmp_path: Path
) -> None:
    stall = Hurt("worker 1", "pushing", 60, "SIGSTOP", companions=("server 0",), silent=False)
    job, folder = cluster.job(JOB, env=environment(tmp_path, [stall]), main=MAIN)
    within(200, lambda: not missed(tmp_path, [stall]), "not stalled", lambda: job.running)
    servers = [child for child in job.process.children() if "fork-server" in child.cmdline()]
    for server in servers:
        server.kill()
    for victim in ("worker 1", "server 0"):
        os.kill(pid_of(tmp_path, victim), signal.SIGKILL)
    summary = completed(job, folder)
    assert len(servers) == 1
    assert job.printed().count("roles are started by exec from now on") == 1
    assert all(f"{victim} (pid" in causes(summary) for victim in ("worker 1", "server 0")), causes(summary)
    assert summary["state_digest"] == golden.summary["state_digest"]


@pytest.mark.chaos
def test_a_role_that_is_asked_to_leave_in_a_sum_with_a_stalled_one_ends_at_its_limit(
    cluster: Cluster, golden: Golden, tmp_path: Path
) -> None:
    stall = Hurt("worker 1", "pushing", 60, "SIGSTOP", silent=False)
    config = {**JOB, "liveness": {**JOB["liveness"], "grace_s": 3.0}}
    job, folder = cluster.job(config, env=environment(tmp_path, [stall]), main=MAIN)
    within(200, lambda: not missed(tmp_path, [stall]), "not stalled", lambda: job.running)
    members = cluster.training(folder)
    members["worker 0"].send_signal(signal.SIGTERM)
    assert not gone([members["worker 0"]], limit_s=90)  # the lease is 150 s
    members["worker 1"].resume()
    summary = completed(job, folder)
    assert summary["state_digest"] == golden.summary["state_digest"]
    assert "worker 0 (pid" in causes(summary) and "left on SIGTERM" in causes(summary)


@pytest.mark.chaos
def test_a_worker_whose_kept_states_are_damaged_takes_the_tower_of_another(
    cluster: Cluster, golden: Golden, tmp_path: Path
) -> None:
    stall = Hurt("worker 1", "pushing", 60, "SIGSTOP", companions=("worker 0",), silent=False)
    job, folder = cluster.job(JOB, env=environment(tmp_path, [stall]), main=MAIN)
    within(200, lambda: not missed(tmp_path, [stall]), "not stalled", lambda: job.running)
    members = cluster.training(folder)
    kept = list(folder.path.glob("recovery/*/worker-0/**/*.state"))
    for path in kept:
        with path.open("r+b") as file:  # in place: the process has it mapped
            file.seek(-9, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-9, os.SEEK_END)
            file.write(bytes([byte ^ 4]))
    members["worker 1"].kill()
    members["worker 0"].resume()
    summary = completed(job, folder)
    assert kept and "a kept state is damaged" in folder.log_path("worker", 0).read_text(encoding="utf-8")
    assert summary["state_digest"] == golden.summary["state_digest"]


@pytest.mark.chaos
@pytest.mark.parametrize("victim", ["coordinator 0", "server 1", "worker 0", "worker 1"])  # all servers are alike
def test_a_death_while_another_is_recovered(cluster: Cluster, golden: Golden, victim: str) -> None:
    first = Hurt("worker 1", "pushing", 60) if victim != "worker 1" else Hurt("server 1", "push received", 60)
    second = Hurt(victim, "join" if victim == "coordinator 0" else "forming")
    check_undisturbed(hurt_job(cluster, JOB, in_turn(first, second)), golden)


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
        member, other = rng.sample(MEMBERS, 2)
        point, times = rng.choice(list(STEADY[member[:-2]].items()))
        hurt = Hurt(member, point, rng.randint(1, times), companions=(other,) if rng.random() < 0.1 else ())
        if hurts and rng.random() < 0.125 and not hurts[-1].member.startswith("coordinator"):
            hurt = replace(hurt, point="join" if member.startswith("coordinator") else "forming", times=1)
        hurts.append(hurt)
    return in_turn(*hurts)


def told_of(hurts: Sequence[Hurt], summary: dict[str, Any], *, digest: str) -> dict[str, Any]:
    """What a file of results says about random kills that `summary` outlived."""
    kills = Counter(member for hurt in hurts for member in (hurt.member, *hurt.companions))
    seconds = [recovery["seconds"] for recovery in summary["recoveries"] if recovery["seconds"]]
    return {
        "kills": kills.total(),
        "kills by process": dict(kills),
        "recoveries": len(summary["recoveries"]),
        "steps whose updates were lost": sum(recovery["lost_steps"] for recovery in summary["recoveries"]),
        "seconds without a group": {"median": statistics.median(seconds), "most": max(seconds)},
        "steps": summary["steps"],
        "samples": summary["samples"],
        "applied steps by server": [p["applied_steps"] for p in summary["processes"] if p["role"] == "server"],
        "digest": summary["state_digest"],
        "digest of the undisturbed job": digest,
    }


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
    if (path := os.environ.get("CHAOS_JSON")) is not None:
        write(Path(path), f"chaos: {RANDOM_KILLS} random kills", told_of(hurts, summary, digest=digest))
    assert not any(recovery["went_back"] for recovery in summary["recoveries"])


@pytest.mark.chaos
@pytest.mark.parametrize("mode", ["bounded", "async"])
def test_many_deaths_in_the_other_modes(cluster: Cluster, mode: str) -> None:
    summary = hurt_job(cluster, {**JOB, "consistency": {"mode": mode}}, random_hurts(5, seed=55))
    assert 0.5 < summary["eval"]["auc"] < summary["eval"]["best_auc"]
