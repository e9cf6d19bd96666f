"""Jobs whose processes are killed and stalled on purpose: they end with the model of an undisturbed job.

`make chaos` and `make test-long` play all, `make chaos` with more kills; `make test` plays the test without the marker.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import write
from tests.support.chaos import JOB, SHORT, SHORT_STEPS, completed
from tests.support.cluster import Cluster, gone, stalled
from tests.support.faults import Fault, play, random_faults
from tests.support.golden import STEPS, Golden
from tests.support.hurt import MAIN, Astray, Hurt, environment, missed, strayed
from tests.support.once import once

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(1500)]
kill, stall = Fault.kill, Fault.stall
RANDOM_KILLS = int(os.environ.get("RANDOM_KILLS", "15"))
"""Kills of one job at random; `make chaos` sets 200."""
WAYS: dict[str, list[str]] = {"killed": ["SIGKILL"], "stalled": ["SIGSTOP"]}
"""How a member is hurt at the points of a job, one after the other. Only `make chaos` hurts it in both ways at each."""
if "RANDOM_KILLS" not in os.environ:
    WAYS = {"killed and stalled in turn": ["SIGKILL", "SIGSTOP"]}
MEMBERS = ["coordinator 0", "server 0", "server 1", "worker 0", "worker 1"]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary of the short job, in sync, without any fault. It runs once."""

    def train(folder: Path) -> dict[str, Any]:
        with Cluster(folder) as cluster:
            return completed(*cluster.job(SHORT), steps=SHORT_STEPS)

    summary: dict[str, Any] = once(tmp_path_factory, "undisturbed", train)
    return summary


def disturbed(
    cluster: Cluster, config: dict[str, Any], *faults: Fault, steps: int = SHORT_STEPS, limit_s: float = 200.0
) -> dict[str, Any]:
    """The summary of a job that outlives the faults."""
    job, folder = cluster.job(config)
    not_done = play(job, folder, faults, limit_s=limit_s)
    summary = completed(job, folder, steps=steps, limit_s=limit_s)
    assert not not_done
    return summary


def hurt_job(cluster: Cluster, config: dict[str, Any], folder: Path, *hurts: Hurt) -> dict[str, Any]:
    """The summary of a short job that outlives the hurts. All hurts have happened."""
    # A launcher asks a dead coordinator for the last step in vain: deaths within a second count as of one step.
    config = {**config, "recovery": {"restarts": len(hurts)}}
    job, run = cluster.job(config, env=environment(folder, hurts), main=MAIN)
    summary = completed(job, run, steps=SHORT_STEPS, limit_s=400.0)  # a stalled process is lost after 4 s
    assert not missed(folder, hurts)
    return summary


def causes(summary: dict[str, Any]) -> str:
    return "\n".join(recovery["cause"] for recovery in summary["recoveries"])


def test_in_sync_deaths_of_every_role_change_no_bit_of_the_model(cluster: Cluster, golden: Golden) -> None:
    faults = kill("coordinator 0", at=90), kill("server 0", "worker 1", at=240)
    summary = disturbed(cluster, JOB, *faults, steps=STEPS)
    assert summary["state_digest"] == golden.summary["state_digest"]
    assert summary["eval"] == golden.summary["eval"]
    assert "the coordinator was restarted" in deaths(summary)
    assert not any(recovery["went_back"] or recovery["lost_steps"] for recovery in summary["recoveries"])


def deaths(summary: dict[str, Any]) -> str:
    return "\n".join(death["cause"] for recovery in summary["recoveries"] for death in recovery["died"])


# ---- the long form ----


@pytest.mark.chaos
def test_compressed_gradients_outlive_the_deaths_of_servers_bit_for_bit(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    compression = {
        "ids": "coded",
        "push": {"values": "int4", "keep_rows": 0.3, "pool_rows": 3000, "second_moment": True},
        "pull": {"values": "int8"},
        "tower": {"name": "int8"},
    }
    config = {**SHORT, "compression": compression}
    with Cluster(tmp_path_factory.mktemp("whole")) as another:
        whole = completed(*another.job(config), steps=SHORT_STEPS)
    summary = disturbed(cluster, config, kill("server 1", at=30), kill("server 0", "coordinator 0", at=115))
    assert summary["state_digest"] == whole["state_digest"]
    assert all(victim in causes(summary) for victim in ("server 0", "server 1"))


@pytest.mark.chaos
def test_tables_that_decay_as_a_whole_outlive_deaths_bit_for_bit_on_any_number_of_servers(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    optimizer = {"name": "adam", "weight_decay": 1e-3, "weight_decay_on": "table"}
    config = {**SHORT, "tables": {"default": {"optimizer": optimizer}}}
    config["checkpoint"] = {"every_steps": 30, "full_every": 3}
    with Cluster(tmp_path_factory.mktemp("whole")) as another:
        whole = completed(*another.job({**config, "servers": 1}), steps=SHORT_STEPS)
    summary = disturbed(cluster, config, kill("server 1", at=45), kill("server 0", "worker 1", at=125))
    assert summary["state_digest"] == whole["state_digest"]
    assert summary["eval"] == whole["eval"]
    assert "server 1" in causes(summary)
    assert len(summary["recoveries"]) == 2  # of two that die together, either may be found first


@pytest.mark.chaos
def test_a_bounded_job_of_one_worker_outlives_its_death_and_applies_every_step_once(cluster: Cluster) -> None:
    config = {**JOB, "workers": 1, "consistency": {"mode": "bounded", "staleness": 2}}
    config["train"] = {**JOB["train"], "batch_size": 100}
    config["compression"] = {"push": {"keep_rows": 0.3, "pool_rows": 3000}}
    summary = disturbed(cluster, config, kill("worker 0", at=250), kill("server 0", "worker 0", at=330), steps=STEPS)
    assert len(summary["recoveries"]) >= 2
    assert summary["recoveries"][0]["lost_unsent_rows"] > 0  # a heartbeat a second tells: after 250 steps there was one
    assert 0.5 < summary["eval"]["auc"] <= summary["eval"]["best_auc"]


@pytest.mark.chaos
def test_a_stalled_worker_is_replaced_when_its_lease_ends_and_never_wakes_up(
    cluster: Cluster, undisturbed: dict[str, Any]
) -> None:
    summary = disturbed(cluster, SHORT, stall("worker 1", at=50))
    assert summary["state_digest"] == undisturbed["state_digest"]
    assert "sent no heartbeat for 4 s" in causes(summary)


def unjournaled(cluster: Cluster, *, saves: int | str) -> tuple[dict[str, Any], str]:
    """The one recovery of a bounded job that keeps no journal and whose server 1 dies, and what the job printed."""
    config = {
        **SHORT,
        "consistency": {"mode": "bounded"},
        "recovery": {"journal": "off", "max_lost_steps": SHORT_STEPS},
        "checkpoint": {"every_steps": saves},
    }
    job, folder = cluster.job(config)
    assert not play(job, folder, [kill("server 1", at=100)], limit_s=200.0)
    ended = job.end(limit_s=200.0)
    assert ended.code == 0, job.printed()
    summary = folder.summary() or {}
    assert (summary["status"], summary["steps"]) == ("completed", SHORT_STEPS)
    (recovery,) = summary["recoveries"]
    assert [(d["role"], d["index"]) for d in recovery["died"]] == [("server", 1)]
    return dict(recovery), job.printed()


@pytest.mark.chaos
def test_a_server_that_lost_all_its_updates_has_the_job_begin_anew(cluster: Cluster) -> None:
    recovery, printed = unjournaled(cluster, saves="off")
    assert (recovery["step"], recovery["went_back"]) == (0, True)
    assert recovery["lost_steps"] >= 90 and "training resumes at step 0 from the beginning" in printed


@pytest.mark.chaos
@pytest.mark.parametrize("victim", ["worker 1", "server 1"])
def test_when_all_checkpoints_are_deleted_a_job_goes_on_from_what_its_members_hold_or_names_what_is_missing(
    cluster: Cluster, undisturbed: dict[str, Any], victim: str
) -> None:
    _, folder = stopped = cluster.job({**JOB, "train": {**JOB["train"], "max_steps": 130}})
    assert stopped[0].end(limit_s=200.0).code == 0
    changes = (f"train.max_steps={SHORT_STEPS}", "checkpoint.every_steps=1000", "recovery.max_lost_steps=100")
    settings = [part for change in changes for part in ("--set", change)]
    job = cluster.command("train", "--resume", str(folder.path), *settings)
    assert not play(job, folder, [stall(victim, at=150)], limit_s=200.0)
    for checkpoint in (folder.path / "checkpoints").glob("step-*"):
        shutil.rmtree(checkpoint)
    (pid,) = [m["pid"] for m in folder.member_list() if f"{m['role']} {m['index']}" == victim]
    os.kill(pid, signal.SIGKILL)
    ended = job.end(limit_s=200.0)
    summary = folder.summary() or {}
    if victim == "worker 1":
        assert (ended.code, summary["state_digest"]) == (0, undisturbed["state_digest"])
    else:
        assert ended.code == 1
        missing = f"the journal of server 1 begins after the checkpoint of step 130, which is missing in {folder.path}"
        assert missing in ended.err and "would be lost by going back to step 0" in ended.err


@pytest.mark.chaos
def test_roles_that_are_asked_to_leave_are_replaced_and_change_no_bit(
    cluster: Cluster, undisturbed: dict[str, Any]
) -> None:
    faults = (
        Fault(("worker 1",), 30, signal.SIGTERM),
        Fault(("server 0",), 80, signal.SIGTERM),
        Fault(("worker 0",), 130, signal.SIGINT),
    )
    summary = disturbed(cluster, SHORT, *faults)
    assert summary["state_digest"] == undisturbed["state_digest"]
    assert summary["eval"] == undisturbed["eval"]
    left = re.sub(r" \(pid .*?\)|, (last seen|the job was) at .*", "", deaths(summary)).splitlines()
    assert left == ["worker 1 left on SIGTERM", "server 0 left on SIGTERM", "worker 0 left on SIGINT"]
    assert not any(recovery["went_back"] or recovery["lost_steps"] for recovery in summary["recoveries"])


@pytest.mark.chaos
@pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux")
def test_without_its_fork_server_a_job_trains_on_and_replacements_are_spawned(
    cluster: Cluster, undisturbed: dict[str, Any]
) -> None:
    job, folder = cluster.job(SHORT)
    members = cluster.training(folder)
    servers = [child for child in job.process.children() if "fork-server" in child.cmdline()]
    for server in servers:
        server.kill()
    members["worker 1"].kill()
    members["server 0"].kill()
    summary = completed(job, folder, steps=SHORT_STEPS)
    assert len(servers) == 1
    assert job.printed().count("roles are started by exec from now on") == 1
    told = [death["cause"] for recovery in summary["recoveries"] for death in recovery["died"]]
    assert all(any(victim in cause for cause in told) for victim in ("worker 1", "server 0")), told
    assert summary["state_digest"] == undisturbed["state_digest"]


@pytest.mark.chaos
def test_a_role_that_is_asked_to_leave_in_a_sum_with_a_stalled_one_ends_at_its_limit(
    cluster: Cluster, undisturbed: dict[str, Any]
) -> None:
    config = {**SHORT, "liveness": {"lease_s": 60.0, "grace_s": 3.0}}
    job, folder = cluster.job(config)
    members = cluster.training(folder)
    with stalled(members["worker 1"]):
        time.sleep(1.0)  # now worker 0 waits for it
        began = time.monotonic()
        members["worker 0"].send_signal(signal.SIGTERM)
        assert not gone([members["worker 0"]], limit_s=90)
        assert 2.5 < time.monotonic() - began < 45.0  # the lease is 60 s
    summary = completed(job, folder, steps=SHORT_STEPS)
    assert summary["state_digest"] == undisturbed["state_digest"]
    assert "worker 0 (pid" in causes(summary) and "left on SIGTERM" in causes(summary)


@pytest.mark.chaos
def test_a_server_without_a_journal_goes_on_from_the_last_checkpoint_beside_the_others(cluster: Cluster) -> None:
    recovery, printed = unjournaled(cluster, saves=80)
    assert (recovery["went_back"], recovery["died"][0]["lost_from"]) == (False, 80)
    assert recovery["lost_steps"] == recovery["step"] - 80 > 0
    assert "server 1 lost its updates since step 80" in printed


@pytest.mark.chaos
def test_a_worker_whose_kept_states_are_damaged_takes_the_tower_of_another(
    cluster: Cluster, undisturbed: dict[str, Any]
) -> None:
    job, folder = cluster.job(SHORT)
    members = cluster.training(folder)
    members["worker 0"].suspend()
    kept = list(folder.path.glob("recovery/*/worker-0/**/*.state"))
    for path in kept:
        with path.open("r+b") as file:  # in place: the process has it mapped
            file.seek(-9, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-9, os.SEEK_END)
            file.write(bytes([byte ^ 4]))
    members["worker 1"].kill()
    members["worker 0"].resume()
    summary = completed(job, folder, steps=SHORT_STEPS)
    assert kept and "a kept state is damaged" in folder.log_path("worker", 0).read_text(encoding="utf-8")
    assert summary["state_digest"] == undisturbed["state_digest"]


HURTS: dict[str, tuple[dict[str, int], ...]] = {
    "server 1": (
        {"forming": 1, "pull received": 50, "rows ready": 50, "push received": 50, "read received": 3, "leaving": 1},
        {"formed": 1, "torn": 50, "push journaled": 50, "push staged": 50, "applied": 25, "snapshotting": 2},
    ),
    "worker 1": (
        {"forming": 1, "pulling": 60, "pull sent": 60, "closing": 1},
        {"formed": 1, "pushing": 60, "push sent": 60, "closed": 1},
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


@pytest.mark.chaos
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("member", "points"),
    [pytest.param(member, points, id=f"{member}: {', '.join(points)}") for member in HURTS for points in HURTS[member]],
)
def test_a_hurt_at_each_point_changes_no_bit(
    cluster: Cluster, undisturbed: dict[str, Any], tmp_path: Path, member: str, points: dict[str, int], way: str
) -> None:
    hows = itertools.cycle(WAYS[way])
    hurts = [Hurt(member, point, times, next(hows)) for point, times in points.items()]
    summary = hurt_job(cluster, SHORT, tmp_path, *hurts)
    assert summary["state_digest"] == undisturbed["state_digest"]
    assert summary["eval"] == undisturbed["eval"]


@pytest.mark.chaos
@pytest.mark.parametrize("mode", ["bounded", "async"])
@pytest.mark.parametrize(
    ("member", "points"),
    [("server 1", ["push received", "torn", "push journaled", "applied"]), ("worker 1", ["pull sent", "push sent"])],
    ids=["server", "worker"],
)
def test_a_death_at_each_point_of_a_push_leaves_each_step_applied_once(
    cluster: Cluster, tmp_path: Path, member: str, points: list[str], mode: str
) -> None:
    hurts = [Hurt(member, point, 40) for point in points]
    summary = hurt_job(cluster, {**SHORT, "consistency": {"mode": mode}}, tmp_path, *hurts)
    died = [(d["role"], d["index"]) for r in summary["recoveries"] for d in r["died"]]
    assert died == [(member[:-2], 1)] * len(points)
    assert not any(recovery["went_back"] or recovery["lost_steps"] for recovery in summary["recoveries"])


@pytest.mark.chaos
@pytest.mark.parametrize("victim", ["coordinator 0", "server 1", "worker 0", "worker 1"])  # all servers are alike
def test_a_death_while_another_is_recovered(cluster: Cluster, undisturbed: dict[str, Any], victim: str) -> None:
    first = kill("worker 1" if victim != "worker 1" else "server 1", at=40)
    summary = disturbed(cluster, SHORT, first, kill(victim, at="recovering"))
    assert summary["state_digest"] == undisturbed["state_digest"]


@pytest.mark.chaos
@pytest.mark.parametrize("mode", ["sync", "bounded"])
def test_messages_that_go_astray_between_processes_count_once(
    cluster: Cluster, undisturbed: dict[str, Any], tmp_path: Path, mode: str
) -> None:
    """Late, in another order, twice, and one in 300 lost, or its answer: then all begin a new generation."""
    config = {**SHORT, "consistency": {"mode": mode}, "recovery": {"restarts": 10}}
    config["liveness"] = {**SHORT["liveness"], "step_timeout_s": 10.0}  # the wait for a message that is lost
    astray = [Astray(worker=0, lost=300), Astray(worker=1, lost=0)]
    job, folder = cluster.job(config, env=environment(tmp_path, astray=astray), main=MAIN)
    summary = completed(job, folder, steps=SHORT_STEPS)
    counts = strayed(tmp_path)
    assert counts["twice"] > 200 and counts["lost"] >= 1
    assert summary["recoveries"] and not any(recovery["lost_steps"] for recovery in summary["recoveries"])
    if mode == "sync":
        assert summary["state_digest"] == undisturbed["state_digest"]


def told_of(kills: Counter[str], not_done: Sequence[str], summary: dict[str, Any], *, digest: str) -> dict[str, Any]:
    """What a file of results says about random kills that `summary` outlived."""
    seconds = [recovery["seconds"] for recovery in summary["recoveries"] if recovery["seconds"]]
    return {
        "kills": kills.total(),
        "kills by process": dict(kills),
        "a victim was not there": list(not_done),
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
    epochs = math.ceil(RANDOM_KILLS * 24 / STEPS)
    config = {**JOB, "train": {**JOB["train"], "epochs": epochs}, "eval": {"every_steps": 1000}}
    config["recovery"] = {"restarts": 5}
    whole, folder = cluster.job(config, name="whole")
    digest = completed(whole, folder, steps=epochs * STEPS, limit_s=600.0)["state_digest"]
    job, folder = cluster.job(config, name="hurt")
    faults = random_faults(RANDOM_KILLS * 11 // 10, seed=5, members=MEMBERS, first=20, every=21)
    kills: Counter[str] = Counter()
    not_done = play(job, folder, faults, limit_s=4000.0, tally=kills)
    summary = completed(job, folder, steps=epochs * STEPS, limit_s=600.0)
    assert summary["state_digest"] == digest
    if (path := os.environ.get("CHAOS_JSON")) is not None:
        write(Path(path), f"chaos: {RANDOM_KILLS} random kills", told_of(kills, not_done, summary, digest=digest))
    assert kills.total() >= RANDOM_KILLS and not any(recovery["went_back"] for recovery in summary["recoveries"])


@pytest.mark.chaos
@pytest.mark.parametrize("mode", ["bounded", "async"] if "RANDOM_KILLS" in os.environ else ["bounded"])
def test_many_deaths_in_the_other_modes(cluster: Cluster, mode: str) -> None:
    config = {**SHORT, "consistency": {"mode": mode}}
    faults = random_faults(
        5, seed=55, members=MEMBERS, first=20, every=28
    )  # each of them; a fast job outruns late ones
    summary = disturbed(cluster, config, *faults, limit_s=600.0)
    assert 0.5 < summary["eval"]["auc"] < summary["eval"]["best_auc"]
