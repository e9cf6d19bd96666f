"""What do 500 members cost the coordinator?

    python benchmarks/many_members.py                             # 100 servers and 400 workers, 26 tables
    python benchmarks/many_members.py --servers 20 --workers 80

One real coordinator, and members that only speak to it: each is a client of the control plane with its heartbeats, a
hundred in a process, without rows, tower and torch RPC. In turn, all register and join, stay for `--seconds`, lose
server 0 and form again with a replacement, and leave. Figures of each phase: the coordinator's CPU seconds (for
heartbeats: of a core), seconds of wall time, the bytes of the state file, what the coordinator wrote.

On two cores, the members compete with the coordinator: wall time is mostly theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import harness

from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.grpc.client import ControlClient, report_death
from shardkeep.ps.control.records import Formation, Offer, ResumeRange

A_PROCESS = 100
"""Members of one process."""
LIMIT_S = 600.0
HOLDS = ResumeRange(0, 1 << 40, holds=True)
JOB = (
    "name: many\nservers: {servers}\nworkers: {workers}\ncheckpoint: {{every_steps: off}}\n"
    "recovery: {{max_lost_steps: 100000}}\nliveness: {{form_timeout_s: 600}}\n"
)
TARGETS = {"form": 8.0, "beats": 0.15, "death": 5.0, "leave": 10.0, "state_mb": 0.3}


class Members:
    """Members `first` to `last` of a job, of the servers and then the workers. Each phase blocks until all are done."""

    def __init__(self, run: Path, first: int, last: int, *, servers: int, workers: int, tables: int) -> None:
        from shardkeep.member.access import endpoint_of

        self._endpoint, self._members = endpoint_of(str(run)), servers + workers
        self._tables = [TableSpec(name=f"c{number}", dim=16) for number in range(tables)]
        self._clients = [self._client(number, servers) for number in range(first, last)]
        self._formations: dict[ControlClient, Formation | None] = {}

    def _client(self, number: int, servers: int) -> ControlClient:
        if number < servers:
            return ControlClient(self._endpoint, role="server", index=number, timeout_s=LIMIT_S)
        return ControlClient(self._endpoint, role="worker", index=number - servers, timeout_s=LIMIT_S)

    def form(self) -> str:
        return self._each(self._join)

    def death(self) -> str:
        """All lose the generation. The process of server 0 reports its death, and starts another in its place."""
        if self._clients[0].member.name == "server 0":
            dead = self._clients[0].member
            self._clients[0].close()
            report_death(
                self._endpoint, role=dead.role, index=dead.index, pid=dead.pid, reason="killed", timeout_s=LIMIT_S
            )
            self._clients[0] = self._client(0, 1)
        return self._each(self._join_again)

    def leave(self) -> str:
        return self._each(self._leave)

    def _join(self, client: ControlClient) -> None:
        client.register(wait_s=LIMIT_S)
        client.start_heartbeats(patience_s=LIMIT_S, members=self._members)
        self._formations[client] = client.join(self._offer_of(client))

    def _join_again(self, client: ControlClient) -> None:
        before = self._formations.get(client)
        if before is None:
            self._join(client)
            return
        client.wait_lost_or_over(before.generation)
        self._formations[client] = client.join_again(self._offer_of(client), before, "server 0 was lost")

    def _leave(self, client: ControlClient) -> None:
        if client.member.name == "worker 0":
            client.report("summary", {"steps": 1})
        if client.member.role == "server":
            client.over.wait(LIMIT_S)
        client.leave(0)

    def _offer_of(self, client: ControlClient) -> Offer:
        return Offer(tuple(self._tables) if client.member.role == "worker" else (), resume_range=HOLDS)

    def _each(self, act: Callable[[ControlClient], None]) -> str:
        """How many members gave up, and why the first one did; "" = none."""
        failed: list[BaseException] = []

        def run(client: ControlClient) -> None:
            try:
                act(client)
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=(client,)) for client in self._clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return f"{len(failed)} {failed[0]}" if failed else ""


def serve_phases(members: Members) -> None:
    """Reads phases from stdin, and answers each with a line: empty, or the members that gave up."""
    print(flush=True)
    for line in sys.stdin:
        print(getattr(members, line.strip())()[:300], flush=True)


class Watched:
    """The coordinator's process, and those of its members."""

    def __init__(self, run: Path, coordinator: Any, members: list[subprocess.Popen[str]]) -> None:
        self._run, self._coordinator, self._members = run, coordinator, members

    def phase(self, name: str) -> harness.Figures:
        """Runs a phase in all members."""
        return self._figures(lambda: self._tell(name))

    def beats(self, seconds: float) -> harness.Figures:
        """The coordinator while its members only send heartbeats; its CPU is a share of a core."""
        found = self._figures(lambda: time.sleep(seconds))
        return found | {"cpu": found["cpu_s"] / found["wall_s"]}

    def _figures(self, act: Callable[[], harness.Figures | None]) -> harness.Figures:
        cpu_s, written, began = self._cpu_s(), self._written(), time.monotonic()
        found = act() or {}
        wall_s = time.monotonic() - began
        figures = {"cpu_s": self._cpu_s() - cpu_s, "wall_s": wall_s, "written_mb": (self._written() - written) / 1e6}
        state = self._run / "standing.json"
        return figures | found | {"state_mb": state.stat().st_size / 1e6 if state.exists() else 0.0}

    def _tell(self, name: str) -> harness.Figures:
        for process in self._members:
            pipe(process.stdin).write(name + "\n")
            pipe(process.stdin).flush()
        failed = [line for process in self._members if (line := pipe(process.stdout).readline().strip())]
        print(
            "".join(f"{name}: {line} gave up: {why}\n" for line, _, why in (one.partition(" ") for one in failed)),
            end="",
        )
        return {"gave_up": sum(float(line.partition(" ")[0]) for line in failed)}

    def _cpu_s(self) -> float:
        return float(sum(self._coordinator.cpu_times()[:2]))

    def _written(self) -> float:
        return float(self._coordinator.io_counters().write_chars)


def pipe(end: IO[str] | None) -> IO[str]:
    assert end is not None
    return end


@contextmanager
def watched(folder: Path, *, servers: int, workers: int, tables: int) -> Iterator[Watched]:
    """Starts a coordinator and the processes of its members; ends all of them."""
    import psutil

    run, config = folder / "run", folder / "config.yaml"
    config.write_text(JOB.format(servers=servers, workers=workers), encoding="utf-8")
    command = [sys.executable, "-m", "shardkeep", "coordinator", str(config), "--run-dir", str(run)]
    sizes = ["--servers", str(servers), "--workers", str(workers), "--tables", str(tables)]
    with (folder / "coordinator.log").open("w") as log:
        processes = [subprocess.Popen(command, stdout=log, stderr=log, text=True)]
    try:
        for first in range(0, servers + workers, A_PROCESS):
            part = [sys.executable, __file__, "--run", str(run), "--first", str(first), *sizes]
            processes.append(subprocess.Popen(part, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        for process in processes[1:]:
            pipe(process.stdout).readline()
        yield Watched(run, psutil.Process(processes[0].pid), processes[1:])
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def one_job(seconds: float, *, servers: int, workers: int, tables: int) -> harness.Figures:
    """The figures of one job: of each phase `PHASE cpu_s`, `PHASE wall_s`, and more."""
    found: harness.Figures = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        watched(Path(folder), servers=servers, workers=workers, tables=tables) as job,
    ):
        for name in ("form", "beats", "death", "leave"):
            figures = job.beats(seconds) if name == "beats" else job.phase(name)
            found |= {f"{name} {key}": value for key, value in figures.items()}
    return found


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--servers", type=int, default=100)
    parser.add_argument("--workers", type=int, default=400)
    parser.add_argument("--tables", type=int, default=26, help="tables that each worker brings")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = {"servers": options.servers, "workers": options.workers, "tables": options.tables}
    if options.run is not None:
        threading.stack_size(512 * 1024)
        last = min(options.first + A_PROCESS, options.servers + options.workers)
        serve_phases(Members(options.run, options.first, last, **sizes))
        os._exit(0)
    options = harness.parse(parser)
    found = harness.alternate(
        {"coordinator": lambda seconds: one_job(seconds, **sizes)}, rounds=options.rounds, seconds=options.seconds
    )
    spreads = {
        key: harness.spread([figures[key] for figures in found["coordinator"]]) for key in found["coordinator"][0]
    }
    for name, target in TARGETS.items():
        key = {"beats": "beats cpu", "state_mb": "beats state_mb"}.get(name, f"{name} cpu_s")
        harness.show_ratio(key, spreads[key], target)
    print(json.dumps(spreads))
    harness.write(options.json, "many_members", {**sizes, "rounds": found, "spreads": spreads})


if __name__ == "__main__":
    main()
