"""Do the stock models learn as well as in plain PyTorch? Each by the same recipe, best epoch by evaluation AUC.

    python benchmarks/published_models.py --data FOLDER      # FOLDER holds adult/ and census_income_kdd/
    python benchmarks/published_models.py --data FOLDER --examples adult --models dnn deepfm --seeds 1 2 3

The other side trains the same module with nn.Embedding, torch.optim.Adagrad and a DataLoader-free loop over the same
converted samples. Its order of samples and initial rows are its own. Two jobs run at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"adult": "adult", "census": "census_income_kdd"}
TOP = {"hidden": [64, 32]}
MODELS: dict[str, dict[str, Any]] = {
    "lr": {"name": "lr"},
    "fm": {"name": "fm"},
    "dnn": {"name": "dnn", **TOP},
    "wide_deep": {"name": "wide_deep", **TOP},
    "deepfm": {"name": "deepfm", **TOP},
    "xdeepfm": {"name": "xdeepfm", **TOP},
    "dlrm": {"name": "dlrm", "bottom": [32], **TOP},
    "dcn_v2": {"name": "dcn_v2", **TOP},
    "autoint": {"name": "autoint", "attention": {"layers": 2, "dim": 32}},
    "fibinet": {"name": "fibinet", **TOP},
    "masknet": {"name": "masknet", **TOP},
    "finalmlp": {"name": "finalmlp", **TOP},
}
ROWS, DENSE_LR, EPOCHS, PATIENCE = {"name": "adagrad", "lr": 0.05, "initial_accumulator": 0.001}, 0.001, 8, 2


def recipe(model: str, seed: int) -> dict[str, Any]:
    """What both sides have in common, as settings of a job in one process."""
    dim = {} if model == "lr" else {"dim": 8}
    return {
        "seed": seed,
        "servers": 0,
        "workers": 1,
        "model": MODELS[model],
        "tables": {"default": {**dim, "optimizer": ROWS}},
        "tower": {"optimizer": {"name": "adam", "lr": DENSE_LR}, "amp": "off"},
        "train": {"epochs": EPOCHS, "early_stopping": {"metric": "auc", "patience": PATIENCE}},
    }


def config_of(example: str, model: str, seed: int, data: Path) -> Any:
    """The job of an example with this model."""
    from shardkeep.base.yaml_text import read_text, read_yaml
    from shardkeep.config import JobConfig

    raw = read_yaml(read_text(ROOT / "examples" / f"{example}.yaml"))
    raw["data"]["root"] = str((data / FOLDERS[example]).resolve())
    changes = recipe(model, seed)
    return JobConfig.model_validate({**raw, **changes, "train": {**raw["train"], **changes["train"]}})


def ours(config: Any) -> dict[str, float]:
    """The best evaluation of the job."""
    import shardkeep

    with tempfile.TemporaryDirectory() as folder:
        summary = shardkeep.train(config, run_dir=Path(folder) / "run", quiet=True)
    assert summary.best is not None
    return {"auc": float(summary.best.auc or 0.0), "logloss": float(summary.best.logloss or 0.0)}


def plain(config: Any) -> dict[str, float]:
    """The best epoch of a loop in plain PyTorch."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    from shardkeep.workers.data.sources.registry import open_data
    from shardkeep.workers.metrics.quality import MetricSettings, evaluate_predictions

    torch.manual_seed(config.seed)
    torch.set_num_threads(1)
    data = open_data(config.data, seed=config.seed)
    rows, model = _modules(config, data)
    embedding = torch.optim.Adagrad(
        rows.parameters(), lr=ROWS["lr"], initial_accumulator_value=ROWS["initial_accumulator"]
    )
    dense = torch.optim.Adam(model.parameters(), lr=DENSE_LR)
    train, held = _tensors(data.train, rows, data.train), _tensors(data.eval, rows, data.train)
    best, since = {"auc": 0.0, "logloss": 0.0}, 0
    for _ in range(EPOCHS):
        model.train()
        for part in torch.randperm(len(data.train)).split(config.train.batch_size):
            logits = model(train["dense"][part], {n: rows[n](ids[part]) for n, ids in train["ids"].items()})
            loss = binary_cross_entropy_with_logits(logits, train["label"][part])
            for optimizer in (embedding, dense):
                optimizer.zero_grad()
            loss.backward()
            for optimizer in (embedding, dense):
                optimizer.step()
        model.eval()
        with torch.no_grad():
            logits_N = model(held["dense"], {n: rows[n](ids) for n, ids in held["ids"].items()}).numpy().reshape(-1)
        found = evaluate_predictions(logits_N, held["label"].numpy(), asked=MetricSettings(("auc", "logloss")))
        best, since = (found, 0) if found["auc"] > best["auc"] else (best, since + 1)
        if since == PATIENCE:
            break
    return best


def _modules(config: Any, data: Any) -> tuple[Any, Any]:
    """nn.Embedding for each feature, with a row for ids that training does not have, and the model."""
    import torch

    from shardkeep.assembly.model import table_specs
    from shardkeep.workers.models.registry import build_model

    dims = {spec.name: spec.dim for spec in table_specs(config, data.train.schema)}
    ids = data.train.gather(np.arange(len(data.train))).ids
    rows = torch.nn.ModuleDict()
    for feature in data.train.schema.features:
        count = np.unique(ids[feature.name].values_N).size + 1
        rows[feature.name] = torch.nn.Embedding(count, dims[feature.table])
        torch.nn.init.uniform_(rows[feature.name].weight, -0.05, 0.05)
    features = {feature.name: dims[feature.table] for feature in data.train.schema.features}
    default_dim = config.table("default").dim
    model = build_model(config.model, num_dense=data.train.schema.num_dense, features=features, default_dim=default_dim)
    return rows, model


def _tensors(dataset: Any, rows: Any, train: Any) -> dict[str, Any]:
    import torch

    batch = dataset.gather(np.arange(len(dataset)))
    vocabulary = train.gather(np.arange(len(train))).ids
    found = {}
    for name in rows:
        known = np.unique(vocabulary[name].values_N)
        at = np.searchsorted(known, batch.ids[name].values_N)
        at[known[np.minimum(at, known.size - 1)] != batch.ids[name].values_N] = known.size
        found[name] = torch.from_numpy(at)
    return {"dense": torch.from_numpy(batch.dense_BI), "label": torch.from_numpy(batch.label_BT), "ids": found}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All runs, two at a time; mean, deviation and difference of each example and model."""
    tasks = [
        (example, model, seed, side)
        for example in options.examples
        for model in (options.models if example == "adult" else options.census_models)
        for seed in options.seeds
        for side in ("ours", "plain")
    ]

    def run(task: tuple[str, str, int, str]) -> dict[str, float]:
        example, model, seed, side = task
        command = [sys.executable, __file__, "--data", str(options.data), "--one", example, model, str(seed), side]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(map(str, task))}: {done.stderr.strip().splitlines()[-1]}")
        return dict(json.loads(done.stdout.splitlines()[-1]))

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(tasks, pool.map(run, tasks), strict=True))
    pairs = dict.fromkeys((example, model) for example, model, _, _ in tasks)
    return {f"{e} {m}": _compared({t: f for t, f in found.items() if t[:2] == (e, m)}) for e, m in pairs}


def _compared(runs: Mapping[tuple[str, str, int, str], Mapping[str, float]]) -> dict[str, Any]:
    sides: dict[str, Any] = {}
    for side in ("ours", "plain"):
        aucs = [figures["auc"] for task, figures in runs.items() if task[3] == side]
        losses = [figures["logloss"] for task, figures in runs.items() if task[3] == side]
        sides[side] = {"auc": _spread(aucs), "logloss": _spread(losses)}
    ours_auc, plain_auc = sides["ours"]["auc"], sides["plain"]["auc"]
    count = max(1, len(ours_auc["values"]))
    noise = 2.0 * math.sqrt((ours_auc["deviation"] ** 2 + plain_auc["deviation"] ** 2) / count)
    difference = ours_auc["mean"] - plain_auc["mean"]
    return sides | {"auc_difference": difference, "noise": noise, "below": difference < -noise}


def _spread(values: Sequence[float]) -> dict[str, Any]:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "deviation": deviation, "values": list(values)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of adult/ and census_income_kdd/")
    parser.add_argument("--examples", nargs="+", choices=list(FOLDERS), default=list(FOLDERS))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--census-models", nargs="+", choices=list(MODELS), default=["deepfm", "dlrm", "dcn_v2"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--smoke", action="store_true", help="one run of each side: does it run at all")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.data is None:
        print(
            "published_models.py: --data FOLDER is needed: it holds adult/ and census_income_kdd/ (docs/guide/data.md)"
        )
        return 2
    if options.smoke:
        options.examples, options.models, options.seeds = ["adult"], ["lr"], [1]
    if options.one:
        example, model, seed, side = options.one
        config = config_of(example, model, int(seed), options.data)
        print(json.dumps((ours if side == "ours" else plain)(config)))
        return 0
    results = measure(options)
    print(f"{'':<18} {'ours':>16} {'plain PyTorch':>18} {'difference':>11}")
    for name, found in results.items():
        sides = [
            f"{found[side]['auc']['mean']:.4f} +- {found[side]['auc']['deviation']:.4f}" for side in ("ours", "plain")
        ]
        print(f"{name:<18} {sides[0]:>16} {sides[1]:>18} {found['auc_difference']:>+11.4f}")
    harness.write(options.json, "published_models", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
