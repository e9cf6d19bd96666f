#!/usr/bin/env python3
"""Do jobs of several labels learn what plain PyTorch learns by the same recipe? Census: income, and never married.

    python benchmarks/census_tasks.py --data FOLDER --seeds 7 8 9 --json census.json

FOLDER holds census-income.test.gz (docs/guide/data.md). The plain program trains the same modules over `nn.Embedding`
with a loop of its own: no server, no worker, no row of ours. One process each, `sync`. Runs that the file of --json
already holds are not repeated.
"""

# B = samples, N = rows of a table, T = labels

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import shardkeep
from shardkeep.assembly.model import build_dense_model, table_specs
from shardkeep.base.yaml_text import read_yaml
from shardkeep.config import JobConfig
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.metrics.quality import evaluate_predictions

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "census.yaml"
LABELS: dict[str, dict[str, Any]] = {
    "income": {"column": "income", "positive": ["50000+."]},
    "marital_stat": {"column": "marital_stat", "positive": ["Never married"]},
}
SHARED: dict[str, Any] = {"name": "dnn", "hidden": [128, 64]}
TASKS = {"hidden": [64], "task_hidden": [32]}
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "income alone": (SHARED, ["income"]),
    "never married alone": (SHARED, ["marital_stat"]),
    "shared layers": (SHARED, [*LABELS]),
    "mmoe": ({"name": "mmoe", "experts": 4, **TASKS}, [*LABELS]),
    "ple": ({"name": "ple", "levels": 1, "shared_experts": 2, "task_experts": 2, **TASKS}, [*LABELS]),
}
ROWS_LR, LR, BATCH, EPOCHS = 0.003, 0.001, 256, 3


def job_of(case: str, seed: int, folder: Path, *, smoke: bool) -> JobConfig:
    model, labels = CASES[case]
    data = read_yaml(EXAMPLE.read_text())["data"]
    data = {key: value for key, value in data.items() if key != "label"} | {"root": str(folder)}
    data["sparse"] = [name for name in data["sparse"] if name not in LABELS]
    data |= {"labels": [LABELS[name] for name in labels]} if len(labels) > 1 else {"label": LABELS[labels[0]]}
    return JobConfig.model_validate(
        {
            "seed": seed,
            **harness.ONE_PROCESS,
            "data": data,
            "model": model,
            "tables": {"default": {"dim": 8, "optimizer": {"name": "adam", "lr": ROWS_LR}}},
            "tower": {"optimizer": {"name": "adam", "lr": LR}, "amp": "off", "compile": "off"},
            "train": {"batch_size": BATCH, "epochs": EPOCHS} | ({"max_steps": 20} if smoke else {}),
        }
    )


def ours(job: JobConfig, labels: Sequence[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        found = shardkeep.train(job, run_dir=Path(folder) / "run", quiet=True).to_dict()["eval"]
    return {name: found[f"auc/{name}" if len(labels) > 1 else "auc"] for name in labels}


class Plain:
    """The same modules over `nn.Embedding`, with SparseAdam for its rows."""

    def __init__(self, job: JobConfig, data: Data) -> None:
        torch.manual_seed(job.seed)
        schema = data.train.schema
        specs = {spec.name: spec for spec in table_specs(job, schema)}
        whole = data.train.gather(np.arange(len(data.train)))
        self._features = {feature.name: feature.table for feature in schema.features}
        self._ids = {name: np.unique(whole.ids[name].values_N) for name in self._features}
        self.tower = build_dense_model(job, schema, Embeddings(schema, specs))
        self.rows = nn.ModuleDict(
            {name: nn.Embedding(len(ids) + 1, specs[self._features[name]].dim, sparse=True)
             for name, ids in self._ids.items()}
        )  # fmt: skip
        for table in self.rows.values():
            assert isinstance(table, nn.Embedding)
            nn.init.uniform_(table.weight, -0.05, 0.05)
        self._steps = [
            torch.optim.SparseAdam(self.rows.parameters(), lr=ROWS_LR),
            torch.optim.Adam(self.tower.parameters(), lr=LR),
        ]

    def logits(self, batch: Batch) -> torch.Tensor:
        """(B, T). All ids that training lacks share a row."""
        inputs: dict[str, torch.Tensor] = {}
        for name, ids_N in self._ids.items():
            values_B = batch.ids[name].values_N
            at_B = np.minimum(np.searchsorted(ids_N, values_B), len(ids_N) - 1)
            inputs[name] = self.rows[name](torch.from_numpy(np.where(ids_N[at_B] == values_B, at_B, len(ids_N))))
        logits: torch.Tensor = self.tower(torch.from_numpy(batch.dense_BI), inputs)
        return logits.reshape(len(batch), -1)

    def train(self, batches: Iterator[Batch]) -> None:
        for batch in batches:
            loss = F.binary_cross_entropy_with_logits(
                self.logits(batch), torch.from_numpy(batch.label_BT), reduction="sum"
            ) / len(batch)
            for optimizer in self._steps:
                optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            for optimizer in self._steps:
                optimizer.step()


def plain(job: JobConfig, labels: Sequence[str]) -> dict[str, float]:
    data = open_data(job.data, seed=job.seed)
    assert data.eval is not None
    program, random = Plain(job, data), np.random.default_rng(job.seed)

    def batches() -> Iterator[Batch]:
        for _ in range(job.train.epochs):
            order = random.permutation(len(data.train))
            for at in range(0, len(order), BATCH):
                yield data.train.gather(order[at : at + BATCH])

    steps = range(job.train.max_steps) if job.train.max_steps else None
    program.train(batches() if steps is None else (batch for _, batch in zip(steps, batches(), strict=False)))
    held = data.eval.gather(np.arange(len(data.eval)))
    with torch.no_grad():
        logits_NT = program.logits(held).numpy()
    return {name: evaluate_predictions(logits_NT[:, t], held.label_BT[:, t])["auc"] for t, name in enumerate(labels)}


def main() -> None:
    parser = harness.seed_arguments(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True, help="the folder of census-income.test.gz")
    options = parser.parse_args()

    def run(case: Mapping[str, Any]) -> dict[str, Any]:
        job = job_of(case["name"], case["seed"], options.data, smoke=options.smoke)
        return {"auc": (ours if case["group"] == "shardkeep" else plain)(job, CASES[case["name"]][1])}

    cases = [{"group": side, "name": name} for name in CASES for side in ("shardkeep", "plain PyTorch")]
    harness.repeat("census_tasks", cases, run, options)


if __name__ == "__main__":
    main()
