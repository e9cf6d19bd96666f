"""A role that replaces a worker or a server: a member of its job in all that the launcher sees, without torch.

It takes a role's command line and registers, joins, heartbeats and reports over the real client. `stand-ins.json` in
the run folder, or beside it, has its plan: {"ROLE INDEX": {"at": STEP, "do": DEED, "times": N}, "steps": N,
"step_s": SECONDS, "hold": STEP}. Workers hold before that step until the file `go` is in the run folder. As in a real
job, no worker leaves before all workers of its generation have trained the last step and the coordinator has the
summary.

STEP is a number, `start`, `formed`, `gathered` (all workers have trained the last step), `reported` (the coordinator
has the summary) or `failed`. A deed is an error's exit code, minus a signal's number, `crash` (exit code 1 without a
word to the coordinator) or `wait`: for ever, and after the last step for the stop.

The coordinator is the real one, with a store that nobody meets in. The leases of these jobs last (`LEASE_S`);
`end_lease` ends that of one member. {"coordinator 0": {"after": "ROLE INDEX", "times": N}} lets the coordinator start
after deeds of another role.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import JobError, JobStopped, ShardkeepError, UserError
from shardkeep.base.logs.log import configure
from shardkeep.launch.processes.children import end_with_parent
from shardkeep.member.access import endpoint_of
from shardkeep.member.departure import Departure, Leaving
from shardkeep.member.membership import Membership, leave_if_due
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.control.membership import Seat, Seats
from shardkeep.ps.control.records import ANY_STEP, Formation, Offer, ResumeRange, Role
from shardkeep.run.reader import RunReader

PLAN, GO = "stand-ins.json", "go"
LEASE_S = 150.0
"""Of all members: a busy machine starves none of them so long."""
POLL_S = 0.01


def main() -> None:
    """`sys.argv`: main file, role, the role's arguments."""
    if sys.argv[1] == "coordinator":
        coordinate()
    else:
        sys.exit(take_part(sys.argv[1], sys.argv[2:]))


def coordinate() -> None:
    """The real coordinator. Importing torch for its store takes seconds."""

    class Store:
        def __init__(self, *_: Any, master_listen_fd: int, **__: Any) -> None:
            self._listener = socket.socket(fileno=master_listen_fd)

    modules = {name: types.ModuleType(name) for name in ("torch", "torch.distributed")}
    modules["torch.distributed"].TCPStore = Store  # type: ignore[attr-defined]
    sys.modules.update(modules)
    from shardkeep.cli.main import main as real

    run = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    watch_for_ends_of_leases(run)
    if (awaited := plan_of(run).get("coordinator 0")) is not None:
        deadline = Deadline(90.0)
        while len(deeds(run, awaited["after"])) < awaited["times"]:
            deadline.check("the deeds of another role")
            time.sleep(POLL_S)
    real()


def file_of(run: Path, member: str, kind: str) -> Path:
    return run / f"{member.replace(' ', '-')}.{kind}"


def end_lease(run: Path, member: str) -> None:
    """Makes the coordinator see the end of the member's lease, once: it declares that process dead and no other."""
    file_of(run, member, "silent").touch()


def watch_for_ends_of_leases(run: Path) -> None:
    expired = Seats.expired

    def expired_or_silent(seats: Seats, now: float) -> list[Seat]:
        for seat in seats.present():
            silent = file_of(run, f"{seat.member.role} {seat.member.index}", "silent")
            if silent.exists():
                silent.unlink()
                seat.last_seen = now - 2 * seats.lease_s
        return expired(seats, now)

    Seats.expired = expired_or_silent  # type: ignore[method-assign]


def plan_of(run: Path) -> dict[str, Any]:
    place = next(path for path in (run / PLAN, run.parent / PLAN) if path.exists())
    return dict(json.loads(place.read_text()))


def deeds(run: Path, member: str) -> bytes:
    """One byte for each deed that the member has done."""
    path = file_of(run, member, "deeds")
    return path.read_bytes() if path.exists() else b""


def take_part(role: Role, arguments: list[str]) -> int:
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    run, index = Path(options["--coordinator"]), int(options["--index"])
    departure = Departure(sheltered="--sheltered" in arguments)
    departure.watch()
    configure(role, index)
    end_with_parent(patience_s=1.0, admit=departure.admit)
    try:
        StandIn(role, index, run, departure).live()
    except Leaving as leaving:
        return leaving.code
    except ShardkeepError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


class StandIn:
    def __init__(self, role: Role, index: int, run: Path, departure: Departure) -> None:
        self._role, self._index, self._run, self._departure = role, index, run, departure
        self._name, self._plan, self._step = f"{role} {index}", plan_of(run), 0
        self._tables = (TableSpec(name="user", dim=8),) if role == "worker" else ()

    def live(self) -> None:
        self._act("start")
        control = ControlClient(endpoint_of(str(self._run), launched=True), role=self._role, index=self._index)
        with Membership(control, self._departure) as config:
            try:
                self._join(control, config.agreed())
            except ShardkeepError:
                self._act("failed")  # a real role may abort in native code once its peers are gone
                raise
        if control.state.state != "completed" and (error := control.state.error()) is not None:
            raise error

    def _join(self, control: ControlClient, settings: dict[str, Any]) -> None:
        formation: Formation | None = control.join(Offer(self._tables, settings=settings))
        while formation is not None and not self._serves(control, formation):
            self._departure.check()
            last = self._step if self._role == "worker" else ANY_STEP
            offer = Offer(self._tables, resume_range=ResumeRange(0, last, holds=True), settings=settings)
            formation = control.join_again(offer, formation, "a peer was lost")

    def _serves(self, control: ControlClient, formation: Formation) -> bool:
        """Trains or serves one generation; whether the job is over with it."""
        if 0 < self._step < formation.start_step:  # another worker was ahead; in a real job both pushed these steps
            self._report(control, range(self._step + 1, formation.start_step + 1))
        self._step = formation.start_step
        self._act("formed")
        with self._departure.postponed(20.0):
            if self._role == "server":
                while not control.wait_lost_or_over(formation.generation, unless=lambda: self._departure.asked):
                    leave_if_due(control, self._departure, lambda: None)
                return control.state.over
            return self._trains(control, formation)

    def _trains(self, control: ControlClient, formation: Formation) -> bool:
        while self._step < self._plan["steps"]:
            self._act(self._step)
            if (over := _ended(control, formation)) is not None:
                return over
            leave_if_due(control, self._departure, lambda: None)
            time.sleep(self._plan["step_s"])  # what a step takes
            if self._step == self._plan.get("hold") and not (self._run / GO).exists():
                self._signature("held", formation).touch()
            else:
                self._step += 1
                control.update(step=self._step, phase="training")
                self._report(control, [self._step])
        return self._summarizes(control, formation)

    def _report(self, control: ControlClient, steps: Iterable[int]) -> None:
        if self._name == "worker 0":
            for step in steps:
                control.report("progress", {"step": step, "total_steps": self._plan["steps"], "samples": step})

    def _summarizes(self, control: ControlClient, formation: Formation) -> bool:
        """Waits for the others as the gather and the barrier at the end of a real worker do; whether the job is over
        with this generation."""
        self._signature("trained", formation).touch()
        while not all(_signature(self._run, "trained", formation.generation, w.index).exists()
                      for w in formation.of_role("worker")):  # fmt: skip
            if (over := _ended(control, formation)) is not None:
                return over
            time.sleep(POLL_S)
        self._act("gathered", until=control.stop_requested)
        if self._index == 0:
            steps = self._plan["steps"]
            control.report("summary", {"steps": steps, "samples": steps, "state_digest": "0" * 64})
            control.flush()
            self._signature("reported", formation).touch()
        while not _signature(self._run, "reported", formation.generation, 0).exists():
            if _ended(control, formation) is False:
                return False
            time.sleep(POLL_S)
        self._act("reported")
        return True

    def _signature(self, what: str, formation: Formation) -> Path:
        return _signature(self._run, what, formation.generation, self._index)

    def _act(self, at: int | str, until: threading.Event | None = None) -> None:
        """What the plan has for this moment, as often as it says."""
        deed = self._plan.get(self._name, {})
        if deed.get("at") != at or len(deeds(self._run, self._name)) >= deed.get("times", 1):
            return
        with file_of(self._run, self._name, "deeds").open("ab") as file:
            file.write(b".")
        what = deed["do"]
        if what == "wait":
            (until or threading.Event()).wait()
        elif what == "crash":
            print("error: out of luck", file=sys.stderr, flush=True)
            os._exit(1)
        elif what < 0:
            os.kill(os.getpid(), -what)
        else:
            raise (UserError if what == UserError.exit_code else JobError)("no such column")


def all_hold(run: RunReader) -> bool:
    """Whether all workers of the current generation hold, so that none is ahead of another."""
    workers = [member for member in run.member_list() if member["role"] == "worker"]
    return bool(workers) and all(_signature(run.path, "held", w["generation"], w["index"]).exists() for w in workers)


def _signature(run: Path, what: str, generation: int, index: int) -> Path:
    """The file by which a worker lets others know that it has come so far."""
    return run / f"generation-{generation}-{what}-{index}"


def _ended(control: ControlClient, formation: Formation) -> bool | None:
    """Whether the job is over with this generation; None = the generation lasts. Raises why the job failed."""
    if control.lost(formation.generation):
        return False
    if control.failed.is_set():
        raise control.state.error() or JobStopped("the job failed")
    return True if control.stop_requested.is_set() else None
