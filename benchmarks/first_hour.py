#!/usr/bin/env python3
"""How good is the job that `shardkeep init` writes, with no hand on it, beside the best that is known of its data?

    python benchmarks/first_hour.py --adult FOLDER --frappe FOLDER --seeds 7 8 --json first_hour.json

Four models on data sets that repositories carry (public_sets.py says which files), train, eval and test of fixed rows.
AUC of the test, which nothing else reads, of the job as `init` writes it; of the recipe by which BARS (Zhu et al. 2022)
trains these models on Frappe, with their columns as they are; and of the best of `shardkeep tune --trials`, 0 = without
it. Runs that the file of --json already holds are not repeated.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import harness
from public_sets import LABELS, PARTS, SETS, write_parts

MODELS = ("dnn", "deepfm", "dlrm", "dcn_v2")
FILES = ("--set", "data.eval=[eval.csv]", "--set", "data.test=[test.csv]")
RECIPE = {
    "model.hidden": "[400, 400, 400]",
    "model.norm": "batch",
    "model.dropout": "0.2",
    "tables.default.dim": "10",
    "tables.default.optimizer.name": "adam",
    "tables.default.optimizer.lr": "0.001",
    "tables.default.optimizer.weight_decay": "0.05",
    "tables.default.optimizer.weight_decay_on": "table",
    "tower.optimizer.name": "adam",
    "tower.optimizer.lr": "0.001",
    "train.order": "shuffled",
    "train.epochs": "100",
    "train.early_stopping.patience": "2",
    "train.plateau": "{metric: auc}",
}
"""Of frappe_x1 in https://github.com/reczoo/BARS: 4,096 rows a batch there; here a 48th of the rows, as there. FuxiCTR
divides the learning rates by 10 where an epoch does not improve."""


def shardkeep(*words: str | Path, folder: Path) -> float:
    """Runs a command; its seconds."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "shardkeep", *map(str, words)], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"shardkeep {words[0]} ended with {done.returncode}\n{done.stderr[-2000:]}")
    return time.monotonic() - began


def tested(run: Path) -> float:
    """The AUC of the test data."""
    return float(json.loads((run / "summary.json").read_text())["test"]["auc"])


def recipe(rows: int) -> list[str]:
    batch = max(64, rows // 48)
    settings = {**RECIPE, "train.batch_size": str(batch), "eval.every_steps": str(rows // batch)}
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def first_hour(case: Mapping[str, Any], files: Path, trials: int) -> dict[str, Any]:
    """AUC and seconds of the job as it is written, of the recipe, and after the search."""
    with tempfile.TemporaryDirectory(prefix="first-hour-") as name:
        folder = Path(name)
        for part in PARTS:
            (folder / f"{part}.csv").symlink_to(files / f"{part}.csv")
        model, seed = f"model.name={case['name']}", ("--set", f"seed={case['seed']}")
        init = ("init", "train.csv", "--label", LABELS[case["group"]], "--set", model, *FILES, "--out", "job.yaml")
        init_s = shardkeep(*init, folder=folder)
        train_s = shardkeep("train", "job.yaml", "--run-dir", "init", *seed, folder=folder)
        with (files / "train.csv").open() as lines:
            words = recipe(sum(1 for _ in lines) - 1)
        recipe_s = shardkeep("train", "job.yaml", "--run-dir", "recipe", *seed, *words, folder=folder)
        found = {"auc": {way: tested(folder / way) for way in ("init", "recipe")}}
        found |= {"seconds": {"init": init_s, "train": train_s, "recipe": recipe_s}}
        if trials:
            tune_s = shardkeep("tune", "job.yaml", "--trials", str(trials), "--out", "tuned", *seed, folder=folder)
            best = next(path for path in (folder / "tuned" / "runs").iterdir() if (path / "checkpoints").exists())
            found["auc"]["tuned"], found["seconds"]["tune"] = tested(best), tune_s
            found |= {"best": (folder / "tuned" / "best.yaml").read_text()}
        return found


def main() -> None:
    parser = harness.seed_arguments(__doc__ or "")
    for name in SETS:
        parser.add_argument(f"--{name}", type=Path, help=f"folder of {name}; left out = without it")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--trials", type=int, default=20)
    options = harness.parse(parser)
    with tempfile.TemporaryDirectory(prefix="first-hour-") as place:
        found = {name: folder for name in SETS if (folder := getattr(options, name.replace("-", "_"))) is not None}
        for name, folder in found.items():
            (Path(place) / name).mkdir()
            write_parts(name, folder, Path(place) / name)
        cases = [{"group": name, "name": model} for name in found for model in options.models]
        trials = min(options.trials, 2) if options.smoke else options.trials
        harness.repeat("first_hour", cases, lambda case: first_hour(case, Path(place) / case["group"], trials), options)


if __name__ == "__main__":
    main()
