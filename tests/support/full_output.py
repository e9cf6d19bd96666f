"""`shardkeep` whose output and error output are on a full device."""

from __future__ import annotations

import os


def main() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    for number in (1, 2):
        os.dup2(full, number)
    from shardkeep.cli.main import main

    main()
