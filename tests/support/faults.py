"""Faults as data: who is hurt, when, how; a player that does it to the processes of a running job; a bad transport."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import psutil

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import DeadlineExceeded, ShardkeepError
from shardkeep.ps.control.grpc.client import fetch_status
from shardkeep.ps.server.server_state import pass_on
from shardkeep.ps.transport.transport import Handler, LocalTransport
from shardkeep.run.folder import RunFolder
from tests.support.cluster import Command, kinds, records

POLL_S = 0.005
LOST_S = 0.5
"""Until the sender of a lost message gets an error, as by RPC's own limit."""
RECOVERING_S = 5.0
"""A recovery that is over before anybody looks is not waited for: the next fault comes anyway."""


@dataclass(frozen=True)
class Fault:
    """`at`: a step, or what some member is doing: forming, recovering, saving, evaluating, closing."""

    victims: tuple[str, ...]
    at: int | str
    signal: signal.Signals = signal.SIGKILL

    @classmethod
    def kill(cls, *victims: str, at: int | str) -> Fault:
        return cls(victims, at)

    @classmethod
    def stall(cls, *victims: str, at: int | str) -> Fault:
        return cls(victims, at, signal.SIGSTOP)

    def __str__(self) -> str:
        return f"{self.signal.name}-{'+'.join(v.replace(' ', '-') for v in self.victims)}-at-{self.at}"


def random_faults(count: int, *, seed: int, members: Sequence[str], first: int, every: int) -> list[Fault]:
    """Kills of one or two random members, about `every` steps apart; one in eight while the last one is recovered."""
    rng = random.Random(seed)
    faults = []
    for number in range(count):
        victims = tuple(rng.sample(members, 2 if rng.random() < 0.1 else 1))
        soon = faults and rng.random() < 0.125
        faults.append(Fault(victims, "recovering" if soon else first + number * every + rng.randrange(every)))
    return faults


def play(
    job: Command, folder: RunFolder, faults: Iterable[Fault], *, limit_s: float, tally: Counter[str] | None = None
) -> list[str]:
    """Does the faults in turn. Returns, in words, those that found no victim, or no moment before the job ended.
    `tally`: counts who was hurt."""
    missed = []
    end = time.monotonic() + limit_s
    for fault in faults:
        soon = time.monotonic() + (RECOVERING_S if fault.at == "recovering" else limit_s)
        while job.running and time.monotonic() < soon and not _is_time(folder, fault.at, job):
            assert time.monotonic() < end, f"{fault}: its moment did not come within {limit_s:g} s\n{job.printed()}"
            time.sleep(POLL_S)
        _await(job, fault.victims)
        hurt = [victim for victim in fault.victims if _hurt(job, victim, fault.signal)]
        if tally is not None:
            tally.update(hurt)
        if len(hurt) < len(fault.victims):
            missed.append(str(fault))
    return missed


def _is_time(folder: RunFolder, at: int | str, job: Command) -> bool:
    if isinstance(at, int):
        return any(r["kind"] == "progress" and r["step"] >= at for r in records(folder)[-3:])
    if at == "forming":
        return _role(job, "worker 0") is not None
    status = None
    with contextlib.suppress(ShardkeepError):
        coordinator = folder.endpoint()
        status = None if coordinator is None else fetch_status(coordinator, timeout_s=0.5)
    if status is None:
        return False
    return status.state == at or ("progress" in kinds(folder) and any(m.phase == at for m in status.members))


def _await(job: Command, victims: Iterable[str]) -> None:
    """Waits for victims that are being replaced: progress comes in bursts, so two faults may have the same moment."""
    end = time.monotonic() + RECOVERING_S
    while job.running and time.monotonic() < end and any(_role(job, victim) is None for victim in victims):
        time.sleep(POLL_S)


def _hurt(job: Command, victim: str, number: signal.Signals) -> bool:
    """Whether the victim was there to be hurt."""
    process = _role(job, victim)
    if process is None:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
        return True
    return False


def _role(job: Command, name: str) -> psutil.Process | None:
    """The process of a role, as the launcher started it last."""
    role, index = name.split()
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in sorted(job.process.children(recursive=True), key=psutil.Process.create_time, reverse=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                line = child.cmdline()
                if role in line and (role == "coordinator" or line[line.index("--index") + 1] == index):
                    return child
    return None


class Unreliable:
    """Between a sender and a transport: delivers messages late, in another order, and some of them twice; the answer is
    that of the first delivery. Of those that are lost, every other was delivered and only its answer is gone."""

    def __init__(self, *, seed: int = 0, late_s: float = 0.004, lost: int = 0) -> None:
        """`lost`: one message of so many, 0 = none."""
        self._rng, self._late_s, self._lost = random.Random(seed), late_s, lost
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        """sent, twice, lost"""

    def send(
        self, deliver: Callable[..., Future[Bytes]], server: int, message: Bytes, then: Bytes | None, timeout_s: float
    ) -> Future[Bytes]:
        with self._lock:
            self.counts["sent"] += 1
            lost = bool(self._lost) and self.counts["sent"] % self._lost == 0
            self.counts["lost"] += lost
            waits = [self._rng.random() * self._late_s for _ in range(2 if self._rng.random() < 0.3 else 1)]
            arrives = not lost or self.counts["lost"] % 2 == 0
            self.counts["twice"] += arrives and len(waits) == 2
        answer: Future[Bytes] = Future()

        def deliver_first() -> None:
            first = deliver(server, message, then, timeout_s=timeout_s)
            if not lost:
                first.add_done_callback(lambda done: pass_on(done, answer))

        def deliver_again() -> None:  # a thread of its own: a sender that repeats a push has not seen the first answer
            deliver(server, message, timeout_s=timeout_s)

        if arrives:
            for wait_s, what in zip(waits, (deliver_first, deliver_again), strict=False):
                threading.Timer(wait_s, what).start()
        if lost:
            gone = DeadlineExceeded(f"server {server} did not answer within {LOST_S:g} s")
            threading.Timer(LOST_S, answer.set_exception, [gone]).start()
        return answer


class UnreliableTransport(LocalTransport):
    """A transport between threads that is `Unreliable`."""

    def __init__(self, handlers: Sequence[Handler], *, seed: int = 0) -> None:
        super().__init__(handlers)
        self._unreliable = Unreliable(seed=seed)

    @property
    def twice(self) -> int:
        return self._unreliable.counts["twice"]

    def send(self, server: int, message: Bytes, then: Bytes | None = None, *, timeout_s: float) -> Future[Bytes]:
        return self._unreliable.send(super().send, server, message, then, timeout_s)
