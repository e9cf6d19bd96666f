#!/usr/bin/env python3
"""How good is the job that `shardkeep init` writes, with no hand on it, beside what `shardkeep tune` makes of it?

    python benchmarks/first_hour.py --adult FOLDER --census FOLDER --seeds 7 8 --json first_hour.json

adult.data, and census-income.test.gz with the header that it lacks; four models. AUC of the rows that `init` holds out
for the test, which no trial reads: of the job as it stands, and of the best of `--trials`. Runs that the file of --json
already holds are not repeated.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import harness

from shardkeep.base.yaml_text import read_yaml

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MODELS = ("dnn", "deepfm", "dlrm", "dcn_v2")
LABELS = {"adult": "salary", "census": "income"}
LEFT_OUT = {"census": ("instance_weight",)}
"""How many people a row stands for: no property of a person (docs/guide/data.md)."""


def write_csv(name: str, folder: Path, out: Path) -> None:
    """The rows of a data set, with a header."""
    if name == "adult":
        out.write_bytes((folder / "adult.data").read_bytes())
        return
    header: list[str] = read_yaml((EXAMPLES / "census.yaml").read_text())["data"]["columns"]
    kept = [at for at, column in enumerate(header) if column not in LEFT_OUT[name]]
    with gzip.open(folder / "census-income.test.gz", "rt") as rows, out.open("w") as file:
        for row in [header, *(line.rstrip("\n").split(",") for line in rows)]:
            file.write(",".join(row[at].strip() for at in kept) + "\n")


def shardkeep(*words: str | Path, folder: Path) -> float:
    """Runs a command; its seconds."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "shardkeep", *map(str, words)], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"shardkeep {words[0]} ended with {done.returncode}\n{done.stderr[-2000:]}")
    return time.monotonic() - began


def tested(run: Path) -> dict[str, Any]:
    """The metrics of the test data."""
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())["test"]
    return found


def first_hour(case: Mapping[str, Any], csv: Path, trials: int) -> dict[str, Any]:
    """AUC and seconds of the job as it is written, and after the search."""
    with tempfile.TemporaryDirectory(prefix="first-hour-") as name:
        folder = Path(name)
        (folder / csv.name).symlink_to(csv)
        model = f"model.name={case['name']}"
        init_s = shardkeep("init", csv.name, "--label", LABELS[case["group"]], "--set", model, folder=folder)
        seed = ("--set", f"seed={case['seed']}")
        train_s = shardkeep("train", "job.yaml", "--run-dir", "run", *seed, folder=folder)
        tune_s = shardkeep("tune", "job.yaml", "--trials", str(trials), "--out", "tuned", *seed, folder=folder)
        best = next(path for path in (folder / "tuned" / "runs").iterdir() if (path / "checkpoints").exists())
        auc = {"init": tested(folder / "run")["auc"], "tuned": tested(best)["auc"]}
        seconds = {"init_s": init_s, "train_s": train_s, "tune_s": tune_s}
        return {"auc": auc, **seconds, "best": (folder / "tuned" / "best.yaml").read_text()}


def main() -> None:
    parser = harness.seed_arguments(__doc__ or "")
    for name in LABELS:
        parser.add_argument(f"--{name}", type=Path, help=f"folder of {name}; left out = without it")
    parser.add_argument("--trials", type=int, default=20)
    options = harness.parse(parser)
    with tempfile.TemporaryDirectory(prefix="first-hour-") as files:
        found = {name: folder for name in LABELS if (folder := getattr(options, name)) is not None}
        csv = {name: Path(files) / f"{name}.csv" for name in found}
        for name, folder in found.items():
            write_csv(name, folder, csv[name])
        cases = [{"group": name, "name": model} for name in found for model in MODELS]
        trials = 2 if options.smoke else options.trials
        harness.repeat("first_hour", cases, lambda case: first_hour(case, csv[case["group"]], trials), options)


if __name__ == "__main__":
    main()
