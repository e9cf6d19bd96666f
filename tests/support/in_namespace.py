"""`shardkeep` in a network namespace: `Command(..., main=MAIN, env=inside(NAME))`. Linux only.

It is forked. This saves the imports of a command behind `ip netns exec`, 4 CPU s.
"""

from __future__ import annotations

import ctypes
import os

MAIN = "tests.support.in_namespace:main"
_VARIABLE = "SHARDKEEP_TEST_NAMESPACE"
CLONE_NEWNET = 0x40000000  # linux/sched.h


def inside(name: str) -> dict[str, str]:
    """The environment of a command in the namespace that `ip netns add NAME` made."""
    return {_VARIABLE: name}


def main() -> None:
    """Moves this thread, the only one so far, into the namespace."""
    place = os.open(f"/var/run/netns/{os.environ[_VARIABLE]}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(place, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(place)
    from shardkeep.cli.main import main as shardkeep

    shardkeep()
