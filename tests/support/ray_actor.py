"""A machine's actor of `shardkeep.ray` without ray: `Command(CONFIG, TOKEN, RUN, main=MAIN)` prints what it returns.

The nodes that it starts are forked from it, which saves the imports of each."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn

from tests.support.forked import SHARDKEEP, Child, become, close_all_but, redirect, subprocess_with

MAIN = "tests.support.ray_actor:main"
PLACE = ("--rank", "1", "--nodes", "2")


class ForkedNode(Child):
    """The part of `subprocess.Popen` that an actor needs: pipes to the input and from the error output."""

    def __init__(self, command: Sequence[str], **_same: Any) -> None:
        reads, writes = os.pipe()
        errors, prints = os.pipe()

        def act() -> NoReturn:
            redirect(reads, prints, prints)
            close_all_but()
            os.setsid()
            become(SHARDKEEP, command[3:], os.environ.copy())

        super().__init__(act, os.fdopen(writes, "wb", buffering=0))
        os.close(reads)
        os.close(prints)
        self.stderr = os.fdopen(errors, encoding="utf-8")

    def __enter__(self) -> ForkedNode:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.stdin is not None
        self.stdin.close()
        self.stderr.close()
        self.wait()


def main() -> None:
    util = types.ModuleType("ray.util")
    util.get_node_ip_address = lambda: "127.0.0.1"  # type: ignore[attr-defined]
    sys.modules |= {"ray": types.ModuleType("ray"), "ray.util": util}  # all that an actor imports of it
    from shardkeep.engines import ray

    ray.subprocess = subprocess_with(Popen=ForkedNode)  # type: ignore[assignment, attr-defined]
    config, token, run = sys.argv[1:]
    print(json.dumps(ray.Machine().run(config, token, run, PLACE)), flush=True)
