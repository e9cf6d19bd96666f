"""How many bytes does a worker send for the sum of the tower's gradients, by the number of workers, in each form?

Computed, not measured: the formulas of the ledger, which `wire_bytes.py` holds against the kernel's counters. Each form
makes its packets of random gradients and gets them back, without a network.
"""
# W = workers

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import workload

WORKERS = (2, 4, 8, 16, 32, 64)
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {"name": "none"},
    "fp16": {"name": "fp16"},
    "lossless": {"name": "shardkeep.examples.compression.lossless:Lossless"},
    "powersgd 1": {"name": "powersgd", "rank": 1, "values": "fp16"},
    "powersgd 4": {"name": "powersgd", "rank": 4, "values": "fp16"},
    "powersgd 16": {"name": "powersgd", "rank": 16, "values": "fp16"},
    "topk 1 %": {"name": "topk", "keep": 0.01},
}
TOWERS = {"w1": ([512, 256], [512, 256]), "small": ([256, 64], [256, 128])}
"""Hidden layers of DLRM below and above its interaction: W1's, and those of compression_sweep.yaml."""


def shapes_of(bottom: list[int], hidden: list[int], dim: int) -> dict[str, tuple[int, ...]]:
    """Shapes of DLRM's parameters over W1's columns."""
    from shardkeep.workers.model_config import DlrmConfig
    from shardkeep.workers.models.registry import build_model

    model = build_model(
        DlrmConfig(bottom=bottom, hidden=hidden),
        num_dense=workload.NUM_DENSE,
        features={f"C{f}": dim for f in range(len(workload.TABLE_SIZES))},
        default_dim=dim,
    )
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def table(shapes: dict[str, tuple[int, ...]], workers: list[int]) -> dict[str, dict[int, int]]:
    """Bytes of a worker and step, by form and number of workers."""
    from shardkeep.compression.config import TowerCompressionConfig
    from shardkeep.compression.tower.compressor import DenseCompression
    from shardkeep.estimate.estimate import reduce_bytes

    wishes = {name: partial(DenseCompression, TowerCompressionConfig(**form)) for name, form in FORMS.items()}
    size = 4 * sum(map(math.prod, shapes.values()))
    return {name: {w: reduce_bytes(wish, shapes, w, ring_bytes=size) for w in workers} for name, wish in wishes.items()}


def plot(found: dict[str, dict[str, dict[int, int]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(found), figsize=(11, 4.4), layout="constrained", sharey=True)
    for axes, (tower, by_form) in zip(panels, found.items(), strict=True):
        for name, sizes in by_form.items():
            axes.plot(list(sizes), [by_form["fp32"][w] / sizes[w] for w in sizes], marker="o", label=name)
        axes.set(title=tower, xlabel="workers", xscale="log", yscale="log")
        axes.set_xticks(list(by_form["fp32"]), [str(w) for w in by_form["fp32"]])
        axes.grid(alpha=0.25)
    panels[0].set(ylabel="times fewer bytes than fp32's ring")
    panels[-1].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), help="numbers of workers, from 2 on")
    parser.add_argument("--dim", type=int, default=16, help="width of a row")
    parser.add_argument("--smoke", action="store_true", help="two numbers of workers: does it run at all")
    parser.add_argument("--json", type=Path, help="write the bytes to this file")
    parser.add_argument("--plot", type=Path, help="write a picture to this PNG file")
    options = parser.parse_args()
    if min(options.workers) < 2:
        parser.error(f"--workers {min(options.workers)}: one worker sends nothing; allowed: from 2 on")
    workers = [2, 4] if options.smoke else options.workers
    found = {}
    for tower, (bottom, hidden) in TOWERS.items():
        shapes = shapes_of(bottom, hidden, options.dim)
        found[tower] = table(shapes, workers)
        size = sum(map(math.prod, shapes.values()))
        print(f"\n{tower}: {size:,} parameters; bytes a worker sends in a step (times fewer)")
        print("workers".ljust(12) + "".join(f"{w:>20}" for w in workers))
        for name, sizes in found[tower].items():
            cells = [f"{size:,} ({found[tower]['fp32'][w] / size:.1f})" for w, size in sizes.items()]
            print(name.ljust(12) + "".join(f"{cell:>20}" for cell in cells))
    if options.json:
        options.json.write_text(json.dumps({"dim": options.dim, "bytes": found}, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
