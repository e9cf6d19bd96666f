"""Large tables: what pulls and pushes of 50 M rows cost beside those of 1 M, in time and memory, and how growth goes.

One server's service in process, asked by a worker's client on the same core: messages are packed and read, but no
socket hides what a table costs. D = 16, row-wise Adagrad. Each size is filled by pushes of new rows. Then steps pull
and push 15,000 different rows, drawn by the same law at every size: Zipf 1.05 over all rows, until 15,000 differ.
Popularity has nothing to do with ids or with the order in which rows came. PyTorch, in process, has dense tensors of
the same rows, without ids to look up, and sends nothing.
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
COUNTED = 4 * (DIM + 1) + 16  # bytes: weights, the optimizer's slot, and the 16 that the target grants
COUNTED_FROM = 100_000  # rows; a table of a few rows is all pages
LIMIT_S = 900.0
SPREAD = 0x9E3779B97F4A7C15 - 2**64  # odd: ids all over 64 bits, in no order that their rows have


def drawn_steps(rows: int, seed: int, count: int = NUM_STEPS) -> tuple[list[np.ndarray], float]:
    """Row numbers of each step, int64 (U), sorted; and how many draws a step took."""
    rng = np.random.default_rng(seed)
    wanted = min(ROWS_A_STEP, rows // 10)
    cdf = np.cumsum(np.arange(1, rows + 1) ** -workload.ZIPF)
    popularity = np.random.default_rng(1000).permutation(rows)
    steps, draws = [], 0
    for _ in range(count):
        ranks = np.empty(0, np.int64)
        first = np.empty(0, np.int64)
        while first.size < wanted:
            more = np.searchsorted(cdf, rng.random(4 * wanted) * cdf[-1])
            ranks = np.concatenate([ranks, np.minimum(more, rows - 1)])
            first = np.sort(np.unique(ranks, return_index=True)[1])
        draws += int(first[wanted - 1]) + 1
        steps.append(np.sort(popularity[ranks[first[:wanted]]]))
    return steps, draws / count


def timed(step: Callable[[int], Any], seconds: float, rows_a_step: int, draws: float) -> harness.Figures:
    numbers = itertools.count()
    for length in (min(seconds, WARM_UP_S), seconds):
        begin = next(numbers)
        started, cpu = time.perf_counter(), harness.cpu_seconds()
        while time.perf_counter() - started < length:
            step(last := next(numbers))
        steps, elapsed = last - begin, time.perf_counter() - started
    return {
        "m_rows_per_s": steps * rows_a_step / elapsed / 1e6,
        "m_ids_per_s": steps * draws / elapsed / 1e6,
        "cpu_ns_per_row": (harness.cpu_seconds() - cpu) / (steps * rows_a_step) * 1e9,
    }


@dataclass(slots=True)
class Growth:
    """What filling a table took: times of a call, and bytes per row after each."""

    push_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    bytes_per_row: list[float] = field(default_factory=list)
    uncounted: list[int] = field(default_factory=list)

    def figures(self, rows: int, final_bytes: int) -> harness.Figures:
        known = self.bytes_per_row or [final_bytes / rows]
        return {
            "filled_m_rows_per_s": rows / sum(self.stall_s) / 1e6,
            "longest_push_ms": max(self.push_s) * 1e3,
            "longest_stall_ms": max(self.stall_s) * 1e3,
            "bytes_per_row": final_bytes / rows,
            "mean_bytes_ratio": sum(known) / len(known) / COUNTED,
            "max_bytes_ratio": max(known) / COUNTED,
            "uncounted_mb": max(self.uncounted, default=0) / 1e6,
        }


def shardkeep_process(rows: int, seconds: float, seed: int, queue: Any) -> None:
    harness.pin(0)
    from shardkeep.ps.client import RowClient
    from shardkeep.ps.config import ConsistencyConfig, InitConfig, RowwiseAdagradConfig, TableSpec
    from shardkeep.ps.shard.service import ShardService
    from shardkeep.ps.transport import LocalTransport

    spec = TableSpec(name="t", dim=DIM, optimizer=RowwiseAdagradConfig(lr=0.01), init=InitConfig(scale=0.05))
    mode = ConsistencyConfig(mode="bounded", staleness=2)
    service = ShardService(shard=0, num_shards=1, tables=[spec], consistency=mode, num_workers=1, seed=1)
    client = RowClient(LocalTransport([service.handle]), tables=[spec], consistency=mode)
    table = service.tables[0]
    grad_UD = np.random.default_rng(seed).normal(size=(ROWS_A_STEP, DIM)).astype(np.float32) * 1e-3
    numbers = itertools.count()

    def exchange(request: Any) -> tuple[float, float]:
        """Pulls and pushes; the seconds of each."""
        step, begin = next(numbers), time.perf_counter()
        rows_UD = client.pull(step, request).result()["t"]
        pulled = time.perf_counter()
        client.push(step, request, {"t": grad_UD[: len(rows_UD)]})
        client.wait_acknowledged()
        return pulled - begin, time.perf_counter() - pulled

    def request_of(ids_U: np.ndarray) -> Any:
        return client.request({"t": ids_U})

    growth = fill(rows, lambda ids_U: exchange(request_of(ids_U)), table)
    if table.num_rows != rows:
        raise RuntimeError(f"{table.num_rows} rows in the table; pushed: {rows}")
    filled = growth.figures(rows, table.size_bytes)
    drawn, draws = drawn_steps(rows, seed)
    requests = [request_of(np.sort(row_U * np.int64(SPREAD))) for row_U in drawn]
    figures = timed(lambda i: exchange(requests[i % len(requests)]), seconds, drawn[0].size, draws)
    queue.put(figures | filled)


def fill(rows: int, exchange: Callable[[np.ndarray], tuple[float, float]], table: Any) -> Growth:
    """Pushes all rows for the first time; a first small one meets what a process does once."""
    growth, process = Growth(), psutil.Process()
    exchange(np.array([0], dtype=np.int64))
    resident = process.memory_info().rss - table.size_bytes
    for ids_U in new_ids(rows):
        pull_s, push_s = exchange(ids_U)
        size_bytes, num_rows = table.size_bytes, table.num_rows
        growth.push_s.append(push_s)
        growth.stall_s.append(pull_s + push_s)  # of a pull that comes just after a push of another worker
        growth.uncounted.append(process.memory_info().rss - resident - size_bytes)
        if num_rows >= COUNTED_FROM:
            growth.bytes_per_row.append(size_bytes / num_rows)
    return growth


def new_ids(rows: int) -> Iterator[np.ndarray]:
    for begin in range(1, rows, ROWS_A_STEP):
        yield np.sort(np.arange(begin, min(begin + ROWS_A_STEP, rows), dtype=np.int64) * np.int64(SPREAD))


def pytorch_process(rows: int, seconds: float, seed: int, queue: Any) -> None:
    harness.pin(0)
    import torch

    torch.set_num_threads(1)
    table_RD, sums_R = torch.empty(rows, DIM).uniform_(-0.05, 0.05), torch.zeros(rows)
    drawn, draws = drawn_steps(rows, seed)
    steps = [torch.from_numpy(row_U) for row_U in drawn]
    grad_UD = torch.randn(steps[0].numel(), DIM) * 1e-3

    def step(i: int) -> None:
        rows_U = steps[i % len(steps)]
        table_RD.index_select(0, rows_U)
        sums_R.index_add_(0, rows_U, grad_UD.pow(2).mean(1))
        rate_U = 0.01 / (sums_R.index_select(0, rows_U).sqrt() + 1e-8)
        table_RD.index_add_(0, rows_U, grad_UD * rate_U.unsqueeze(1), alpha=-1.0)

    queue.put(timed(step, seconds, steps[0].numel(), draws))


def contestant(target: Callable[..., None], rows: int) -> harness.Contestant:
    seeds = itertools.count(1)

    def run(seconds: float) -> harness.Figures:
        context = mp.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=target, args=(rows, seconds, next(seeds), queue))
        return harness.result_of([process], queue, limit_s=LIMIT_S + seconds)

    return run


def shown(rows: int) -> str:
    return f"{rows / 1e6:g} M rows"


def report(found: dict[str, list[harness.Figures]], small: int, large: int) -> dict[str, Any]:
    results: dict[str, Any] = {"rounds": found}
    for name, target in (("shardkeep", 0.65), ("PyTorch", None)):
        for key, of in (("m_rows_per_s", "different rows/s"), ("m_ids_per_s", "ids drawn/s")):
            ratio = harness.ratios(found, f"{name}, {shown(large)}", f"{name}, {shown(small)}", key)
            label = f"{name} {of}, {shown(large)} / {shown(small)}"
            harness.show_ratio(label, ratio, target if key == "m_rows_per_s" else None)
            results[f"{name} {key}"] = ratio
    ours = found[f"shardkeep, {shown(large)}"]
    for key, what, target in (
        ("longest_stall_ms", "ms a pull waits at most while the table grows", 50),
        ("mean_bytes_ratio", f"bytes per row over {COUNTED}, mean over growth", 1.15),
        ("max_bytes_ratio", f"bytes per row over {COUNTED}, at any instant", 1.35),
    ):
        results[key] = harness.spread([figures[key] for figures in ours])
        harness.show_ratio(f"{what}, {shown(large)}", results[key], target)
    return results


def parsed() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--rows", type=int, nargs=2, default=None, help="rows of the small and the large table; left out = 1 M and 50 M"
    )
    options = harness.parse(parser)
    if options.device != "cpu":
        parser.error(f"--device {options.device}: nothing here trains a tower")
    if options.rows is None:
        options.rows = [200_000, 1_000_000] if options.smoke else [1_000_000, 50_000_000]
    if min(options.rows) < COUNTED_FROM:
        parser.error(f"--rows {options.rows[0]} {options.rows[1]}: allowed: {COUNTED_FROM} or more")
    memory, needed = psutil.virtual_memory().available, 2 * COUNTED * max(options.rows)
    if memory < needed:
        parser.error(f"--rows {max(options.rows)}: takes {needed / 1e9:.1f} GB, {memory / 1e9:.1f} GB are free")
    return options


def main() -> None:
    options = parsed()
    os.environ["OMP_NUM_THREADS"] = "1"
    kinds = {"shardkeep": shardkeep_process, "PyTorch": pytorch_process}
    contestants = {
        f"{name}, {shown(rows)}": contestant(target, rows) for name, target in kinds.items() for rows in options.rows
    }
    found = harness.alternate(contestants, rounds=options.rounds, seconds=options.seconds)
    harness.write(options.json, "large_tables", report(found, *options.rows))


if __name__ == "__main__":
    main()
