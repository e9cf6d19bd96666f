#!/usr/bin/env python3
"""How much of its tower's speed has a job over histories? One server and one worker, a core each, beside the tower
alone with ready rows on one core, and beside a whole plain PyTorch program on both.

The plain program trains the same modules over `nn.Embedding(sparse=True)`, by SGD, with batches that are ready.
"""

# B = samples, L = entries of a history, N = B * L

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import history_data
import torch
import torch.nn.functional as F
from torch import nn
from tower_alone import alone
from w1_job import HERE, WARM_UP_S, default_cores, measured

from shardkeep.assembly.model import build_dense_model, table_specs
from shardkeep.config import JobConfig
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.embeddings.sequence import Sequence

DIM, TARGET = 64, 0.9
CASES: dict[str, dict[str, Any]] = {
    "din, 50 ids": {"model": {"name": "din", "hidden": [200, 80]}, "length": 50, "batch": 1024},
    "hstu, 200 ids": {
        "model": {"name": "dnn", "hidden": [200, 80], "encoder": {"name": "hstu"}},
        "length": 200,
        "batch": 128,
    },
}
JOB, TOWER, PLAIN = "shardkeep, 1 server + 1 worker", "the tower alone", "plain PyTorch, both cores"
Step = tuple[Callable[[int], None], Callable[[], None]]


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options = harness.parse(parser)
    results: dict[str, Any] = {}
    for name in options.cases:
        print(name)
        results[name] = compare(name, options)
    harness.write(options.json, "sequence_jobs", results)


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    batch = CASES[name]["batch"]

    def job(seconds: float) -> harness.Figures:
        warm_up_s = 1.0 if options.smoke else WARM_UP_S
        return measured(job_of(name), batch, seconds=seconds, warm_up_s=warm_up_s)

    def tower(seconds: float) -> harness.Figures:
        return alone(partial(tower_step, name), batch=batch, seconds=seconds, as_in_job=True)

    def plain(seconds: float) -> harness.Figures:
        return alone(partial(plain_step, name), batch=batch, seconds=seconds, core=None)

    found = harness.alternate({JOB: job, TOWER: tower, PLAIN: plain}, rounds=options.rounds, seconds=options.seconds)
    shown: dict[str, Any] = {"rounds": found}
    for other, target in ((TOWER, TARGET), (PLAIN, None)):
        shown[f"samples/s, job / {other}"] = harness.ratios(found, JOB, other, "samples_per_s")
        harness.show_ratio(f"{name}: samples/s, {JOB} / {other}", shown[f"samples/s, job / {other}"], target)
        shown[f"CPU, job / {other}"] = harness.ratios(found, JOB, other, "cpu_us_per_sample")
        harness.show_ratio(f"{name}: CPU a sample, {JOB} / {other}", shown[f"CPU, job / {other}"])
    return shown


def job_of(name: str) -> dict[str, Any]:
    case, cores = CASES[name], default_cores(1, 1)
    return {
        "name": "histories",
        "seed": 1,
        "servers": 1,
        "workers": 1,
        "threads": 1,
        "launch": {"affinity": {"workers": cores[0], "servers": cores[1]}},
        "data": {
            "source": "history_data:ready",
            "root": str(HERE),
            "options": {"batch": case["batch"], "length": case["length"]},
        },
        "model": case["model"],
        "tables": {"default": {"dim": DIM, "optimizer": {"name": "rowwise_adagrad", "lr": 0.01}}},
        "tower": {"optimizer": {"name": "sgd", "lr": 0.01}, "compile": "off", "amp": "off"},
        "train": {"batch_size": case["batch"], "epochs": 1_000_000, "order": "stored", "report_every_s": 1.0},
        "checkpoint": {"every_steps": "off"},
    }


def built(name: str) -> tuple[nn.Module, list[Batch]]:
    """The tower, and batches."""
    case, schema = CASES[name], history_data.schema_of(CASES[name]["length"])
    config = JobConfig.model_validate(job_of(name))
    torch.manual_seed(1)
    model = build_dense_model(config, schema, Embeddings(schema, {s.name: s for s in table_specs(config, schema)}))
    data, batch = history_data.Ready(4 * case["batch"], case["length"], 1), case["batch"]
    return model, [data.gather(range(at, at + batch)) for at in range(0, len(data), batch)]


def trained(name: str, rows: Callable[[int, torch.Tensor], torch.Tensor], more: list[nn.Module]) -> Step:
    """A step of the tower over `rows` of a batch's ids (N,): float32 (N, D)."""
    model, batches = built(name)
    parameters = [p for module in (model, *more) for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    model.train()

    def step(i: int) -> None:
        batch = batches[i % len(batches)]
        item, seen = (torch.from_numpy(batch.ids[column].values_N) for column in ("item", "seen_item"))
        lengths_B = torch.from_numpy(batch.ids["seen_item"].lengths_B).long()
        entries_ND = rows(2 * (i % len(batches)) + 1, seen)
        sequence = Sequence(
            {"seen_item": entries_ND}, entries_ND.detach()[:, :0], lengths_B, CASES[name]["length"]
        )  # fmt: skip
        inputs = {"item": rows(2 * (i % len(batches)), item), "seen": sequence}
        logits_B1 = model(torch.from_numpy(batch.dense_BI), inputs).reshape(-1, 1)
        F.binary_cross_entropy_with_logits(logits_B1, torch.from_numpy(batch.label_BT)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, lambda: None


def tower_step(name: str) -> Step:
    """Rows are leaves that are ready."""
    torch.set_num_threads(1)
    leaves: dict[int, torch.Tensor] = {}

    def rows(key: int, ids_N: torch.Tensor) -> torch.Tensor:
        if key not in leaves:
            leaves[key] = torch.empty(len(ids_N), DIM).uniform_(-0.05, 0.05).requires_grad_()
        leaves[key].grad = None
        return leaves[key]

    return trained(name, rows, [])


def plain_step(name: str) -> Step:
    """Rows of a module."""
    table = nn.Embedding(history_data.ITEMS, DIM, sparse=True)
    return trained(name, lambda _, ids_N: table(ids_N), [table])


if __name__ == "__main__":
    main()
