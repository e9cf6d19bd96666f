"""The gates: decide when staged pushes are applied, and when a pull is answered and with which staleness.

Pure logic: no threads, locks, sockets or tables. The service calls a gate under one lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from shardkeep.base.errors import ProtocolError
from shardkeep.ps.config import ConsistencyConfig

P = TypeVar("P")  # what a push carries


@dataclass(frozen=True, slots=True)
class Work(Generic[P]):
    """Pushes of one step to apply together: sum them per row in the order of `ranks`, then make one update."""

    step: int
    ranks: tuple[int, ...]
    pushes: tuple[P, ...]


class ConsistencyGate(Protocol[P]):
    """Decides the order of pushes and pulls. The caller passes every Work from `take` back to `done`."""

    stages: bool
    """Whether a push is acknowledged before it is applied."""

    def push(self, rank: int, step: int, push: P) -> bool:
        """Takes in a push. Returns False for a duplicate, which the caller only acknowledges. Raises ProtocolError."""
        ...

    def expects(self, rank: int, step: int) -> bool:
        """Whether a push would be new now; False = a duplicate. Raises ProtocolError."""
        ...

    def arrive(self, rank: int, step: int) -> None:
        """Records that a pull of `step` came from `rank`. Raises ProtocolError."""
        ...

    def take(self) -> Work[P] | None:
        """The next pushes to apply; None = none now."""
        ...

    def done(self, work: Work[P]) -> None:
        """Records that `work` has been applied."""
        ...

    def admits(self, step: int) -> bool:
        """Whether a pull of `step` may be answered now."""
        ...

    def staleness(self, step: int) -> int:
        """How far rows read now for `step` lag behind: the steps before it that are not applied for all ranks."""
        ...

    def is_at(self, step: int) -> bool:
        """Whether all pushes of the steps before `step` are applied, and no later push has arrived."""
        ...

    def resume_range(self) -> tuple[int, int]:
        """The first and the last step from which all ranks together can resume with the pushes received so far."""
        ...

    def complete(self, step: int) -> None:
        """Makes all staged pushes of steps before `step` due, because every server holds those of all ranks.

        Raises ProtocolError if `step` is beyond `resume_range`."""
        ...

    def begin(self, step: int) -> int:
        """Starts all ranks at `step`; no push may be due. Drops pushes of `step` that are only staged.

        Returns the number of earlier pushes that never came."""
        ...


class SyncGate(Generic[P]):
    """The pull of step t sees exactly all pushes of steps below t.

    Pushes of t are staged. They are applied when all ranks' pulls of t + 1 have arrived. A rank sends that pull only
    after every server has acknowledged its push of t. So a server that applies t knows that all servers hold t. A rank
    that reads does not wait for pulls: its fence asks every server whether it holds t, then tells all that all do.
    """

    stages = True

    def __init__(self, *, num_workers: int, start_step: int) -> None:
        self._num_workers = num_workers
        self._next = start_step  # the first step that is not applied
        self._staged: dict[int, P] = {}  # by rank, of step `_next`; no other step can be staged
        self._arrived: set[int] = set()  # ranks whose pull of `_next + 1` is here
        self._applying = False

    def expects(self, rank: int, step: int) -> bool:
        if step > self._next:
            raise ProtocolError(
                f"worker {rank} pushed step {step} while step {self._next} is not applied; "
                "in sync a worker pushes a step after it pulled it"
            )
        return step == self._next and rank not in self._staged

    def push(self, rank: int, step: int, push: P) -> bool:
        new = self.expects(rank, step)
        if new:
            self._staged[rank] = push
        return new

    def arrive(self, rank: int, step: int) -> None:
        if step == self._next and rank not in self._arrived:
            return
        if step != self._next + 1:
            raise ProtocolError(
                f"worker {rank} pulled step {step} while step {self._next} is the next to apply; "
                "in sync a worker pulls the running step and, having pushed it, the next"
            )
        if rank not in self._staged:
            raise ProtocolError(f"worker {rank} pulled step {step} without having pushed step {self._next}")
        self._arrived.add(rank)

    def take(self) -> Work[P] | None:
        if self._applying or len(self._arrived) < self._num_workers:
            return None
        self._applying = True
        ranks = tuple(sorted(self._staged))
        return Work(self._next, ranks, tuple(self._staged[rank] for rank in ranks))

    def done(self, work: Work[P]) -> None:
        self._applying = False
        self._staged, self._arrived = {}, set()
        self._next = work.step + 1

    def admits(self, step: int) -> bool:
        return step <= self._next

    def staleness(self, step: int) -> int:
        return 0

    def is_at(self, step: int) -> bool:
        return self._next == step and not self._staged

    def resume_range(self) -> tuple[int, int]:
        return self._next, self._next + (len(self._staged) == self._num_workers)

    def complete(self, step: int) -> None:
        if step <= self._next:
            return
        missing = sorted(set(range(self._num_workers)) - self._staged.keys())
        if step > self._next + 1 or missing:
            which = f"workers {missing} for step {self._next}" if missing else f"steps {self._next} to {step - 1}"
            raise ProtocolError(f"step {step} cannot begin: there are no pushes of {which}")
        self._arrived = set(range(self._num_workers))

    def begin(self, step: int) -> int:
        self._next, self._staged, self._arrived = step, {}, set()
        return 0


@dataclass(slots=True)
class _Progress:
    """The state of one rank's pushes."""

    watermark: int
    """All its steps up to here are applied."""
    accepted: set[int] = field(default_factory=set)
    """Steps above the watermark whose push has been taken in, applied or not."""
    applied: set[int] = field(default_factory=set)
    """Steps above the watermark that are applied."""


class BoundedGate(Generic[P]):
    """Applies pushes as they arrive. A pull of step t waits until all pushes up to t - 1 - bound are applied.

    With bound None (`async`), a pull never waits."""

    stages = False

    def __init__(self, *, num_workers: int, start_step: int, bound: int | None) -> None:
        self._bound = bound
        self._ranks = [_Progress(start_step - 1) for _ in range(num_workers)]
        self._waiting: deque[Work[P]] = deque()
        self._find_lowest()

    def _find_lowest(self) -> None:
        """Looks at all ranks, which the lowest watermark needs only when its last rank leaves it."""
        watermarks = [progress.watermark for progress in self._ranks]
        self._lowest = min(watermarks)
        self._num_lowest = watermarks.count(self._lowest)

    def expects(self, rank: int, step: int) -> bool:
        progress = self._ranks[rank]
        return step > progress.watermark and step not in progress.accepted

    def push(self, rank: int, step: int, push: P) -> bool:
        new = self.expects(rank, step)
        if new:
            self._ranks[rank].accepted.add(step)
            self._waiting.append(Work(step, (rank,), (push,)))
        return new

    def arrive(self, rank: int, step: int) -> None:
        pass

    def take(self) -> Work[P] | None:
        return self._waiting.popleft() if self._waiting else None

    def done(self, work: Work[P]) -> None:
        progress = self._ranks[work.ranks[0]]
        before = progress.watermark
        progress.applied.add(work.step)
        while progress.watermark + 1 in progress.applied:
            progress.watermark += 1
            progress.applied.remove(progress.watermark)
            progress.accepted.remove(progress.watermark)
        if before == self._lowest < progress.watermark:
            self._num_lowest -= 1
            if not self._num_lowest:
                self._find_lowest()

    def admits(self, step: int) -> bool:
        return self._bound is None or self.staleness(step) <= self._bound

    def staleness(self, step: int) -> int:
        return max(0, step - 1 - self._lowest)

    def is_at(self, step: int) -> bool:
        return all(progress.watermark == step - 1 and not progress.accepted for progress in self._ranks)

    def resume_range(self) -> tuple[int, int]:
        return 0, self._lowest + 1

    def complete(self, step: int) -> None:
        pass  # every push is due when it arrives

    def begin(self, step: int) -> int:
        lost = 0
        for progress in self._ranks:
            before, progress.watermark = progress.watermark, max(progress.watermark, step - 1)
            later = {s for s in progress.accepted if s > progress.watermark}
            lost += progress.watermark - before - len(progress.accepted) + len(later)
            progress.accepted, progress.applied = later, {s for s in progress.applied if s > progress.watermark}
        self._find_lowest()
        return lost


def open_gate(config: ConsistencyConfig, *, num_workers: int, start_step: int) -> ConsistencyGate[P]:
    """The gate of a consistency mode; all pushes of steps below `start_step` count as applied."""
    if config.mode == "sync":
        return SyncGate(num_workers=num_workers, start_step=start_step)
    bound = config.staleness if config.mode == "bounded" else None
    return BoundedGate(num_workers=num_workers, start_step=start_step, bound=bound)
