#!/usr/bin/env python3
"""What does `data.shuffle: blocks` cost in AUC, where rows lie in an order that means something?

    python benchmarks/block_shuffle.py --data FOLDER --seeds 7 8 9 --json blocks.json

FOLDER holds census-income.test.gz (docs/guide/data.md). A window of the built-in size would hold all of Census, so
windows are smaller here: "64 of 64" mixes 64 blocks of 64 rows, and "1 of 4096" mixes a block with no other one. One
process, `sync`. Runs that the file of --json already holds are not repeated.
"""

from __future__ import annotations

import csv
import gzip
import random
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import harness

import shardkeep
from shardkeep.base.yaml_text import read_yaml
from shardkeep.config import JobConfig
from shardkeep.workers import run as training
from shardkeep.workers.data.sampling import Blocks

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "census.yaml"
ORDERS = {"as it is": None, "by label": -1}
"""The column that the training rows are sorted by."""
SHUFFLES = {
    "rows": None,
    "64 of 64": Blocks(64, 4096),
    "64 of 256": Blocks(256, 16384),
    "16 of 256": Blocks(256, 4096),
    "1 of 4096": Blocks(4096, 4096),
}
HELD = 0.2


def write_rows(source: Path, folder: Path, column: int | None) -> None:
    """Writes the training rows, sorted by a column, and the rows that evaluate."""
    with gzip.open(source / "census-income.test.gz", "rt") as file:
        rows = [[field.strip() for field in row] for row in csv.reader(file) if row]
    draw = random.Random(0)
    sides: dict[str, list[list[str]]] = {"train": [], "eval": []}
    for row in rows:
        sides["eval" if draw.random() < HELD else "train"].append(row)
    if column is not None:
        sides["train"].sort(key=lambda row: row[column].zfill(12))
    for name, own in sides.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(own)


def run(case: Mapping[str, Any], source: Path, *, smoke: bool) -> dict[str, Any]:
    """The last evaluation of one job."""
    blocks, raw = SHUFFLES[case["name"]], read_yaml(EXAMPLE.read_text())
    if blocks is not None:
        training.Blocks = partial(Blocks, *blocks)  # type: ignore[misc, assignment]  # jobs have one size
    with tempfile.TemporaryDirectory() as folder:
        write_rows(source, Path(folder), ORDERS[case["group"]])
        data = {key: value for key, value in raw["data"].items() if key not in ("eval_fraction", "split")}
        data |= {"root": folder, "train": ["train.csv"], "eval": ["eval.csv"]}
        data |= {"shuffle": "rows" if blocks is None else "blocks"}
        job = raw | harness.ONE_PROCESS | {"seed": case["seed"], "data": data}
        job["tower"] = raw["tower"] | {"compile": "off", "amp": "off"}
        if smoke:
            job["train"] = raw["train"] | {"max_steps": 20}
        summary = shardkeep.train(JobConfig.model_validate(job), run_dir=Path(folder) / "run", quiet=True)
        return {"eval": {key: summary.to_dict()["eval"][key] for key in ("auc", "logloss", "calibration")}}


def main() -> None:
    parser = harness.seed_arguments(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    cases = [{"group": order, "name": name} for order in ORDERS for name in SHUFFLES]
    harness.repeat("block_shuffle", cases, lambda case: run(case, options.data, smoke=options.smoke), options)


if __name__ == "__main__":
    main()
