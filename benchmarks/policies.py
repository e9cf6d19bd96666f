"""What do admission and expiry cost, and what do they save? Three questions; --only names those to answer.

python benchmarks/policies.py --only cost                    # W2 over RPC with policies beside without
python benchmarks/policies.py --only endless --seconds 600   # new ids without end into a table of a million rows
python benchmarks/policies.py --only admission               # rows and AUC of jobs with min_count 2, five seeds
"""
# U = unique ids, D = embedding dim

from __future__ import annotations

import argparse
import itertools
import multiprocessing as mp
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import workload

HERE = Path(__file__).resolve().parent
EVICT = {"ttl_steps": 100, "decay": 0.99, "max_rows": 1 << 20}
SIDES: dict[str, dict[str, Any]] = {
    "off": {},
    "admit and evict, nothing goes": {"admit": {"min_count": 2}, "evict": EVICT | {"ttl_steps": 100_000}},
    "admit and evict, rows go": {"admit": {"min_count": 2, "window_steps": 200}, "evict": EVICT | {"ttl_steps": 40}},
}
"""The batches of W2 come again every 64 steps, so a row that one batch has goes and comes back with ttl_steps 40."""
MAX_ROWS, BATCH, DIM = 1_000_000, 8192, 16
EPOCH_SAMPLES = 1_200_000


def main() -> None:
    parser = harness.arguments(__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=["cost", "endless", "admission"], default=["cost"])
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--plot", type=Path, help="draw memory and pauses of `endless` into this file")
    options = harness.parse(parser)
    answers = {"cost": cost, "endless": endless, "admission": admission}
    results = {name: answers[name](options) for name in options.only}
    harness.write(options.json, "policies", results)


def cost(options: argparse.Namespace) -> dict[str, Any]:
    """W2 with policies beside without."""
    from pull_push import shardkeep_over_rpc

    seeds = itertools.count(1)
    sides = {
        name: lambda seconds, more=more: shardkeep_over_rpc(options.dim, seconds, next(seeds), more)
        for name, more in SIDES.items()
    }
    found = harness.alternate(sides, rounds=options.rounds, seconds=options.seconds)
    ratios = {}
    for name in list(SIDES)[1:]:
        ratios[name] = harness.ratios(found, name, "off", "m_ids_per_s")
        harness.show_ratio(f"D={options.dim} ids/s, {name} / off", ratios[name], 0.85)
    return {"rounds": found, "ratio": ratios}


# ---- ids without end -------------------------------------------------------------------------------------------------


def endless(options: argparse.Namespace) -> dict[str, Any]:
    """Pushes of half new, half popular ids into a table with a capacity, in one process."""
    context = mp.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_endless, args=(options.seconds, queue))
    found: dict[str, Any] = harness.result_of([process], queue, limit_s=options.seconds + 120)
    memory = [rss for second, rss in found["rss_mb"] if second > options.seconds / 4]
    spread = max(memory) / min(memory) - 1
    print(f"{found['steps']:,} steps, {found['new_ids']:,} new ids, {found['rows']:,} rows at the end")
    print(f"memory after the first quarter: {min(memory):.0f} to {max(memory):.0f} MB, {spread:.1%} (target 5 %)")
    for key, kind in (("apply_ms", "a push"), ("apply_cpu_ms", "its CPU time")):
        pauses = found[key]
        print(
            f"{kind}: median {pauses['p50']:.2f} ms, p99 {pauses['p99']:.2f}, longest {pauses['max']:.1f} (target 50)"
        )
    if options.plot is not None:
        _draw(found, options.plot)
    return found | {"spread": spread}


def _endless(seconds: float, queue: Any) -> None:
    harness.pin(0)
    import psutil

    from shardkeep.base.machine.allocator import keep_freed_memory
    from shardkeep.ps.config import TableSpec
    from shardkeep.ps.jagged import Gradients, SectionIds
    from shardkeep.ps.server.tables import Tables

    keep_freed_memory()
    spec = TableSpec.model_validate({"name": "t", "dim": DIM, "evict": {"max_rows": MAX_ROWS, "decay": 0.9}})
    tables, rng, process = Tables([spec], seed=1), np.random.default_rng(0), psutil.Process()
    grads = (rng.normal(size=BATCH * DIM) * 1e-3).astype(np.float32)
    harness.settle_garbage_collector()
    began, rss, new = time.perf_counter(), list[tuple[float, float]](), 0
    spent, used = list[float](), list[float]()
    for step in itertools.count():
        fresh = rng.integers(1 << 32, 1 << 62, BATCH // 2)
        popular = rng.zipf(1.2, BATCH // 2) % 100_000
        ids_U = np.unique(np.concatenate([fresh, popular]))
        push = SectionIds(np.zeros(1, np.int64), np.array([0, ids_U.size]), ids_U)
        before, cpu_before = time.perf_counter(), time.thread_time()
        tables.apply([Gradients(push, grads[: ids_U.size * DIM])], step=step)
        now = time.perf_counter()
        spent.append((now - before) * 1e3)
        used.append((time.thread_time() - cpu_before) * 1e3)
        new += BATCH // 2
        if not rss or now - began > rss[-1][0] + 1.0:
            rss.append((now - began, process.memory_info().rss / 1e6))
        if now - began > seconds:
            break
    queue.put(
        {
            "steps": len(spent),
            "new_ids": new,
            "rows": tables[0].num_rows,
            "evicted_rows": tables[0].counts().get("evicted_rows", 0),
            "rss_mb": rss,
            "apply_ms": _percentiles(spent),
            "apply_cpu_ms": _percentiles(used),
            "longest_ms": [float(part.max()) for part in np.array_split(np.array(spent), 100) if part.size],
        }
    )


def _percentiles(times: list[float]) -> dict[str, float]:
    """Without the first pushes, while kernels and memory are new."""
    found = np.array(times[100:])
    return {"p50": float(np.median(found)), "p99": float(np.percentile(found, 99)), "max": float(found.max())}


def _draw(found: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=False, figsize=(7, 5), layout="constrained")
    above.plot(*zip(*found["rss_mb"], strict=True))
    above.set(xlabel="seconds", ylabel="memory of the process, MB", ylim=(0, None))
    below.plot(found["longest_ms"])
    below.set(xlabel="percent of the steps", ylabel="longest push, ms", ylim=(0, None))
    figure.savefig(path, dpi=120)


# ---- rows and AUC ----------------------------------------------------------------------------------------------------


def admission(options: argparse.Namespace) -> dict[str, Any]:
    """Rows and AUC with and without `admit`: the demo's job over tables of Criteo-Kaggle's cardinalities, up to 10 M
    ids, Zipf 1.05. Both have the same seed and the same samples in the same order."""
    import shardkeep

    found: dict[str, list[dict[str, float]]] = {"all ids": [], "min_count 2": []}
    for seed, name in itertools.product(options.seeds[: 1 if options.smoke else None], found):
        samples = EPOCH_SAMPLES // 20 if options.smoke else EPOCH_SAMPLES
        overrides = [
            "servers=0", "workers=1", f"seed={seed}", f"data.synthetic.train_samples={samples}",
            f"data.synthetic.table_sizes={list(workload.KAGGLE)}",
            *(["tables.default.admit.min_count=2"] if name != "all ids" else []),
        ]  # fmt: skip
        config = shardkeep.config.load_config(HERE.parent / "examples" / "demo.yaml", overrides)
        with tempfile.TemporaryDirectory() as folder:
            result = shardkeep.train(config, run_dir=Path(folder) / "run", quiet=True)
        rows = sum(table.rows for table in result.tables)
        counted = sum(table.candidates or 0 for table in result.tables)
        auc = float(result.eval.auc)
        found[name].append({"seed": seed, "rows": rows, "candidates": counted, "auc": auc})
        print(f"seed {seed} {name:<12} rows {rows:,}  candidates {counted:,}  AUC {auc:.5f}", flush=True)
    pairs = list(zip(found["min_count 2"], found["all ids"], strict=True))
    shares, away = [a["rows"] / b["rows"] for a, b in pairs], [a["auc"] - b["auc"] for a, b in pairs]
    print(f"rows: {np.mean(shares):.3f} of all (target 0.5 at most)")
    print(f"AUC: {np.mean(away):+.5f}, {min(away):+.5f} to {max(away):+.5f} (target within 0.0005)")
    return {"jobs": found, "rows_share": shares, "auc_difference": away}


if __name__ == "__main__":
    main()
