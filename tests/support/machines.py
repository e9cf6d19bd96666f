"""`shardkeep node` on machines that are commands here: of real roles, or with stand-ins for workers and servers."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import psutil
import typer

from shardkeep.base.logs.log import configure
from shardkeep.cli.exits import run_command
from shardkeep.config import load_config
from shardkeep.launch.machine import Machine
from shardkeep.launch.node import NodeOptions, run_node
from shardkeep.run.reader import RunReader
from tests.support import stand_in
from tests.support.cluster import Cluster, Command, kill
from tests.support.stand_ins import StandIns, Watched

LIMIT_S = 150.0
LOOPBACK = "127.0.0.1"


class Machines(Watched):
    """The machines of one job, below one folder. Leaves none behind a `with`.

    Args:
        plan: What stand-ins are to do; None = the roles are real ones.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], plan: Mapping[str, Any] | None = None) -> None:
        super().__init__(RunReader(folder / "run"), LIMIT_S, lambda: any(each.running for each in self._commands))
        self._cluster, self._real = Cluster(folder), plan is None
        self.config = self._cluster.write(dict(config))
        self._seen: dict[int, psutil.Process] = {}
        self._commands: list[Command] = []
        if plan is not None:
            (folder / stand_in.PLAN).write_text(json.dumps({"steps": 5, "step_s": 0.01, **plan}))

    def __enter__(self) -> Self:
        self._cluster.__enter__()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._cluster.__exit__(AssertionError, error, trace)  # shows all, in case that the test failed
        kill(self._seen.values())
        self.show_logs()

    def start(self, rank: int, nodes: int = 2, *more: str, advertise: str = LOOPBACK, **options: Any) -> Command:
        """One machine. `more`: further arguments; options: as of Command. All for real roles."""
        if self._real:
            place = ("--rank", str(rank), "--nodes", str(nodes), "--advertise", advertise, *more)
            words = ("node", str(self.config), "--run-dir", str(self.run.path), *place)
            self._commands.append(self._cluster.command(*words, **options))
        else:
            given = {"config": str(self.config), "run": str(self.run.path), "rank": rank, "nodes": nodes}
            self._commands.append(self._cluster.command(json.dumps(given), *more, main=f"{__name__}:main"))
        return self._commands[-1]

    def all(self, nodes: int = 2) -> list[Command]:
        return [self.start(rank, nodes) for rank in reversed(range(nodes))][::-1]

    def members(self) -> dict[str, psutil.Process]:
        found = super().members()
        self._seen |= {process.pid: process for process in found.values()}
        return found

    def held(self) -> dict[str, psutil.Process]:
        """Waits until all stand-ins for workers hold; the processes then."""
        self.until(lambda: stand_in.all_hold(self.run), "not all workers hold")
        return self.members()

    def end(self, machines: Iterable[Command]) -> list[int]:
        """Waits for the end of the machines; their exit codes."""
        return [machine.end(limit_s=LIMIT_S).code for machine in machines]

    @property
    def summary(self) -> dict[str, Any]:
        return self.run.summary() or {}


def main() -> None:
    """`shardkeep node` with stand-ins: `sys.argv` has its options, as JSON, and perhaps `--only` and a role."""
    given = json.loads(sys.argv[1])
    configure("node", given["rank"])
    options = NodeOptions(
        config_path=Path(given["config"]),
        run=Path(given["run"]),
        machine=Machine(given["rank"], given["nodes"]),
        address=LOOPBACK,
        only=sys.argv[3] if len(sys.argv) > 3 else "",
    )
    with contextlib.closing(StandIns()) as starter:
        try:
            starting = lambda _: contextlib.nullcontext(starter)  # noqa: E731
            run_command(lambda: run_node(load_config(options.config_path), options, starting), debug=False)
        except typer.Exit as end:
            sys.exit(end.exit_code)
