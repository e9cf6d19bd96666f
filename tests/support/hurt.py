"""`shardkeep` whose roles hurt themselves at an exact point: `Command("train", ..., main=MAIN)`.

What is to happen is in the environment, because launchers hand it to their roles (`environment`). Each hurt happens
once, in the first process of the member that comes to its point; a file says that it did. A process that is stopped
(SIGSTOP) counts as silent for longer than its lease from then on: the lease itself is longer than a busy machine takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from shardkeep.base.files import atomic_write
from tests.support import disks
from tests.support.import_path import IMPORT_PATH

MAIN = "tests.support.hurt:main"
_VARIABLE = "SHARDKEEP_TEST_HURTS"
Filter = Callable[..., bool]


COMPANIONS_S = 60.0
"""How long a hurt waits for companions that are being replaced."""
POLL_S = 0.005
LEASE = "the lease is over"


@dataclass(frozen=True)
class Hurt:
    """Sends `signal` to the member's own process when it comes to `point` for the `times`th time."""

    member: str
    """ROLE INDEX"""
    point: str
    """A key of POINTS; `torn`: half of a journal's record is written; LEASE: the coordinator declares the member dead,
    which lives, once it has trained the step `times`."""
    times: int = 1
    signal: str = "SIGKILL"
    after: str = ""
    """The name of another hurt: calls count once that one has happened."""
    companions: tuple[str, ...] = ()
    """Other members, or `node RANK`, whose processes get the signal at the same time, wherever they are."""
    number: int = 0
    """Tells hurts apart that are alike otherwise."""
    silent: bool = True
    """Whether a stopped process counts as silent for too long at once; else its lease must end."""

    def __str__(self) -> str:
        """Its name, which no other hurt of the job has."""
        what = (self.signal, *self.member.split(), self.point.replace(" ", "-"), self.times, self.number)
        return "-".join(map(str, what))


def in_turn(*hurts: Hurt) -> list[Hurt]:
    """Hurts each of which counts its calls from the one before on."""
    numbered = [replace(hurt, number=number) for number, hurt in enumerate(hurts)]
    names = ["", *map(str, numbered)]
    return [replace(hurt, after=name) for name, hurt in zip(names, numbered, strict=False)]


@dataclass(frozen=True)
class Point:
    """Before or after a call of a function, `module:Class.method`; `counts`: which calls, by their arguments."""

    function: str
    after: bool = False
    counts: Filter = lambda *_arguments, **_named: True


def _carries(kind: str) -> Filter:
    """Calls of `Transport.send` with a message of that kind."""

    def carries(_self: object, _server: int, *messages: Any, **_named: Any) -> bool:
        from shardkeep.ps.wire.message import Kind, kind_of

        return any(m is not None and kind_of(m) == Kind[kind] for m in messages)

    return carries


def _reports(kind: str) -> Filter:
    return lambda _self, **named: bool(named["kind"] == kind)


def _entry(name: str) -> Filter:
    return lambda _self, entry, **_named: bool(entry.name == name)


def _of_increment(snapshot: Any, *_arguments: object) -> bool:
    return not snapshot.full and any(ids.size for ids in snapshot.removed_T)


_SEND, _RPC = (
    "shardkeep.ps.rpc.group:RpcGroup.send",
    "shardkeep.ps.rpc.group:RpcGroup.form",
)
_APPLIER = "shardkeep.ps.server.applier:Applier"
WRITE = "shardkeep.ps.server.journal.segments:write_all"
_COORDINATOR, _FILES = "shardkeep.ps.control.coordinator:Coordinator", "shardkeep.ps.checkpoints.folder:Checkpoints"
POINTS: Mapping[str, Point] = {
    # any member
    "forming": Point(_RPC),
    "formed": Point(_RPC, after=True),
    # workers
    "pulling": Point(_SEND, counts=_carries("PULL")),
    "pull sent": Point(_SEND, after=True, counts=_carries("PULL")),
    "pushing": Point(_SEND, counts=_carries("PUSH")),
    "push sent": Point(_SEND, after=True, counts=_carries("PUSH")),
    "saving tower": Point("shardkeep.workers.checkpoint.writer:save_tower"),
    "committing": Point(f"{_FILES}.commit"),
    "committed": Point(f"{_FILES}.commit", after=True),
    "evaluating": Point("shardkeep.workers.evaluation.evaluate:Evaluator.run"),
    "closing": Point("shardkeep.workers.trainer:Trainer.wait_for_writer"),
    "closed": Point("shardkeep.workers.trainer:Trainer.wait_for_writer", after=True),
    # servers
    "pull received": Point("shardkeep.ps.server.pulls:PullQueue.park"),
    "rows ready": Point("shardkeep.ps.server.pulls:PullQueue.rows", after=True),
    "push received": Point(f"{_APPLIER}.push"),
    "push journaled": Point("shardkeep.ps.server.journal.journal:Journal.append", after=True, counts=_entry("PUSH")),
    "push staged": Point(f"{_APPLIER}.push", after=True),
    "applied": Point("shardkeep.ps.server.tables:Tables.apply", after=True),
    "rows go": Point("shardkeep.ps.server.table.policies.eviction:Eviction.remove"),
    "rows gone": Point("shardkeep.ps.server.table.policies.eviction:Eviction.remove", after=True),
    "writing removed": Point("shardkeep.ps.server.snapshot.files:write_removed", counts=_of_increment),
    "snapshotting": Point("shardkeep.ps.server.snapshot.part_files:ArrayFile.finish"),
    "read received": Point("shardkeep.ps.server.pulls:PullQueue.read"),
    "leaving": Point("shardkeep.ps.control.grpc.client:ControlClient.leave"),
    # the coordinator
    "hello": Point(f"{_COORDINATOR}.register"),
    "join": Point(f"{_COORDINATOR}.join"),
    "progress": Point(f"{_COORDINATOR}.report", counts=_reports("progress")),
    "eval told": Point(f"{_COORDINATOR}.report", counts=_reports("eval")),
    "checkpoint told": Point(f"{_COORDINATOR}.report", after=True, counts=_reports("phase")),
    "summary told": Point(f"{_COORDINATOR}.report", after=True, counts=_reports("summary")),
    "member left": Point(f"{_COORDINATOR}.leave", after=True),
    "death told": Point(f"{_COORDINATOR}.lost", after=True),
}
EXPIRED, SILENT = (
    "shardkeep.ps.control.membership:Seats.expired",
    "shardkeep.launch.coordinator_line:CoordinatorLine.silent",
)
"""How a coordinator finds the members that are silent for too long, and a launcher its coordinator."""


@dataclass(frozen=True)
class Astray:
    """What becomes of the messages that a worker sends: late, in another order, some twice, some or their answers
    lost."""

    worker: int
    late_s: float = 0.004
    lost: int = 0
    """One message of so many is lost; 0 = none."""


def environment(folder: Path, hurts: Sequence[Hurt] = (), astray: Sequence[Astray] = ()) -> dict[str, str]:
    """The environment of a launcher for these hurts; `folder` exists and gets a file for each that happened."""
    what = {"hurts": [dataclasses.asdict(h) for h in hurts], "astray": [dataclasses.asdict(a) for a in astray]}
    return {_VARIABLE: json.dumps({"folder": str(folder), **what}), "PYTHONPATH": IMPORT_PATH}


def missed(folder: Path, hurts: Sequence[Hurt]) -> list[Hurt]:
    return [hurt for hurt in hurts if not (folder / str(hurt)).exists()]


def end_lease(folder: Path, pid: int) -> None:
    """From now on the job takes a process, of a member or the coordinator, for one that is silent for too long."""
    (folder / f"silent-{pid}").touch()


def strayed(folder: Path) -> Counter[str]:
    """What happened to messages, over all workers: sent, twice, lost; told after each hundred."""
    return sum((Counter(json.loads(path.read_text())) for path in folder.glob("astray-*")), Counter())


# ---- inside the processes ----

_STRUCK = threading.Lock()
"""Taken for good by the first hurt of a process: another one, in another thread, waits for the next process. Else one
death would do for two."""


def main() -> None:
    """`shardkeep`, with what the environment asks for."""
    disks.record()
    told = json.loads(os.environ[_VARIABLE])
    arguments, folder = sys.argv[1:], Path(told["folder"])
    hurts = [Hurt(**hurt) for hurt in told["hurts"]]
    if arguments[0] in ("train", "node"):
        _start_roles_from_here()
        notice_silent_coordinators(folder)
        if arguments[0] == "node":
            _write_pid(folder, f"node {arguments[arguments.index('--rank') + 1]}")
    else:
        index = arguments[arguments.index("--index") + 1] if "--index" in arguments else "0"
        member = f"{arguments[0]} {index}"
        _write_pid(folder, member)
        for hurt in hurts:
            if hurt.member == member and hurt.point != LEASE and not (folder / str(hurt)).exists():
                _set(hurt, folder)
        if arguments[0] == "coordinator":
            end_leases(folder, [hurt for hurt in hurts if hurt.point == LEASE])
        for astray in (Astray(**a) for a in told["astray"]):
            if f"worker {astray.worker}" == member:
                _lead_astray(astray, folder)
    from shardkeep.cli.main import app

    app(prog_name="shardkeep")


def _write_pid(folder: Path, member: str) -> None:
    atomic_write(folder / f"pid-{member}", str(os.getpid()))


def pid_of(folder: Path, member: str) -> int:
    """The process of `ROLE INDEX`, or of `node RANK`, that was started last."""
    return int((folder / f"pid-{member}").read_text())


def _start_roles_from_here() -> None:
    from shardkeep.launch.processes.children import SHARDKEEP
    from shardkeep.launch.processes.fork_server import ForkServer

    start = subprocess.Popen.__init__

    def started(self: Any, command: Sequence[str], *arguments: Any, **named: Any) -> None:
        module = ["-m", MAIN.partition(":")[0]]
        ours = [part for word in command for part in (module if word == SHARDKEEP[-1] else [word])]
        start(self, ours, *arguments, **named)

    subprocess.Popen.__init__ = started  # type: ignore[method-assign, assignment]
    ForkServer.__init__ = functools.partialmethod(ForkServer.__init__, main=MAIN)  # type: ignore[method-assign, assignment]


def end_leases(folder: Path, hurts: Sequence[Hurt] = ()) -> None:
    """In a coordinator: a process of `end_lease`, and a member of `hurts` from its step on, is silent for too long."""

    def wrap(expired: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def found(self: Any, now: float) -> list[Any]:
            for seat in self.present():
                member = seat.member
                due = [h for h in hurts if h.member == f"{member.role} {member.index}" and seat.step >= h.times]
                named = [folder / str(hurt) for hurt in due if not (folder / str(hurt)).exists()]
                if named or (folder / f"silent-{member.pid}").exists():
                    seat.last_seen = min(seat.last_seen, now - self.lease_s - 1.0)
                for path in named:
                    path.touch()
            return expired(self, now)

        return found

    _replace(EXPIRED, wrap)


def notice_silent_coordinators(folder: Path) -> None:
    """In a launcher: a coordinator of `end_lease` answers no more."""

    def wrap(silent: Callable[..., bool]) -> Callable[..., bool]:
        return lambda self, pid: silent(self, pid) or (folder / f"silent-{pid}").exists()

    _replace(SILENT, wrap)


class _Calls:
    """Counts the calls of a point, and strikes at the one of a hurt."""

    def __init__(self, hurt: Hurt, folder: Path) -> None:
        self._hurt, self._folder, self._passed, self._counts = hurt, folder, 0, not hurt.after

    def come(self, first: Callable[[], object] = lambda: None) -> None:
        """`first`: what is done just before."""
        self._counts = self._counts or (self._folder / self._hurt.after).exists()
        self._passed += self._counts
        if self._counts and self._passed == self._hurt.times:
            _strike(self._hurt, self._folder, first)


def _set(hurt: Hurt, folder: Path) -> None:
    calls = _Calls(hurt, folder)
    if hurt.point == "torn":
        _replace(WRITE, lambda write_all: _tearing(write_all, calls))
        return
    point = POINTS[hurt.point]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            counts = point.counts(*arguments, **named)
            if counts and not point.after:
                calls.come()
            result = function(*arguments, **named)
            if counts and point.after:
                calls.come()
            return result

        return wrapped

    _replace(point.function, wrap)


def _strike(hurt: Hurt, folder: Path, first: Callable[[], object]) -> None:
    """Sends the process its signal. This thread waits after a kill and a stop: a stop takes effect when another thread
    has looked at it, and until then this one could write what it must not."""
    _STRUCK.acquire()
    (folder / str(hurt)).touch()
    others = _companions(hurt, folder)
    if others is None:
        (folder / str(hurt)).unlink()  # a hurt that is missed
        _STRUCK.release()
        return
    first()
    for pid in (*(process.pid for process in others), os.getpid()):
        if hurt.signal == "SIGSTOP" and hurt.silent:
            end_lease(folder, pid)
        os.kill(pid, signal.Signals[hurt.signal])
    if hurt.signal == "SIGKILL" or (hurt.signal == "SIGSTOP" and hurt.silent):
        threading.Event().wait()
    if hurt.signal == "SIGSTOP":
        threading.Event().wait(0.2)  # the test may let it continue
    _STRUCK.release()


def _companions(hurt: Hurt, folder: Path) -> list[psutil.Process] | None:
    """The processes of the companions, once all of them live."""
    end = time.monotonic() + COMPANIONS_S
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
            found = [psutil.Process(pid_of(folder, member)) for member in hurt.companions]
            if all(process.status() != psutil.STATUS_ZOMBIE for process in found):
                return found
        time.sleep(POLL_S)
    return None


def _tearing(write_all: Callable[..., int], calls: _Calls) -> Callable[..., int]:
    def write(descriptor: int, parts: Sequence[Any]) -> int:
        whole = b"".join(bytes(part) for part in parts)
        calls.come(lambda: os.write(descriptor, whole[: len(whole) // 2]))
        return write_all(descriptor, parts)

    return write


def _lead_astray(astray: Astray, folder: Path) -> None:
    from shardkeep.ps.rpc.group import RpcGroup
    from tests.support.unreliable import Unreliable

    unreliable = Unreliable(seed=astray.worker, late_s=astray.late_s, lost=astray.lost)
    send = RpcGroup.send

    def send_astray(self: RpcGroup, server: int, message: Any, then: Any = None, *, timeout_s: float) -> Any:
        if unreliable.counts["sent"] % 100 == 99:
            (folder / f"astray-{astray.worker}-{os.getpid()}").write_text(json.dumps(unreliable.counts))
        return unreliable.send(functools.partial(send, self), server, message, then, timeout_s)

    RpcGroup.send = send_astray  # type: ignore[method-assign]


def _replace(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps `module:function` or `module:Class.method` where it is defined."""
    module, _, path = name.partition(":")
    owner: Any = importlib.import_module(module)
    *owners, last = path.split(".")
    for part in owners:
        owner = getattr(owner, part)
    setattr(owner, last, wrap(getattr(owner, last)))


if __name__ == "__main__":
    main()
