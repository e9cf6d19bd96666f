"""Standard output of the command. If it cannot be written (a full device), the command ends with one line."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator

from shardkeep.base.errors import ShardkeepError


class OutputError(ShardkeepError):
    """Standard output cannot be written."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"standard output cannot be written ({cause.strerror or cause})")


class Output(io.TextIOWrapper):
    """Writes text to a file descriptor. Raises OutputError, except for EPIPE: the reader of a pipe may leave."""

    def write(self, text: str, /) -> int:
        with _mapped():
            return super().write(text)

    def flush(self) -> None:
        with _mapped():
            super().flush()


@contextlib.contextmanager
def _mapped() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        raise OutputError(error) from error


def guard_output() -> None:
    """Makes sys.stdout an Output."""
    if isinstance(old := sys.stdout, io.TextIOWrapper):
        form = {name: getattr(old, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
        sys.stdout = Output(old.detach(), **form)


def drop_output() -> None:
    """Discards buffered and later output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
