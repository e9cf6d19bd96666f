"""Large tables: what pulls and pushes of 50 M rows cost beside those of 1 M, in time and memory, and how growth goes.

One server's service in process, asked by a worker's client on the same core: messages are packed and read, but no
socket hides what a table costs. D = 16, row-wise Adagrad. Each size is filled by pushes of new rows. Then steps pull
and push 15,000 different rows, drawn by the same law at every size: Zipf 1.05 over all rows, until 15,000 differ.
Popularity has nothing to do with ids or with the order in which rows came. PyTorch, in process, has dense tensors of
the same rows, without ids to look up, and sends nothing. Both sizes take turns of a quarter of a second in one process.
"""
# R = rows of the table, U = unique rows of a step, D = embedding dim

from __future__ import annotations

import argparse
import itertools
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import harness
import numpy as np
import psutil
import workload

DIM = 16
ROWS_A_STEP = 15_000
NUM_STEPS = 256  # different ones: 3.8 M drawn rows, far beyond any cache
WARM_UP_S = 3.0
TURN_S = 0.25
COUNTED = 4 * (DIM + 1) + 16  # bytes: weights, the optimizer's slot, and the 16 that the target grants
COUNTED_FROM = 100_000  # rows; a table of a few rows is all pages
LIMIT_S = 900.0
SPREAD = 0x9E3779B97F4A7C15 - 2**64  # odd: ids all over 64 bits, in no order that their rows have


@dataclass(slots=True)
class Table:
    """One size: its step, and what was measured of it."""

    rows: int
    step: Callable[[int], Any]
    draws: float
    """Ids drawn for a step's different rows, on the average."""
    steps: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def turn(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        while (elapsed := time.perf_counter() - wall) < TURN_S:
            self.step(self.steps)
            self.steps += 1
        self.wall_s, self.cpu_s = self.wall_s + elapsed, self.cpu_s + time.process_time() - cpu

    def figures(self, first_step: int) -> harness.Figures:
        steps = self.steps - first_step
        return {
            f"m_rows_per_s_{shown(self.rows)}": steps * ROWS_A_STEP / self.wall_s / 1e6,
            f"m_ids_per_s_{shown(self.rows)}": steps * self.draws / self.wall_s / 1e6,
            f"cpu_ns_per_row_{shown(self.rows)}": self.cpu_s / (steps * ROWS_A_STEP) * 1e9,
        }


def shown(rows: int) -> str:
    return f"{rows / 1e6:g}M"


def drawn_steps(rows: int, seed: int) -> tuple[list[np.ndarray], float]:
    """Row numbers of each step, int64 (U), sorted; and how many draws a step took."""
    rng = np.random.default_rng(seed)
    cdf = np.cumsum(np.arange(1, rows + 1) ** -workload.ZIPF)
    popularity = np.random.default_rng(1000).permutation(rows)
    steps, draws = [], 0
    for _ in range(NUM_STEPS):
        ranks = first = np.empty(0, np.int64)
        while first.size < ROWS_A_STEP:
            more = np.searchsorted(cdf, rng.random(4 * ROWS_A_STEP) * cdf[-1])
            ranks = np.concatenate([ranks, np.minimum(more, rows - 1)])
            first = np.sort(np.unique(ranks, return_index=True)[1])
        draws += int(first[ROWS_A_STEP - 1]) + 1
        steps.append(np.sort(popularity[ranks[first[:ROWS_A_STEP]]]))
    return steps, draws / NUM_STEPS


def measured(tables: list[Table], seconds: float) -> harness.Figures:
    """The figures of tables that take turns, `seconds` for each."""
    for length in (min(seconds, WARM_UP_S), seconds):
        first = [table.steps for table in tables]
        for table in tables:
            table.wall_s = table.cpu_s = 0.0
        while tables[-1].wall_s < length:
            for table in tables:
                table.turn()
    return {key: value for table, at in zip(tables, first, strict=True) for key, value in table.figures(at).items()}


@dataclass(slots=True)
class Growth:
    """What filling a table took: seconds of each pull and push of new rows, and the memory after it."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    bytes_per_row: list[float] = field(default_factory=list)
    uncounted_bytes: list[int] = field(default_factory=list)

    def figures(self, rows: int) -> harness.Figures:
        ratios = [size / COUNTED for size in self.bytes_per_row]
        return {
            "filled_m_rows_per_s": rows / sum(self.wall_s) / 1e6,
            "longest_stall_ms": max(self.wall_s) * 1e3,
            "longest_stall_cpu_ms": max(self.cpu_s) * 1e3,
            "mean_bytes_ratio": sum(ratios) / len(ratios),
            "max_bytes_ratio": max(ratios),
            "uncounted_mb": max(self.uncounted_bytes) / 1e6,
        }


class Server:
    """A service with one table, and a client beside it."""

    def __init__(self) -> None:
        from shardkeep.ps.client.row_client import RowClient
        from shardkeep.ps.config import ConsistencyConfig, TableSpec
        from shardkeep.ps.server.service import ShardService
        from shardkeep.ps.server.table.initializers.config import InitConfig
        from shardkeep.ps.server.table.optimizers.rowwise_adagrad import RowwiseAdagradConfig
        from shardkeep.ps.transport.transport import LocalTransport

        spec = TableSpec(name="t", dim=DIM, optimizer=RowwiseAdagradConfig(lr=0.01), init=InitConfig(scale=0.05))
        mode = ConsistencyConfig(mode="bounded", staleness=2)
        service = ShardService(shard=0, tables=[spec], consistency=mode, num_workers=1, seed=1)
        self._client = RowClient(LocalTransport([service.handle]), tables=[spec], consistency=mode)
        self._grad_UD = np.random.default_rng(1).normal(size=(ROWS_A_STEP, DIM)).astype(np.float32) * 1e-3
        self._step = 0
        self.table = service.tables[0]

    def request(self, ids_U: np.ndarray) -> Any:
        return self._client.request({"t": ids_U})

    def exchange(self, request: Any) -> None:
        """Pulls rows, then pushes their gradients: what a pull waits for, at most, that comes just after a push."""
        pull = self._client.pull(self._step, request)
        rows_UD = pull.result()["t"]
        self._client.push(self._step, request, {"t": self._grad_UD[: len(rows_UD)]}, pulls=[pull])
        self._client.wait_acknowledged()
        self._step += 1

    def fill(self, rows: int) -> Growth:
        """Pushes all rows for the first time; one alone before, for what a process does once."""
        growth, process = Growth(), psutil.Process()
        self.exchange(self.request(np.array([0], dtype=np.int64)))
        resident = process.memory_info().rss - self.table.size_bytes
        for ids_U in new_ids(rows):
            request = self.request(ids_U)
            wall, cpu = time.perf_counter(), time.process_time()
            self.exchange(request)
            growth.wall_s.append(time.perf_counter() - wall)
            growth.cpu_s.append(time.process_time() - cpu)
            growth.uncounted_bytes.append(process.memory_info().rss - resident - self.table.size_bytes)
            if self.table.num_rows >= COUNTED_FROM:
                growth.bytes_per_row.append(self.table.size_bytes / self.table.num_rows)
        if self.table.num_rows != rows:
            raise RuntimeError(f"{self.table.num_rows} rows in the table; pushed: {rows}")
        return growth


def new_ids(rows: int) -> Iterator[np.ndarray]:
    for begin in range(1, rows, ROWS_A_STEP):
        yield np.sort(np.arange(begin, min(begin + ROWS_A_STEP, rows), dtype=np.int64) * np.int64(SPREAD))


def shardkeep_process(sizes: list[int], seconds: float, seed: int, queue: Any) -> None:
    harness.pin(0)
    tables, filled = [], harness.Figures()
    for rows in sizes:
        server = Server()
        filled = server.fill(rows).figures(rows)  # the last, the largest, is reported
        drawn, draws = drawn_steps(rows, seed)
        requests = [server.request(np.sort(row_U * np.int64(SPREAD))) for row_U in drawn]
        tables.append(Table(rows, lambda i, s=server, r=requests: s.exchange(r[i % NUM_STEPS]), draws))
    queue.put(measured(tables, seconds) | filled)


def pytorch_process(sizes: list[int], seconds: float, seed: int, queue: Any) -> None:
    harness.pin(0)
    import torch

    torch.set_num_threads(1)
    grad_UD = torch.randn(ROWS_A_STEP, DIM) * 1e-3

    def step_of(rows: int, steps: list[Any]) -> Callable[[int], None]:
        table_RD, sums_R = torch.empty(rows, DIM).uniform_(-0.05, 0.05), torch.zeros(rows)

        def step(i: int) -> None:
            rows_U = steps[i % NUM_STEPS]
            table_RD.index_select(0, rows_U)
            sums_R.index_add_(0, rows_U, grad_UD.pow(2).mean(1))
            rate_U = 0.01 / (sums_R.index_select(0, rows_U).sqrt() + 1e-8)
            table_RD.index_add_(0, rows_U, grad_UD * rate_U.unsqueeze(1), alpha=-1.0)

        return step

    tables = []
    for rows in sizes:
        drawn, draws = drawn_steps(rows, seed)
        tables.append(Table(rows, step_of(rows, [torch.from_numpy(row_U) for row_U in drawn]), draws))
    queue.put(measured(tables, seconds))


def contestant(target: Callable[..., None], sizes: list[int]) -> harness.Contestant:
    seeds = itertools.count(1)

    def run(seconds: float) -> harness.Figures:
        context = mp.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=target, args=(sizes, seconds, next(seeds), queue))
        return harness.result_of([process], queue, limit_s=LIMIT_S + 2 * seconds)

    return run


def report(found: dict[str, list[harness.Figures]], small: int, large: int) -> dict[str, Any]:
    results: dict[str, Any] = {"rounds": found}

    def show(label: str, key: str, values: list[float], target: float | None = None) -> None:
        results[key] = harness.spread(values)
        harness.show_ratio(label, results[key], target)

    for name, target in (("shardkeep", 0.65), ("PyTorch", None)):
        for key, label in (("m_rows_per_s", "different rows/s"), ("m_ids_per_s", "ids drawn/s")):
            values = [figures[f"{key}_{shown(large)}"] / figures[f"{key}_{shown(small)}"] for figures in found[name]]
            label = f"{name} {label}, {shown(large)} / {shown(small)} rows"
            show(label, f"{name} {key}", values, target if key == "m_rows_per_s" else None)
    for key, label, target in (
        ("longest_stall_ms", "growth: ms that a pull waits at most", 50.0),
        ("longest_stall_cpu_ms", "growth: ms of CPU in it", None),
        ("mean_bytes_ratio", f"growth: bytes per row / {COUNTED}, mean", 1.15),
        ("max_bytes_ratio", f"growth: bytes per row / {COUNTED}, at any instant", 1.35),
    ):
        show(label, key, [figures[key] for figures in found["shardkeep"]], target)
    return results


def parsed() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs=2, help="rows of the small and of the large table; 1 M and 50 M")
    options = harness.parse(parser)
    if options.device != "cpu":
        parser.error(f"--device {options.device}: nothing here trains a tower")
    if options.rows is None:
        options.rows = [200_000, 1_000_000] if options.smoke else [1_000_000, 50_000_000]
    if min(options.rows) < COUNTED_FROM or options.rows[0] >= options.rows[1]:
        parser.error(
            f"--rows {options.rows[0]} {options.rows[1]}: allowed: {COUNTED_FROM} or more, then more than that"
        )
    free, needed = psutil.virtual_memory().available, 1.5 * COUNTED * sum(options.rows)
    if free < needed:
        parser.error(f"--rows {options.rows[1]}: takes {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free")
    return options


def main() -> None:
    options = parsed()
    os.environ["OMP_NUM_THREADS"] = "1"
    contestants = {
        "shardkeep": contestant(shardkeep_process, options.rows),
        "PyTorch": contestant(pytorch_process, options.rows),
    }
    found = harness.alternate(contestants, rounds=options.rounds, seconds=options.seconds)
    harness.write(options.json, "large_tables", report(found, *options.rows))


if __name__ == "__main__":
    main()
