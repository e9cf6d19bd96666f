"""A disk on which no file of this process grows any more, as on a full one."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

from shardkeep import Callback
from shardkeep.callbacks import EvaluationEvent, ProgressEvent, Summary


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Inside, every write to a file raises OSError (EFBIG), in all threads."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class FullMeanwhile(Callback):
    """The disk is full from the first progress to the last evaluation."""

    def __init__(self) -> None:
        self.disk = contextlib.ExitStack()
        self.full = False

    def on_progress(self, event: ProgressEvent, /) -> None:
        if not self.full:
            self.full = True
            self.disk.enter_context(full_disk())

    def on_evaluation(self, event: EvaluationEvent, /) -> None:
        self.disk.close()

    def on_end(self, summary: Summary, /) -> None:
        self.disk.close()
