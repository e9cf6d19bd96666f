"""CPU seconds of training: of a worker's process and, asked by worker 0, of the servers; and how long the threads of
the worker waited for a core. Evaluation is left out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def core_wait_s() -> float:
    """Seconds that the living threads of this process were ready to run without a core, all together (`schedstat` in
    Documentation/scheduler of Linux). 0 where the system does not say."""
    waited_ns = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError):  # a thread may have ended
            waited_ns += int(file.read_text().split()[1])
    return waited_ns / 1e9


@dataclass(frozen=True, slots=True)
class _Instant:
    step: int
    worker_s: float
    waited_s: float
    servers_s: tuple[float, ...]


class CpuMeter:
    """Adds up what processes use between `start` and `stop`. One thread's.

    Args:
        servers: The CPU seconds of each server's process so far; left out = this rank does not ask them.
        clock: Those of this process.
        waits: Those for which its threads waited for a core."""

    def __init__(
        self,
        servers: Callable[[], Sequence[float]] | None = None,
        *,
        clock: Callable[[], float] = time.process_time,
        waits: Callable[[], float] = core_wait_s,
    ) -> None:
        self._servers, self._clock, self._waits = servers, clock, waits
        self._since: _Instant | None = None
        self._steps = 0
        self._worker_s = self._servers_s = self._waited_s = 0.0

    @property
    def running(self) -> bool:
        return self._since is not None

    def start(self, step: int) -> None:
        """Counts from here on; `step` steps are done. Raises what asking the servers raises."""
        self._since = self._now(step)

    def stop(self, step: int) -> None:
        """Counts until here, if it was started. A stretch in which a server was replaced is left out."""
        since, self._since = self._since, None
        if since is None or step <= since.step:
            return
        now = self._now(step)
        gone = [b - a for a, b in zip(since.servers_s, now.servers_s, strict=True)]
        if min(gone, default=0.0) < 0.0:
            return
        self._steps += step - since.step
        self._worker_s += now.worker_s - since.worker_s
        self._waited_s += max(0.0, now.waited_s - since.waited_s)  # the waits of threads that end are lost
        self._servers_s += sum(gone) / max(len(gone), 1)

    @contextlib.contextmanager
    def excluded(self, step: int) -> Iterator[None]:
        """Does not count the inside; `step` steps are done. Raises what asking the servers raises."""
        counts = self.running
        self.stop(step)
        yield
        if counts:
            self.start(step)

    def drop(self) -> None:
        """Forgets a stretch that was not ended."""
        self._since = None

    def mean_ms(self) -> dict[str, Any]:
        """CPU milliseconds of a step: `worker`, this process; `server`, the mean of those that are processes of their
        own; `waited`, those for which threads of this process had no core; `steps` counted. Empty when none was."""
        if not self._steps:
            return {}
        seconds = {"worker": self._worker_s, "server": self._servers_s, "waited": self._waited_s}
        return {"steps": self._steps, **{name: round(1e3 * s / self._steps, 4) for name, s in seconds.items()}}

    def _now(self, step: int) -> _Instant:
        return _Instant(step, self._clock(), self._waits(), tuple(self._servers()) if self._servers is not None else ())
