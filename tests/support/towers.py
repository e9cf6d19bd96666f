"""Towers of small models on the CPU, and their steps."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn

from shardkeep.compression.tower.compressor import DenseCompression
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.config import TowerConfig, TrainConfig
from shardkeep.workers.dense.loss import Objective
from shardkeep.workers.dense.state import broadcast
from shardkeep.workers.dense.tower import Tower
from shardkeep.workers.model_config import MODELS, RETRIEVAL, ModelConfig, keys_of
from shardkeep.workers.models.registry import build_model, row_dim

CPU = torch.device("cpu")
FEATURES = {"a": 4, "b": 8}
RANKING = [name for name in MODELS if name not in RETRIEVAL]
"""The stock models that `build_model` makes, whose outputs are logits."""
BUILDING = threading.Lock()  # ranks that are threads share torch's generator


def model_config(name: str = "dlrm", **settings: Any) -> ModelConfig:
    found: ModelConfig = TypeAdapter(ModelConfig).validate_python({"name": name, **settings})
    return found


def dims_of(name: str, features: Mapping[str, int] = FEATURES) -> dict[str, int]:
    return {feature: row_dim(name, dim) for feature, dim in features.items()}


def seeded_model(
    seed: int = 0,
    *,
    name: str = "dlrm",
    num_dense: int = 3,
    features: Mapping[str, int] = FEATURES,
    labels: Sequence[str] = ("label",),
    **settings: Any,
) -> nn.Module:
    small = {"bottom": [8], "hidden": [16]} if name == "dlrm" and num_dense else {"hidden": [16]}
    settings = {key: value for key, value in small.items() if key in keys_of(name)} | settings
    with BUILDING, torch.random.fork_rng():
        torch.manual_seed(seed)
        config, dims = model_config(name, **settings), dims_of(name, features)
        return build_model(config, num_dense=num_dense, features=dims, default_dim=8, labels=labels)


def tower_of(
    *, model: nn.Module | None = None, collective: Collective | None = None, config: Any = None, **others: Any
) -> Tower:
    settings = {"compile": "off", "amp": "off", **(config or {})}
    tasks = others.pop("tasks", ())
    train = {key: others.pop(key) for key in ("batch_size", "clip_norm", "loss") if key in others}
    if "compression" in others:
        others["compression"] = functools.partial(DenseCompression, others["compression"])
    tower = Tower(
        model or seeded_model(),
        config=TowerConfig(**settings),
        objective=Objective.of(TrainConfig(**({"batch_size": 8} | train)), tasks),
        **({"device": CPU, "sync": True} | others),
    )
    if collective is not None:
        tower.join(collective)
        broadcast(tower.model, collective)
    return tower


def batch(step: int, num_samples: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    dense = torch.randn(num_samples, 3, generator=drawn)
    values = {n: torch.randn(num_samples, d, generator=drawn) for n, d in FEATURES.items()}
    return dense, values, (torch.rand(num_samples, 1, generator=drawn) < 0.4).float()


def part_of(whole: Any, start: int, stop: int) -> Any:
    dense, values, label = whole
    leaves = {n: v[start:stop].clone().requires_grad_() for n, v in values.items()}
    return dense[start:stop], leaves, label[start:stop]


def train(
    tower: Tower, splits: list[tuple[int, int]], *, first: int = 0, steps: int = 5, micro: int = 1
) -> list[torch.Tensor]:
    """Trains on this rank's rows of each step's 24 samples; returns the gradient of feature a, per step."""
    grads = []
    start, stop = splits[tower.collective.rank]
    for step in range(first, first + steps):
        edges = [start + (stop - start) * i // micro for i in range(micro + 1)]
        parts = [part_of(batch(step, 24), edges[i], edges[i + 1]) for i in range(micro)]
        if start == stop:
            parts = [part_of(batch(step, 24), 0, 1)]
        for i, (dense, leaves, label) in enumerate(parts):
            tower.backward(dense, leaves, label, 1 / 24 if stop > start else 0.0, last=i == len(parts) - 1)
        assert tower.update(step).applied
        grads.append(torch.cat([leaves["a"].grad for _, leaves, _ in parts]))
    return grads


def values_of(tower: Tower) -> torch.Tensor:
    return nn.utils.parameters_to_vector(tower.model.parameters()).detach()


FP16 = {"amp": "fp16"}


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, dense: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.used(dense) + sum(e.sum(1, keepdim=True) for e in embeddings.values())


class Small(nn.Module):
    """One layer: as little to compile as possible."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 + 4 + 8, 1)

    def forward(self, dense: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.layer(torch.cat([dense, *embeddings.values()], dim=1).tanh())
