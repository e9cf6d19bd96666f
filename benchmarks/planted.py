#!/usr/bin/env python3
"""How near do attention, models of several labels and retrieval come to the best possible figures of planted streams?

    python benchmarks/planted.py --groups sequences tasks retrieval --seeds 7

Histories: `din` and mean pooling. A chain of three labels: shared layers, MMoE and PLE beside a job for each label, and
ESMM (`after`) beside the product of conditional models (`given`) over all samples. Recall of towers with and without
log-Q, and of models of the next item. One process each, `sync`. Runs that
the file of --json already holds are not repeated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np

import shardkeep
from shardkeep.config import JobConfig
from shardkeep.examples.synthetic.tasks import best_auc
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.metrics.quality import evaluate_predictions

Case = dict[str, Any]

HISTORIES = {"din": {"name": "din", "hidden": [64, 32]}, "mean": {"name": "dnn", "hidden": [64, 32]}}
NAMES = ("clicked", "bought", "returned")
TASKS = {"hidden": [64, 32], "task_hidden": [16]}
SHARED: dict[str, Any] = {"name": "dnn", "hidden": [64, 32, 16]}
MMOE: dict[str, Any] = {"name": "mmoe", "experts": 4, **TASKS}
PLE: dict[str, Any] = {"name": "ple", "levels": 1, "shared_experts": 2, "task_experts": 1, **TASKS}
TOWERS: dict[str, Any] = {
    "name": "two_tower",
    "item": ["item"],
    "hidden": [64],
    "dim": 32,
    "encoder": {"name": "transformer", "layers": 1, "heads": 1},
}
FOUND: dict[str, Case] = {
    "two_tower": {"model": TOWERS},
    "two_tower, correction: none": {"model": TOWERS, "loss": {"name": "sampled_softmax", "correction": "none"}},
    "sasrec": {"model": {"name": "sasrec", "layers": 1}},
    "hstu": {"model": {"name": "hstu", "layers": 1, "heads": 2}},
}
FAINT = 1e-9
"""Weight of the labels beside the one that a job learns alone: their gradients are lost in rounding."""


def labels_of(key: str | None = None, alone: str | None = None) -> list[dict[str, Any]]:
    """The chain, each label with `key` naming the one before it, or all but one of hardly any weight."""
    labels: list[dict[str, Any]] = [{"column": name} for name in NAMES]
    labels[-1]["missing"] = "mask"
    for label, before in zip(labels[1:], NAMES, strict=False):
        label |= {key: before} if key else {}
    return [label | ({"weight": FAINT} if alone not in (None, label["column"]) else {}) for label in labels]


def cases() -> dict[str, dict[str, Case]]:
    """Group -> name -> model and labels."""
    chain: dict[str, Case] = {
        "shared layers": {"model": SHARED, "labels": labels_of()},
        "mmoe": {"model": MMOE, "labels": labels_of()},
        "ple": {"model": PLE, "labels": labels_of()},
        **{f"{name} alone": {"model": SHARED, "labels": labels_of(alone=name)} for name in NAMES},
        "mmoe, after": {"model": MMOE, "labels": labels_of("after")},
        "mmoe, given": {"model": MMOE, "labels": labels_of("given")},
    }
    histories: dict[str, Case] = {name: {"model": model} for name, model in HISTORIES.items()}
    return {"sequences": histories, "tasks": chain, "retrieval": FOUND}


def job_of(group: str, case: Case, seed: int, *, smoke: bool) -> JobConfig:
    made: dict[str, Any] = {"rows": 1_500_000, "eval_rows": 100_000, "seed": seed}
    if group == "tasks":
        made |= {"rows": 600_000, "table_sizes": [200] * 4 + [500] * 2 + [1000] * 2}
    more: dict[str, Any] = {"train": {"batch_size": 1024}}
    dim, optimizer = 16, {"name": "rowwise_adagrad", "lr": 0.1, "initial_accumulator": 0.001}
    if group == "retrieval":
        made |= {"rows": 80_000, "eval_rows": 5_000}
        more = {"train": {"batch_size": 256, "loss": case.get("loss", {"name": "sampled_softmax"})}}
        more["eval"] = {"metrics": ["recall@1", "recall@50"]}
        dim, optimizer = 32, {"name": "rowwise_adagrad", "lr": 0.05}
    if smoke:
        made |= {"rows": 8_000, "eval_rows": 4_000}
    source = f"shardkeep.examples.synthetic.{group}:samples"
    labels = {"labels": case["labels"], "scale": "none"} if "labels" in case else {}
    data = {"source": source, "options": made, **labels}
    return JobConfig.model_validate(
        {
            "seed": seed,
            **harness.ONE_PROCESS,
            "data": data,
            "model": case["model"],
            "tables": {"default": {"dim": dim, "optimizer": optimizer}},
            "tower": {"optimizer": {"name": "adam", "lr": 0.003 if group == "retrieval" else 0.002}},
            **more,
        }
    )


def run(case: Mapping[str, Any], *, smoke: bool) -> dict[str, Any]:
    group, name = case["group"], case["name"]
    job = job_of(group, cases()[group][name], case["seed"], smoke=smoke)
    with tempfile.TemporaryDirectory() as folder:
        summary = shardkeep.train(job, run_dir=Path(folder) / "run", quiet=True).to_dict()
        found = {key: value for key, value in summary["eval"].items() if isinstance(value, float)}
        if group == "tasks":
            options = {key: value for key, value in job.data.options.items() if key != "rows"}
            best = best_auc(given=name == "mmoe, given", **options)
            found |= {f"best_auc/{label}": value for label, value in best.items()}
        if name == "mmoe, given":
            found |= of_products(job, Path(folder) / "run")
    return {"eval": found, "samples_per_s": summary["samples_per_s"]}


def of_products(job: JobConfig, folder: Path) -> dict[str, float]:
    """AUC and calibration of products of conditional scores, over all samples that have the label."""
    labels = JobConfig.model_validate({"data": {"source": job.data.source, "labels": labels_of()}}).data.labels
    data, chain = (open_data(job.data.model_copy(update=each), seed=job.seed) for each in ({}, {"labels": labels}))
    assert data.eval is not None and chain.eval is not None
    batch = data.eval.gather(np.arange(len(data.eval)))
    label_NT = chain.eval.gather(np.arange(len(chain.eval))).label_BT
    columns = {name: batch.dense_BI[:, i] for i, name in enumerate(data.eval.schema.dense)}
    columns |= {name: ragged.values_N for name, ragged in batch.ids.items()}
    chance_NT = np.cumprod(shardkeep.load(folder).predict(columns).astype(np.float64), axis=1)
    found = {}
    for t, name in enumerate(NAMES):
        has_N = ~np.isnan(label_NT[:, t])
        logit_N = np.log(chance_NT[has_N, t]) - np.log1p(-chance_NT[has_N, t])
        scores = evaluate_predictions(logit_N, label_NT[has_N, t])
        found |= {f"all rows: {key}/{name}": scores[key] for key in ("auc", "logloss", "calibration")}
    return found


def main() -> None:
    parser = harness.seed_arguments(__doc__ or "")
    parser.add_argument("--groups", nargs="+", choices=list(cases()), default=list(cases()))
    options = parser.parse_args()
    asked = [{"group": group, "name": name} for group in options.groups for name in cases()[group]]
    harness.repeat("planted", asked, partial(run, smoke=options.smoke), options)


if __name__ == "__main__":
    main()
