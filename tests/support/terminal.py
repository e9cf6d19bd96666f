"""`shardkeep` on a terminal: `Command("train", ..., main=MAIN)`. What it prints there goes to the standard output."""

from __future__ import annotations

import os
import pty

MAIN = "tests.support.terminal:main"


def main() -> None:
    pid, terminal = pty.fork()
    if not pid:
        os.environ["TERM"] = "dumb"
        from shardkeep.cli.main import main as shardkeep

        shardkeep()
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # of Linux, once the last process has left the terminal
            break
        os.write(1, part)
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
