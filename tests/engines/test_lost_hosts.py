"""Machines of a job, by `shardkeep node` on hosts: cut off, living on beside their replacement, or lost with all that
they have not synced (tests/support/disks.py)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shardkeep.base.exit_codes import START_AGAIN
from shardkeep.base.files import atomic_write, sync_folder
from shardkeep.member.recovery_folder import kept_for_recovery
from shardkeep.ps.checkpoints.folder import Checkpoints, FileRecord
from shardkeep.ps.server.journal.journal import Journal, RecordKind
from shardkeep.run.folder import RunFolder
from shardkeep.run.state_files import StandingFiles
from tests.support.cluster import Command, stalled
from tests.support.disks import Disk, lose
from tests.support.forked import fork_context
from tests.support.golden import Golden
from tests.support.hosts import Host, hosts, missing, worker_on
from tests.support.hurt import MAIN, Hurt, environment, in_turn, missed
from tests.support.journals import steps
from tests.support.machines import Machines

REASON = missing()
pytestmark = [
    pytest.mark.waits_for_processes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
LIMIT_S = 240.0


def _act(folder: Path, group: int, act: Callable[[Path], None]) -> None:
    Disk(str(folder / "top"), str(folder / "kept"), group)
    act(folder / "top")


def _on_host(folder: Path, group: int, act: Callable[[Path], None]) -> None:
    for name in ("top", "kept"):
        (folder / name).mkdir(exist_ok=True)
    process = fork_context().Process(target=_act, args=(folder, group, act))
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 0


def _first(top: Path) -> None:
    made, gone = top / "made", top / "gone"
    made.mkdir()
    gone.mkdir()
    for path in (made / "cut", made / "removed", made / "mapped", gone / "synced"):
        with path.open("wb") as file:
            file.write(b"old")
            file.flush()
            os.fsync(file.fileno())
            file.write(b" new")
    mapped = np.memmap(made / "mapped", np.uint8, "r+")
    mapped[:] = 1
    mapped.flush()
    mapped[:] = 2
    for name in ("tensors", "unsynced tensors"):
        save_file({"t": torch.zeros(3)}, made / name)
    FileRecord.of(made, made / "tensors")
    atomic_write(made / "written", "old")
    (top / "both").write_bytes(b"old")
    for folder in (made, top):
        sync_folder(folder)
    atomic_write(made / "written", "new")
    for path in (made / "new", gone / "new"):
        path.touch()
    (top / "others").mkdir()
    made.rename(top / "renamed")
    (top / "renamed" / "removed").unlink()


def _more(text: bytes, top: Path) -> None:
    for name in ("both", "others/stays"):
        with (top / name).open("ab") as file:
            file.write(text)


def _pairs(top: Path) -> None:
    for i in range(99):
        for name in ("earlier", "later"):
            (top / "gone" / f"{name} {i}").write_bytes(b"whole")


def test_a_lost_host_leaves_what_it_synced_and_all_of_others_and_without_order_any_part_of_the_rest(
    tmp_path: Path,
) -> None:
    top, kept = tmp_path / "top", tmp_path / "kept"
    for group, act in ((1, _first), (2, partial(_more, b" others")), (1, partial(_more, b" new")), (3, _pairs)):
        _on_host(tmp_path, group, act)
    lose(top, kept, 1)
    lose(top, kept, 3, seed=1)
    left = {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}
    pairs = {(left.pop(f"gone/earlier {i}", None), left.pop(f"gone/later {i}", None)) for i in range(99)}
    assert {(None, b"whole"), (b"", b"whole"), (b"whole", None), (b"whole", b"whole")} <= pairs
    assert any(0 < len(earlier or b"") < len(b"whole") for earlier, _ in pairs)
    assert left.pop("made/tensors")
    synced = {f"made/{name}": b"old" for name in ("cut", "removed", "written")}
    others = {"both": b"old others", "others/stays": b" others"}
    assert left == {**synced, **others, "made/mapped": b"\1" * 7, "made/unsynced tensors": b""}


def _kept_by_members(top: Path) -> None:
    run = RunFolder(top / "run", number=1).path
    for server in range(3):
        journal = Journal(kept_for_recovery(run, "job", "server", server) / "journal", sync=server == 0)
        journal.begin(1, step=0, facts={})
        journal.append(RecordKind.PUSH, rank=0, step=0).result(LIMIT_S)
        if server == 1:  # it leaves
            journal.roll()
            journal.to_disk()
    Checkpoints(run / "checkpoints").begin(5)
    Checkpoints(run / "checkpoints").commit(5, [], {})
    StandingFiles(run, 1).write("{}")


def test_what_a_replacement_needs_outlives_the_host(tmp_path: Path) -> None:
    _on_host(tmp_path, 1, _kept_by_members)
    lose(tmp_path / "top", tmp_path / "kept", 1)
    run = tmp_path / "top" / "run"
    assert StandingFiles(run, 1).read() == {} and Checkpoints(run / "checkpoints").last_step() == 5
    assert [steps(run / f"recovery/job/server-{i}/journal") for i in range(3)] == [[0], [0], []]


class Lossy(Machines):
    """Machines of the golden job on hosts, where members are hurt."""

    def __init__(self, shared: Path, golden: Golden, folder: Path, *hurts: Hurt, **settings: Any) -> None:
        super().__init__(shared, {**golden.config, "profile": {}, "liveness": {"step_timeout_s": 30.0}, **settings})
        self._folder, self._hurts = folder, in_turn(*hurts)
        self._digest = None if "consistency" in settings else golden.summary["state_digest"]

    def on(self, host: Host, rank: int, *more: str, nodes: int = 2) -> Command:
        env = {**environment(self._folder, self._hurts), **host.recorded}
        there: dict[str, Any] = {"advertise": host.address, "prefix": host.prefix, "env": env, "main": MAIN}
        return self.start(rank, nodes, "--insecure-data-plane", *more, **there)

    def lose(self, host: Host, node: Command, seed: int | None = None) -> None:
        """Once all processes of a host are killed."""
        assert node.end(limit_s=LIMIT_S).code == -signal.SIGKILL
        print(f"---- {host.name} lost", *host.lose(seed), sep="\n")

    def lost_steps(self) -> list[int]:
        """Those of each recovery of the job, which is completed, in `sync` with the golden model."""
        assert not missed(self._folder, self._hurts)
        summary = self.summary
        assert summary["status"] == "completed" and self._digest in (None, summary["state_digest"])
        assert len(list(self.run.path.glob("summary.*.json"))) == 1
        servers = [process for process in summary["processes"] if process["role"] == "server"]
        assert [server["applied_steps"] for server in servers] == [summary["steps"]] * 2
        return [recovery["lost_steps"] for recovery in summary["recoveries"]]


SERVER_1 = Hurt("server 1", "push received", 100, companions=("worker 1", "node 1"))
SERVER_0 = Hurt("server 0", "push received", 60, companions=("worker 0", "coordinator 0", "node 0"))
EVERYONE = replace(SERVER_1, companions=("server 0", "worker 0", "coordinator 0", "worker 1", "node 0", "node 1"))
WORKERS = Hurt("worker 1", "pushing", 100, companions=("worker 0", "node 0"))
SERVERS = replace(SERVER_1, companions=("server 0", "coordinator 0", "node 0"))


def one_by_one(golden: Golden, tmp_path: Path, journal: str, seed: int | None, mode: str) -> None:
    """The first with its coordinator. No step is lost where journals are synced."""
    settings = {"recovery": {"journal": journal}, **({} if mode == "sync" else {"consistency": {"mode": mode}})}
    with hosts(3) as (x0, x1, x2), Lossy(x0.shared, golden, tmp_path, SERVER_1, SERVER_0, **settings) as job:
        first, second = job.on(x0, 0), job.on(x1, 1)
        job.lose(x1, second, seed)
        second = job.on(x2, 1)
        job.lose(x0, first, seed)
        x1.on()
        assert job.end([job.on(x1, 0), second]) == [0, 0]
        lost = job.lost_steps()
        assert len(lost) >= 2 and (max(lost) > 0) == (journal == "os")


def at_once(golden: Golden, tmp_path: Path, gone: list[int], hurt: Hurt) -> None:
    """Without any dense state the job goes back to its checkpoint and states the steps."""
    places = [(0,), (1,)] if hurt is EVERYONE else [(0, "--only", "servers"), (0, "--only", "workers")]
    with hosts(2) as pair, Lossy(pair[0].shared, golden, tmp_path, hurt) as job:

        def start(i: int) -> Command:
            rank, *more = places[i]
            (tmp_path / f"pid-node {rank}").unlink(missing_ok=True)
            node = job.on(pair[i], rank, *more, nodes=len(gone))
            job.until((tmp_path / f"pid-node {rank}").exists, "no node")
            return node

        nodes = {i: start(i) for i in sorted((0, 1), key=gone.count)}  # the "node 0" that is killed is the last
        for i in gone:
            job.lose(pair[i], nodes[i])
        for i in gone:
            pair[i].on()
            nodes[i] = start(i)
        assert job.end(nodes.values()) == [0, 0]
        back = [recovery["step"] for recovery in job.summary["recoveries"] if recovery["went_back"]]
        assert (max(job.lost_steps()) in (9, 10), back) == ((False, []) if hurt is SERVERS else (True, [40]))


def cut_off(golden: Golden, tmp_path: Path) -> None:
    """Of two first machines one leads, and no step is applied twice."""
    patience = {"lease_s": 30.0, "step_timeout_s": 30.0}
    with hosts(3) as (cut, other, new), Lossy(cut.shared, golden, tmp_path, liveness=patience) as job:
        first, second = job.on(cut, 0), job.on(other, 1)
        job.training()
        with stalled(worker_on(other, job.run)):  # or the job might end first
            cut.cut()
        replacement = job.on(new, 0)
        assert job.end([second]) == [0], "it starts its roles again, without an engine"
        while (code := replacement.end().code) == START_AGAIN:
            replacement = job.on(new, 0)
        assert code == 0
        ended = first.end()
        assert ended.code == 0 and "another coordinator leads the job" in ended.err
        assert not cut.pids
        cut.lose()
        assert set(job.lost_steps()) == {0}


SLOW, CHAOS = pytest.mark.slow, pytest.mark.chaos
CASES = [
    pytest.param(one_by_one, ("auto", None, "sync"), id="one by one", marks=SLOW),
    pytest.param(at_once, ([0, 1], EVERYONE), id="both hosts", marks=SLOW),
    pytest.param(at_once, ([1], WORKERS), id="the host of all workers", marks=SLOW),
    pytest.param(at_once, ([0], SERVERS), id="the host of all servers", marks=CHAOS),
    pytest.param(cut_off, (), id="one that lives on", marks=SLOW),
    *[pytest.param(one_by_one, ("os", None, mode), id=f"os {mode}", marks=CHAOS) for mode in ("sync", "bounded")],
    *[pytest.param(one_by_one, ("auto", None, mode), id=mode, marks=CHAOS) for mode in ("bounded", "async")],
    *[pytest.param(one_by_one, ("auto", seed, "sync"), id=f"{seed}", marks=CHAOS) for seed in range(6)],
]


@pytest.mark.parametrize(("lose", "how"), CASES)
def test_lost_hosts_cost_no_step_or_as_many_as_the_job_states(
    golden: Golden, tmp_path: Path, lose: Callable[..., None], how: tuple[Any, ...]
) -> None:
    lose(golden, tmp_path, *how)
