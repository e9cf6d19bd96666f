"""Memory that the system refuses: one line with the size."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from shardkeep.base.errors import UserError
from shardkeep.base.sizes import size_text

_BYTES = re.compile(r"you tried to allocate (\d+) bytes")
_UNITS = re.compile(r"(?:Tried|Unable) to allocate ([\d.]+ ?[KMGTPE]i?B)")


@contextlib.contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Inside, an allocation of numpy's or PyTorch's that fails is a UserError. `what`: who asked, and what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if (asked := asked_memory(error)) is None:
            raise
        raise UserError(f"out of memory: {asked} asked at once by {what}") from error


def asked_memory(error: BaseException) -> str | None:
    """How much an allocation that failed asked for; None where it is another error."""
    text = str(error)
    if found := _BYTES.search(text):
        return size_text(int(found[1]))
    if found := _UNITS.search(text):
        return found[1]
    return "more than there is" if isinstance(error, MemoryError) else None
