"""The system refuses file operations below a folder, with an error that names no path, as network mounts do.

As a main: FOLDER NUMBER ARGUMENTS... runs `shardkeep` with these arguments there."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EVENTS = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "fcntl.flock", "mmap.__new__")


class Refusals:
    """Armed while `left`, the number of operations until the refused one, is not negative."""

    def __init__(self) -> None:
        self.left, self.number, self.folder = -1, 0, ""
        sys.addaudithook(self._heard)

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if self.left < 0 or event not in EVENTS:
            return
        named = args and isinstance(args[0], str | os.PathLike) and str(args[0]).startswith(self.folder)
        if named or (event in EVENTS[-2:] and self.left == 0):
            self.left -= 1
            if self.left < 0:
                raise OSError(self.number, os.strerror(self.number))


@functools.cache
def _refusals() -> Refusals:
    """An audit hook stays for the life of the process, so there is one."""
    return Refusals()


@contextlib.contextmanager
def refusing(folder: Path, number: int, *, after: int = 0) -> Iterator[Refusals]:
    """Inside, one operation below `folder` fails with the error number, `after` others; then none does."""
    refusals = _refusals()
    refusals.folder, refusals.number, refusals.left = str(folder), number, after
    try:
        yield refusals
    finally:
        refusals.left = -1


def main() -> None:
    from shardkeep.cli.main import main as command

    folder, number, sys.argv[1:] = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    with refusing(Path(folder), number):
        command()


if __name__ == "__main__":
    main()
