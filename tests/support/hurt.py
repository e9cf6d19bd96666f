"""`shardkeep` whose roles hurt themselves at an exact point: `Command("train", ..., main=MAIN)`.

What is to happen is in the environment, because launchers hand it to their roles (`environment`). Each hurt happens
once, in the first process of the member that comes to its point; a file says that it did.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.import_path import IMPORT_PATH

MAIN = "tests.support.hurt:main"
_VARIABLE = "SHARDKEEP_TEST_HURTS"
Filter = Callable[..., bool]


@dataclass(frozen=True)
class Hurt:
    """Sends `signal` to the member's own process when it comes to `point` for the `times`th time."""

    member: str
    """ROLE INDEX"""
    point: str
    """A key of POINTS, or `torn`: half of a journal's record is written."""
    times: int = 1
    signal: str = "SIGKILL"

    def __str__(self) -> str:
        return "-".join((self.signal, *self.member.split(), self.point.replace(" ", "-")))


@dataclass(frozen=True)
class Point:
    """Before or after a call of a function, `module:Class.method`; `counts`: which calls, by their arguments."""

    function: str
    after: bool = False
    counts: Filter = lambda *_arguments, **_named: True


def _carries(kind: str) -> Filter:
    """Calls of `Transport.send` with a message of that kind."""

    def carries(_self: object, _server: int, *messages: Any, **_named: Any) -> bool:
        from shardkeep.ps.wire.message import KIND_AT, Kind

        return any(m is not None and m[KIND_AT] == Kind[kind] for m in messages)

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
_APPEND = "shardkeep.ps.server.journal.journal:Journal.append"
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
    "push journaled": Point(_APPEND, after=True, counts=_entry("PUSH")),
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
}


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
    """Those that never happened."""
    return [hurt for hurt in hurts if not (folder / str(hurt)).exists()]


def strayed(folder: Path) -> Counter[str]:
    """What happened to messages, over all workers: sent, twice, lost; told after each hundred."""
    return sum((Counter(json.loads(path.read_text())) for path in folder.glob("astray-*")), Counter())


# ---- inside the processes ----

_STRUCK = threading.Lock()
"""Taken for good by the first hurt of a process: another one, in another thread, waits for the next process. Else one
death would do for two."""


def main() -> None:
    """`shardkeep`, with what the environment asks for."""
    told = json.loads(os.environ[_VARIABLE])
    arguments = sys.argv[1:]
    if arguments[0] == "train":
        _start_roles_from_here()
    else:
        index = arguments[arguments.index("--index") + 1] if "--index" in arguments else "0"
        member = f"{arguments[0]} {index}"
        for hurt in (Hurt(**h) for h in told["hurts"]):
            if hurt.member == member and not (Path(told["folder"]) / str(hurt)).exists():
                _set(hurt, Path(told["folder"]))
        for astray in (Astray(**a) for a in told["astray"]):
            if f"worker {astray.worker}" == member:
                _lead_astray(astray, Path(told["folder"]))
    from shardkeep.cli.main import app

    app(prog_name="shardkeep")


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


def _set(hurt: Hurt, folder: Path) -> None:
    """Puts the hurt into the code."""
    passed = 0

    def pass_by() -> None:
        nonlocal passed
        passed += 1
        if passed == hurt.times:
            _strike(hurt, folder)

    if hurt.point == "torn":
        _replace(WRITE, lambda write_all: _tearing(write_all, hurt, folder))
        return
    point = POINTS[hurt.point]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            counts = point.counts(*arguments, **named)
            if counts and not point.after:
                pass_by()
            result = function(*arguments, **named)
            if counts and point.after:
                pass_by()
            return result

        return wrapped

    _replace(point.function, wrap)


def _strike(hurt: Hurt, folder: Path) -> None:
    """Sends the process its signal. This thread waits: a stop takes effect when another thread has looked at
    it, and until then this one could write what it must not."""
    _STRUCK.acquire()
    (folder / str(hurt)).touch()
    os.kill(os.getpid(), signal.Signals[hurt.signal])
    threading.Event().wait()


def _tearing(write_all: Callable[..., int], hurt: Hurt, folder: Path) -> Callable[..., int]:
    writes = 0

    def write(descriptor: int, parts: Sequence[Any]) -> int:
        nonlocal writes
        writes += 1
        if writes == hurt.times:
            whole = b"".join(bytes(part) for part in parts)
            os.write(descriptor, whole[: len(whole) // 2])
            _strike(hurt, folder)
        return write_all(descriptor, parts)

    return write


def _lead_astray(astray: Astray, folder: Path) -> None:
    from shardkeep.ps.rpc.group import RpcGroup
    from tests.support.faults import Unreliable

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
