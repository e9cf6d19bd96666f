"""What do hundreds of ranks cost one server: its gate of pulls, and the sum of their pushes?

    python benchmarks/many_ranks.py                        # 2 to 400 ranks, all modes
    python benchmarks/many_ranks.py --ranks 8 400

In this process, without transport and rows. Ranks in lockstep push and pull as far ahead as their mode lets them; then
their pushes of 350 and 5,000 rows (Zipf 1.05 over 10 M ids, 16 values a row) are added up. Figures: median CPU
milliseconds per step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import harness
import numpy as np

from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.jagged import Gradients, SectionIds
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.server.tables import sum_of
from shardkeep.ps.wire.message import Kind, Packed, allocate, read

DIM, IDS, SKEW = 16, 10_000_000, 1.05
MOST_RANKS = {350: 400, 5000: 32}
"""Rows of a push, and the most pushes that are added up: 400 of 5,000 rows are a gigabyte."""
TARGET_MS = 20.0
SPECS = [TableSpec(name="a", dim=DIM)]


def gate(mode: str, ranks: int, seconds: float) -> float:
    """A step of the gate and of the queue of pulls: each rank's push and its next pull, until all are admitted."""
    config = ConsistencyConfig(mode=mode)
    service = ShardService(shard=0, tables=SPECS, consistency=config, num_workers=ranks, seed=1)
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

    return median_ms(one, seconds)


@functools.cache
def popularity() -> tuple[np.ndarray, np.ndarray]:
    """The cumulative share of each rank of popularity, and its id."""
    return np.cumsum(np.arange(1, IDS + 1) ** -SKEW), np.random.default_rng(0).permutation(IDS)


def added_up(rows: int, ranks: int, seconds: float) -> float:
    """The sum of the pushes of all ranks, of one table."""
    rng, (shares, numbers) = np.random.default_rng(1), popularity()

    def push() -> Gradients:
        ids = np.empty(0, dtype=np.int64)
        while ids.size < rows:
            drawn = np.searchsorted(shares, rng.random(rows) * shares[-1])
            ids = np.union1d(ids, numbers[np.minimum(drawn, IDS - 1)])
        sections = SectionIds(np.array([0]), np.array([0, rows]), np.sort(rng.permutation(ids)[:rows]))
        return Gradients(sections, rng.normal(size=rows * DIM).astype(np.float32))

    pushes, widths_T = [push() for _ in range(ranks)], np.array([DIM])

    def one(_: int) -> float:
        began = time.process_time()
        sum_of(widths_T, pushes)
        return time.process_time() - began

    return median_ms(one, seconds)


def median_ms(one: Callable[[int], float], seconds: float) -> float:
    harness.settle_garbage_collector()
    took, deadline = list[float](), time.monotonic() + seconds
    while len(took) < 3 or time.monotonic() < deadline:
        took.append(1e3 * one(len(took)))
    return float(np.median(took))


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.set_defaults(seconds=1.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 50, 100, 200, 400])
    options = harness.parse(parser)

    def figures(seconds: float) -> harness.Figures:
        found = {
            f"gate {mode} {ranks}": gate(mode, ranks, seconds)
            for mode in ("sync", "bounded", "async")
            for ranks in options.ranks
        }
        sums = [(rows, ranks) for rows, most in MOST_RANKS.items() for ranks in options.ranks if ranks <= most]
        return found | {f"sum of {rows} rows {ranks}": added_up(rows, ranks, seconds) for rows, ranks in sums}

    found = harness.alternate({"server": figures}, rounds=options.rounds, seconds=options.seconds)
    spreads = {key: harness.spread([each[key] for each in found["server"]]) for key in found["server"][0]}
    for key, spread in spreads.items():
        harness.show_ratio(f"{key}, ms per step", spread, TARGET_MS)
    harness.write(options.json, "many_ranks", {"ranks": options.ranks, "rounds": found, "spreads": spreads})


if __name__ == "__main__":
    main()
