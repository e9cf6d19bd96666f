"""Compiles modules of kernels in several processes, each module after those that it imports.

A builder is a Python process that imports the modules that it reads on stdin, and answers each with a line. It reports
no errors: its parent imports what the builders have not built, and sees the error itself.
"""

from __future__ import annotations

import contextlib
import functools
import json
import selectors
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from graphlib import TopologicalSorter

from shardkeep.base.compiling.sources import imports_of, source_size

_BUILDER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from shardkeep.base.compiling.kernels import build
for line in sys.stdin:
    build(line.strip())
    print("built", flush=True)
"""


def build_all(modules: Collection[str], count: int) -> None:
    """Has `count` builders build modules; returns when all are built, or when a builder ends early.

    A module waits for those of its imports that are among `modules`. Of several, the one with the longest chain of
    modules behind it comes first."""
    sorter = TopologicalSorter({m: [name for name in imports_of(m) if name in modules] for m in modules})
    sorter.prepare()
    urgency = _urgency(modules)
    with _builders(count) as idle, selectors.DefaultSelector() as answers:
        ready = list(sorter.get_ready())
        while sorter.is_active():
            ready.sort(key=urgency)
            while ready and idle:
                builder, module = idle.pop(), ready.pop()
                if not _order(builder, module):
                    return
                answers.register(builder.stdout, selectors.EVENT_READ, (builder, module))  # type: ignore[arg-type]
            for key, _ in answers.select():
                builder, module = key.data
                if not builder.stdout.readline():
                    return
                answers.unregister(key.fileobj)
                idle.append(builder)
                sorter.done(module)
            ready += sorter.get_ready()


def _urgency(modules: Collection[str]) -> Callable[[str], int]:
    """Bytes of source on the longest chain of imports that begins at a module."""
    users = {name: [m for m in modules if name in imports_of(m)] for name in modules}

    @functools.cache
    def urgency(module: str) -> int:
        return source_size(module) + max(map(urgency, users[module]), default=0)

    return urgency


@contextlib.contextmanager
def _builders(count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Builders that have nothing to do yet; they are gone afterwards. One whose parent dies ends after its module."""
    command = [sys.executable, "-c", _BUILDER, json.dumps(sys.path)]
    started = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )
        for _ in range(count)
    ]
    try:
        yield list(started)
    finally:
        for builder in started:
            builder.kill()
        for builder in started:
            builder.wait()
            for pipe in (builder.stdin, builder.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]


def _order(builder: subprocess.Popen[str], module: str) -> bool:
    """Hands a module to a builder; whether it lives."""
    try:
        builder.stdin.write(f"{module}\n")  # type: ignore[union-attr]
    except OSError:
        return False
    return True
