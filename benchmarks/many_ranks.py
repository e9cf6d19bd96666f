"""What do hundreds of ranks cost the servers of a job, and what does the death of one server cost them?

    python benchmarks/many_ranks.py --json FILE            # 8 to 400 ranks, all modes; continues FILE
    python benchmarks/many_ranks.py --ranks 8 --modes sync

**Real:** the coordinator and the servers (processes of `shardkeep coordinator` and `shardkeep server`, with journals,
heartbeats and telemetry), torch RPC, and every rank as a member of the job and as the sender of its own pulls and
pushes (`many_ranks_clients.py`): 350 rows per server and step, Zipf 1.05 over 10 M ids, 16 values a row, one table.
**Not real:** ranks share processes, one RPC agent each, so the RPC group has few members; there is no data, tower or
dense sum: all processes begin a step together. What a gloo mesh of so many ranks costs is a formula in docs/scale.md.

Per job: forming, three steps, `--seconds` of steps, then SIGKILL for server 0 in the middle of a step and a replacement
by `shardkeep server` (imports included), as a launcher would start it. Figures: CPU milliseconds per step of a server
and of all clients; the coordinator's share of a core; steps per second; RSS of a server; the death: seconds until the
first step after it, steps lost and trained again. Clients compete with the servers for the cores: wall time is mostly
theirs.

Two more jobs of 8 ranks have ten times the rows, and 26 tables: docs/scale.md takes the cost of a row and of a table
from them. Without servers: the gate of pulls and the sum of a step's pushes, CPU milliseconds per step, and a journal,
in this process; and gloo's mesh, in processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
from many_ranks_clients import zipf_ids
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.jagged import Gradients, SectionIds
from shardkeep.ps.server.journal.journal import Journal
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.server.tables import sum_of
from shardkeep.ps.transport.transport import LocalTransport
from shardkeep.ps.wire.message import Kind, Packed, allocate, read
from shardkeep.workers.collectives.process_group import ProcessCollective

MODES = ("sync", "bounded", "async")
DIM, ROWS, MANY_ROWS, TABLES = 16, 350, 3500, 26
MESHES = (8, 16, 32)
"""Processes of a gloo mesh."""
A_PROCESS = 200
"""Ranks of one process."""
WARM_STEPS, KILL_AFTER_S = 3, 0.5
JOB = (
    "name: ranks\nservers: {servers}\nworkers: {ranks}\nconsistency: {{mode: {mode}}}\n"
    "checkpoint: {{every_steps: off}}\nrecovery: {{max_lost_steps: 100000}}\n"
    "liveness: {{form_timeout_s: 600, lease_s: 300, step_timeout_s: 300}}\n"  # the cores are overloaded
    "tables:\n"
)
TARGET_MS = 20.0
"""Of the gate, and of a step's sum of pushes of 350 rows, at 400 ranks."""


class RunningJob:
    """The processes of one job. Their CPU seconds are counted until they end."""

    def __init__(self, folder: Path, *, mode: str, ranks: int, servers: int, rows: int, tables: int) -> None:
        import psutil

        self.run, self._folder, self._count = folder / "run", folder, psutil.Process
        config = JOB.format(mode=mode, ranks=ranks, servers=servers)
        config += "".join(f"  c{table}: {{dim: {DIM}}}\n" for table in range(tables))
        (folder / "config.yaml").write_text(config, encoding="utf-8")
        self.coordinator = self._shardkeep("coordinator", str(folder / "config.yaml"), "--run-dir", str(self.run))
        self.servers = [self._server(index) for index in range(servers)]
        script = str(Path(__file__).with_name("many_ranks_clients.py"))
        self.clients = [
            self._start(sys.executable, script, str(self.run), *map(str, (first, min(first + A_PROCESS, ranks), rows)))
            for first in range(0, ranks, A_PROCESS)
        ]
        for client in self.clients:
            assert client.stdout is not None
            client.stdout.readline()

    def tell(self, command: str, meanwhile: Callable[[], None] = lambda: None) -> list[dict[str, float]]:
        """Has all clients do something; their answers."""
        for client in self.clients:
            assert client.stdin is not None
            client.stdin.write(command + "\n")
            client.stdin.flush()
        meanwhile()
        answers = [client.stdout.readline() for client in self.clients if client.stdout is not None]
        if not all(answers):
            raise RuntimeError(f"{command}: a client ended; see {self._folder}/log")
        return [json.loads(answer) for answer in answers]

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far: of each server on average, of all clients, of the coordinator."""
        servers = [self._used(server) for server in self.servers]
        clients = sum(self._used(client) for client in self.clients)
        return {"server": sum(servers) / len(servers), "clients": clients, "coordinator": self._used(self.coordinator)}

    def rss_mb(self) -> float:
        """Of the largest server."""
        return max(float(self._count(server.pid).memory_info().rss) for server in self.servers) / 1e6

    def kill(self) -> float:
        """SIGKILL for server 0, and another in its place; when."""
        from shardkeep.member.access import endpoint_of
        from shardkeep.ps.control.grpc.client import report_death

        dead, when = self.servers[0], time.monotonic()
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        report_death(endpoint_of(str(self.run)), role="server", index=0, pid=dead.pid, reason="SIGKILL", timeout_s=600)
        self.servers[0] = self._server(0)
        return when

    def ended(self) -> dict[str, Any]:
        """What the summary says of the recovery, once all have left."""
        self.tell("leave")
        for process in (*self.servers, self.coordinator):
            process.wait(60)
        (recovery,) = json.loads((self.run / "summary.json").read_text())["recoveries"]
        return dict(recovery)

    def end(self) -> None:
        for process in (*self.clients, *self.servers, self.coordinator):
            process.kill()
            process.communicate()

    def _used(self, process: subprocess.Popen[str]) -> float:
        return float(sum(self._count(process.pid).cpu_times()[:2]))

    def _server(self, index: int) -> subprocess.Popen[str]:
        run = str(self.run)
        return self._shardkeep("server", "--coordinator", run, "--index", str(index), "--run-dir", run)

    def _shardkeep(self, *arguments: str) -> subprocess.Popen[str]:
        return self._start(sys.executable, "-m", "shardkeep", *arguments)

    def _start(self, *command: str) -> subprocess.Popen[str]:
        with (self._folder / "log").open("a") as log:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)


@contextmanager
def running(**sizes: Any) -> Iterator[RunningJob]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ExitStack() as ending:
        job = RunningJob(Path(folder), **sizes)
        ending.callback(job.end)
        yield job


def one_job(seconds: float, **sizes: Any) -> harness.Figures:
    """The figures of one job; CPU in milliseconds per step, of the coordinator as a share of a core."""
    with running(**sizes) as job:
        began = time.monotonic()
        job.tell("form")
        figures = {"form s": time.monotonic() - began, "form coordinator cpu s": job.cpu_s()["coordinator"]}
        for _ in range(WARM_STEPS):
            job.tell("step")
        before, began, steps = job.cpu_s(), time.monotonic(), 0
        while steps < 3 or time.monotonic() < began + seconds:
            job.tell("step")
            steps += 1
        wall_s, after = time.monotonic() - began, job.cpu_s()
        figures |= {f"{name} ms": 1e3 * (after[name] - before[name]) / steps for name in ("server", "clients")}
        figures["coordinator share"] = (after["coordinator"] - before["coordinator"]) / wall_s
        figures |= {"steps": steps, "steps per s": steps / wall_s, "server rss mb": job.rss_mb()}
        killed: list[float] = []

        def kill() -> None:
            time.sleep(max(KILL_AFTER_S, 1.5 * wall_s / steps))
            killed.append(job.kill())

        answers = job.tell("survive", kill)
        figures["death s"] = max(answer["trained at"] for answer in answers) - killed[0]
        figures["death steps again"] = max(answer["again"] for answer in answers)
        figures["server rss after mb"] = job.rss_mb()
        recovery = job.ended()
        return figures | {"death without group s": recovery["seconds"], "death lost steps": recovery["lost_steps"]}


def gate(seconds: float, *, mode: Any, ranks: int) -> harness.Figures:
    """A step of the gate and of the queue of pulls: each rank's push and its next pull, until all are admitted."""
    config = ConsistencyConfig(mode=mode)
    service = ShardService(
        shard=0, tables=[TableSpec(name="a", dim=DIM)], consistency=config, num_workers=ranks, seed=1
    )
    pulls, gate, ahead = service.pulls, service.applier.gate, config.window

    def pull_of(rank: int, step: int) -> Packed:
        return read(allocate(Kind.PULL, generation=0, rank=rank, step=step).buffer)

    def advance() -> None:
        while (work := gate.take()) is not None:
            gate.done(work)
        pulls.admitted(gate)

    for rank in range(ranks):
        for step in range(ahead):
            pulls.park(pull_of(rank, step), gate)
            advance()

    def one(step: int) -> float:
        messages = [pull_of(rank, step + ahead) for rank in range(ranks)]
        began = time.process_time()
        for rank in range(ranks):
            gate.push(rank, step, None)  # type: ignore[arg-type]
            advance()
            pulls.park(messages[rank], gate)
            advance()
        return time.process_time() - began

    return {"ms": median_ms(one, min(1.0, seconds))}


def added_up(seconds: float, *, ranks: int) -> harness.Figures:
    """The sum of the pushes of all ranks, of one table."""
    rng = np.random.default_rng(1)

    def push() -> Gradients:
        sections = SectionIds(np.array([0]), np.array([0, ROWS]), zipf_ids(rng, ROWS))
        return Gradients(sections, rng.normal(size=ROWS * DIM).astype(np.float32))

    pushes, widths_T = [push() for _ in range(ranks)], np.array([DIM])

    def one(_: int) -> float:
        began = time.process_time()
        sum_of(widths_T, pushes)
        return time.process_time() - began

    return {"ms": median_ms(one, min(1.0, seconds))}


def journal(seconds: float, *, ranks: int) -> harness.Figures:
    """A server's journal in this process: bytes of a push, and CPU microseconds to replay one."""
    sizes: dict[str, Any] = {"tables": [TableSpec(name="a", dim=DIM)], "consistency": ConsistencyConfig()}
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        log = Journal(Path(folder) / "journal", sync=False)
        service = ShardService(shard=0, **sizes, num_workers=ranks, seed=1, journal=log)
        service.life.begin(1, 0)
        transport, steps = LocalTransport([service.handle]), int(100 * min(1.0, seconds))
        clients = [RowClient(transport, tables=sizes["tables"], rank=rank, generation=1) for rank in range(ranks)]
        for step in range(steps):
            for client in clients:
                request = client.request({"a": zipf_ids(rng, ROWS)})
                client.push(step, request, {"a": rng.normal(size=(ROWS, DIM)).astype(np.float32)})
        service.close("the server dies")
        size = log.size_bytes
        log.close()
        log, began = Journal(Path(folder) / "journal", sync=False), time.process_time()
        pushes = ShardService(shard=0, **sizes, num_workers=ranks, seed=1).life.replay(log.replay())
        used = time.process_time() - began
        log.close()
    assert pushes == steps * ranks
    return {"push bytes": size / pushes, "replay us": 1e6 * used / pushes}


def mesh(_: float, *, ranks: int) -> harness.Figures:
    """Forming gloo's mesh among processes, as workers do: CPU microseconds per pair of ranks, of all ranks and of the
    store."""
    fork = multiprocessing.get_context("fork")
    ready, queue, port = fork.Barrier(ranks + 1), fork.Queue(), fork.Value("i")

    def join(rank: int) -> None:
        ready.wait()
        own = TCPStore("127.0.0.1", port.value, is_master=False)
        ready.wait()
        began = time.process_time()
        ProcessCollective(own, rank=rank, world_size=ranks, generation=1, timeout_s=60.0)
        queue.put(time.process_time() - began)
        ready.wait()
        os._exit(0)

    processes = [fork.Process(target=join, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a fork could not open one after it
    port.value = store.port
    ready.wait()
    ready.wait()
    began, used = time.monotonic(), time.process_time()
    ranks_s = sum(queue.get(timeout=100) for _ in processes)
    figures = {"seconds": time.monotonic() - began, "ranks us": ranks_s, "store us": time.process_time() - used}
    ready.wait()
    for process in processes:
        process.join(10)
    return figures | {key: 1e6 * figures[key] / ranks**2 for key in ("ranks us", "store us")}


def median_ms(one: Callable[[int], float], seconds: float) -> float:
    harness.settle_garbage_collector()
    took, deadline = list[float](), time.monotonic() + seconds
    while len(took) < 3 or time.monotonic() < deadline:
        took.append(1e3 * one(len(took)))
    return float(np.median(took))


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.set_defaults(seconds=5.0, rounds=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 50, 100, 200, 400])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--servers", type=int, default=2)
    options = harness.parse(parser)
    sizes = [8] if options.smoke else options.ranks
    modes = ["bounded"] if options.smoke else options.modes
    job = partial(one_job, servers=options.servers, rows=ROWS, tables=1)
    contestants: dict[str, harness.Contestant] = {
        **{f"gate {mode} {ranks}": partial(gate, mode=mode, ranks=ranks) for ranks in sizes for mode in modes},
        **{f"sum {ranks}": partial(added_up, ranks=ranks) for ranks in sizes},
        "journal 8": partial(journal, ranks=8),
        **{f"mesh {ranks}": partial(mesh, ranks=ranks) for ranks in (MESHES[:1] if options.smoke else MESHES)},
        **{f"{mode} {ranks}": partial(job, mode=mode, ranks=ranks) for ranks in sizes for mode in modes},
    }
    if not options.smoke:
        one = partial(job, mode="bounded", ranks=8)
        contestants |= {
            f"rows {MANY_ROWS}": partial(one, rows=MANY_ROWS),
            f"tables {TABLES}": partial(one, tables=TABLES),
        }
    known = json.loads(options.json.read_text())["results"] if options.json and options.json.exists() else {}
    found = dict(known.get("rounds", {}))
    for name in [name for name in contestants if name not in found]:
        found |= harness.alternate({name: contestants[name]}, rounds=options.rounds, seconds=options.seconds)
        spreads = {each: spreads_of(rounds) for each, rounds in found.items()}
        harness.write(options.json, "many_ranks", {"servers": options.servers, "rounds": found, "spreads": spreads})
    for name, spread in spreads.items():
        if "ms" in spread:
            harness.show_ratio(f"{name}, ms per step", spread["ms"], TARGET_MS)


def spreads_of(rounds: list[harness.Figures]) -> Mapping[str, Mapping[str, float]]:
    return {key: harness.spread([figures[key] for figures in rounds]) for key in rounds[0]}


if __name__ == "__main__":
    main()
