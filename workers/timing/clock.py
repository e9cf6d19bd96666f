"""Stopwatch: where a worker's steps spend their time, part by part. Counts seconds; reports nothing.

At any moment exactly one part runs, so the parts of a step add up to the whole of it. A switch costs one look at the
clock; nothing here waits for a device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Literal, Protocol, get_args

Part = Literal[
    "data", "pull_wait", "lookup", "forward", "backward", "collect", "dense_reduce", "optimizer", "keep", "push",
    "other",
]  # fmt: skip
PARTS: tuple[Part, ...] = get_args(Part)
"""In the order of a step; docs/guide/performance.md says what each is."""


class Observer(Protocol):
    """Who draws steps and parts into a trace."""

    def step(self, step: int) -> None:
        """Step `step` begins."""

    def follow(self, part: Part | None) -> None:
        """Ends the range that is open and opens one for `part`; None = opens none."""

    def nested(self, name: str) -> contextlib.AbstractContextManager[object]:
        """A range of its own, inside the open one where the thread is the same."""

    def close(self) -> None:
        """There are no more steps."""


class Stopwatch:
    """Seconds by part. One thread at a time: autograd's may switch while the training thread waits for it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, observer: Observer | None = None) -> None:
        """`observer`: draws the steps of a job that is profiled."""
        self._clock = clock
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        """Since the beginning."""
        self._observer = observer
        self._part: Part | None = None
        self._since = 0.0
        self._excluded_s = 0.0

    def now(self) -> float:
        """Seconds of training: the clock, without what was excluded."""
        return self._clock() - self._excluded_s

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Counts the inside as no part and as no training; not to be nested."""
        began = self._clock()
        try:
            with self.within(None):
                yield
        finally:
            self._excluded_s += self._clock() - began

    def begin(self, step: int) -> None:
        """Step `step` begins, with `other`. What the observer takes is excluded."""
        if self._observer is not None:
            with self.excluded():
                self.enter(None)
                self._observer.step(step)
        self.enter("other")

    def end(self) -> None:
        """No step follows."""
        self.enter(None)
        if self._observer is not None:
            self._observer.close()

    def enter(self, part: Part | None) -> None:
        """Ends the running part and begins `part`; None = nothing is counted until the next one."""
        self._switch(part)
        if self._observer is not None:
            self._observer.follow(part)

    @contextlib.contextmanager
    def within(self, part: Part | None) -> Iterator[None]:
        """Counts the inside as `part` (None = not at all), then continues with what ran before."""
        outer = self._part
        drawn = contextlib.nullcontext() if part is None else self.drawn(part)
        self._switch(part)
        try:
            with drawn:
                yield
        finally:
            self._switch(outer)

    def drawn(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Draws the inside into a profile; counts nothing. Any thread."""
        return contextlib.nullcontext() if self._observer is None else self._observer.nested(name)

    def _switch(self, part: Part | None) -> None:
        now = self._clock()
        if self._part is not None:
            self.seconds[self._part] += now - self._since
        self._part, self._since = part, now
