"""Departure: a role that gets SIGTERM or SIGINT leaves its job in order, within a limit. Knows no job.

A signal handler of Python runs when the main thread comes back from C, which may take minutes in a sum of gradients or
a compilation. So a thread of its own reads the signals from a pipe that the C handler writes to.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

from shardkeep.base.exit_codes import LEAVING, code_of_leaving

AT_ONCE_S = 5.0
"""Seconds until a role ends that has nothing to bring to an end, but does not come back from C."""
WHOLE_JOB_S = 1.0
"""Seconds in which a leaving role continues. A platform that ends the whole job asks every process, and
the job then stops with a checkpoint, for which it needs all of them."""
_ADMITTED = b"\0"  # in the pipe, behind the signals that came before `admit`


class Leaving(KeyboardInterrupt):
    """The role leaves its job. No Exception, so that no part handles it as a failure."""

    def __init__(self, number: int) -> None:
        self.code = code_of_leaving(number)
        super().__init__(f"left on {signal.Signals(number).name}")


class Departure:
    """The first SIGTERM or SIGINT raises Leaving in the main thread, or is postponed to where the role looks for it. A
    second one ends the process at once.

    Args:
        end: Ends the process with an exit code, even while its threads run.
        sheltered: The role heeds no signal before `admit`, and no second one: a platform signals every process of a
            machine, and what runs the roles there decides.
    """

    def __init__(self, *, end: Callable[[int], object] = os._exit, sheltered: bool = False) -> None:
        self._end, self.sheltered = end, sheltered
        self._admits, self._target = not sheltered, -1
        self._number = 0
        self._since = 0.0
        self._raised = False
        self._postponed = 0
        self._limit_s = AT_ONCE_S
        self._asked = threading.Event()
        self.when_asked: Callable[[], None] = lambda: None
        """Called once, in another thread, at the request to leave: wakes a main thread that waits."""
        self.last_words: Callable[[str, int], object] = lambda _text, _code: None
        """Called in another thread before the process ends at the limit, with how it left and its exit code."""

    def watch(self) -> None:
        """Takes over the signals. To be called in the main thread."""
        source, self._target = os.pipe()
        os.set_blocking(self._target, False)
        signal.set_wakeup_fd(self._target, warn_on_full_buffer=False)
        for number in LEAVING:
            signal.signal(number, self._caught)
        threading.Thread(target=self._watch, args=(source, self._admits), name="departure", daemon=True).start()

    def admit(self) -> None:
        """Lets the next signal in."""
        self._admits = True
        if self._target >= 0:
            os.write(self._target, _ADMITTED)

    @property
    def asked(self) -> bool:
        """Whether a request to leave has come."""
        return self._asked.is_set()

    @property
    def works_on_s(self) -> float:
        """Seconds until it leaves, if the job does not stop meanwhile."""
        return max(0.0, self._since + WHOLE_JOB_S - time.monotonic())

    @property
    def due(self) -> bool:
        """Whether it is to leave now."""
        return self.asked and not self.works_on_s

    def check(self) -> None:
        """Raises Leaving after a request to leave."""
        if self.asked:
            raise Leaving(self._number)

    @contextlib.contextmanager
    def postponed(self, limit_s: float) -> Iterator[None]:
        """Inside, nothing is raised: the role looks at `due` itself, and gets `limit_s` seconds to leave."""
        self._postponed, self._limit_s = self._postponed + 1, limit_s
        try:
            self.check()
            yield
        finally:
            self._postponed -= 1
            self._limit_s = AT_ONCE_S

    def _caught(self, number: int, _frame: object) -> None:
        if not self._admits:
            return
        self._ask(number)
        if not (self._postponed or self._raised):
            self._raised = True
            raise Leaving(number)

    def _ask(self, number: int) -> None:
        if not self._number:
            self._number, self._since = number, time.monotonic()
        self._asked.set()

    def _watch(self, source: int, admits: bool) -> None:
        while not admits:
            admits = os.read(source, 1) == _ADMITTED
        number = _next(source, None)
        limit_s = self._limit_s
        self._ask(number)
        self.when_asked()
        if self.sheltered:
            time.sleep(limit_s)
        if self.sheltered or not _next(source, limit_s):
            self.last_words(str(Leaving(number)), code_of_leaving(number))
        self._end(code_of_leaving(number))


def _next(source: int, limit_s: float | None) -> int:
    """The next signal of LEAVING; 0 when the time ran out first."""
    end = None if limit_s is None else time.monotonic() + limit_s
    while select.select([source], [], [], None if end is None else max(0.0, end - time.monotonic()))[0]:
        if (number := os.read(source, 1)[0]) in LEAVING:
            return number
    return 0
