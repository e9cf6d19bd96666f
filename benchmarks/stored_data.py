#!/usr/bin/env python3
"""What do conversion, random gather and one more feature of a table cost, in CPU seconds and bytes on disk?

13 columns of numbers and 26 of ids in Parquet. `--other` names another checkout (its root), which is measured in turn.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

BATCH, NUM_DENSE, NUM_SPARSE = 1024, 13, 26
ROOT = Path(__file__).resolve().parent.parent


def write_table(path: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {"y": rng.integers(0, 2, rows)}
    for i in range(NUM_DENSE):
        columns[f"i{i}"] = rng.integers(0, 1000, rows) if i % 2 else rng.normal(size=rows).astype(np.float32).round(4)
    for f in range(NUM_SPARSE):
        columns[f"c{f}"] = rng.zipf(1.2, rows) % int(100 * 10 ** (4 * f / (NUM_SPARSE - 1)))
    pq.write_table(pa.table(columns), path)


def measure(folder: Path) -> dict[str, float]:
    """The figures of this process' checkout."""
    from shardkeep.workers.data.sources.registry import open_data
    from shardkeep.workers.data_config import DataConfig

    cache, figures = folder / "cache", dict[str, float]()
    shutil.rmtree(cache, ignore_errors=True)
    names = [f"c{f}" for f in range(NUM_SPARSE)]
    settings: dict[str, Any] = {"root": str(folder), "train": ["a.parquet"], "label": "y", "dense": ["i*"]}
    job = settings | {"cache": str(cache)}
    for key, sparse in (("convert", names[:-1]), ("convert one more", names), ("open", names)):
        began = time.process_time()
        data = open_data(DataConfig.model_validate(job | {"sparse": sparse}), seed=0)
        figures[key] = time.process_time() - began
    order = np.random.default_rng(1).permutation(len(data.train))
    data.train.gather(order[:BATCH])
    began = time.process_time()
    for start in range(0, len(order), BATCH):
        data.train.gather(order[start : start + BATCH])
    figures["gather"] = time.process_time() - began
    return figures | {"MB": sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) / 1e6}


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--other", type=Path, help="root of another checkout")
    parser.add_argument("--measure", type=Path, help="measures this checkout with the table in a folder, and prints it")
    options = harness.parse(parser)
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    trees = {"this": ROOT} | ({} if options.other is None else {"other": options.other.resolve()})
    with tempfile.TemporaryDirectory() as folder:
        write_table(Path(folder) / "a.parquet", 20_000 if options.smoke else options.rows)
        contestants = {name: partial(in_checkout, tree, folder) for name, tree in trees.items()}
        for contestant in contestants.values():  # compiles
            contestant(0.0)
        found = harness.alternate(contestants, rounds=options.rounds, seconds=options.seconds)
    medians = {
        n: {k: round(statistics.median(r[k] for r in rounds), 4) for k in rounds[0]} for n, rounds in found.items()
    }
    print(json.dumps(medians, indent=1))
    harness.write(options.json, "stored_data", {"rows": options.rows, "medians": medians, "rounds": found})


def in_checkout(tree: Path, folder: str, _seconds: float) -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}:{tree}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--measure", folder]
    figures: dict[str, float] = json.loads(
        subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    )
    return figures


if __name__ == "__main__":
    main()
