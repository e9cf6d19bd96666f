"""Stopwatch: where a worker's steps spend their time, part by part. Counts seconds; reports nothing.

At any moment exactly one part runs, so the parts of a step add up to the whole of it. A switch costs one look at the
clock; nothing here waits for a device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Literal, Protocol, get_args

Part = Literal[
    "data", "pull_wait", "lookup", "forward", "backward", "collect", "dense_reduce", "optimizer", "push", "other"
]
PARTS: tuple[Part, ...] = get_args(Part)
"""In the order of a step; docs/performance.md says what each is."""


class Ranges(Protocol):
    """Who draws the parts into a trace."""

    def follow(self, part: Part | None) -> None:
        """Ends the range that is open and opens one for `part`; None = opens none."""

    def nested(self, part: Part) -> contextlib.AbstractContextManager[object]:
        """A range inside the open one; any thread."""


class Stopwatch:
    """Seconds by part. One thread at a time: autograd's may switch while the training thread waits for it."""

    def __init__(self) -> None:
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        """Since the beginning."""
        self.ranges: Ranges | None = None
        """Set while a profile is taken."""
        self._part: Part | None = None
        self._since = 0.0

    def enter(self, part: Part | None) -> None:
        """Ends the running part and begins `part`; None = nothing is counted until the next one."""
        self._switch(part)
        if self.ranges is not None:
            self.ranges.follow(part)

    @contextlib.contextmanager
    def within(self, part: Part | None) -> Iterator[None]:
        """Counts the inside as `part` (None = not at all), then goes on with what ran before."""
        outer = self._part
        drawn = self.ranges.nested(part) if self.ranges is not None and part is not None else contextlib.nullcontext()
        self._switch(part)
        try:
            with drawn:
                yield
        finally:
            self._switch(outer)

    def _switch(self, part: Part | None) -> None:
        now = time.perf_counter()
        if self._part is not None:
            self.seconds[self._part] += now - self._since
        self._part, self._since = part, now
