"""The plain PyTorch loop that a distributed run must equal: nn.EmbeddingBag tables, torch.optim, one process."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from shardkeep.ps.config import TableSpec
from shardkeep.workers.config import TowerOptimizerConfig
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Schema


class RowwiseAdagrad(torch.optim.Optimizer):
    """EXACT_ROWWISE_ADAGRAD of FBGEMM on sparse gradients, written with torch operators."""

    def __init__(self, params, *, lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("sum", torch.zeros(len(p)))
                grad = p.grad.coalesce()
                rows, values = grad.indices()[0], grad.values()
                state["sum"][rows] += values.pow(2).mean(1)
                p.data[rows] -= group["lr"] * values / (state["sum"][rows].sqrt() + group["eps"]).unsqueeze(1)


class Ftrl(torch.optim.Optimizer):
    """Algorithm 1 of McMahan et al. 2013 on sparse gradients, written with torch operators."""

    def __init__(self, params, *, lr: float, beta: float, l1: float, l2: float) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "l1": l1, "l2": l2})

    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("z", torch.zeros_like(p))
                state.setdefault("n", torch.zeros_like(p))
                grad = p.grad.coalesce()
                rows, g = grad.indices()[0], grad.values()
                z, n, w = state["z"][rows], state["n"][rows], p.data[rows]
                z = z + g - ((n + g * g).sqrt() - n.sqrt()) / group["lr"] * w
                n = n + g * g
                moved = -(z - group["l1"] * z.sign()) / ((group["beta"] + n.sqrt()) / group["lr"] + group["l2"])
                state["z"][rows], state["n"][rows] = z, n
                p.data[rows] = torch.where(z.abs() > group["l1"], moved, torch.zeros_like(w))


def row_optimizer(spec: TableSpec, table: nn.EmbeddingBag) -> torch.optim.Optimizer:
    config = spec.optimizer
    if config.name == "sgd":
        return torch.optim.SGD(table.parameters(), lr=config.lr)
    if config.name == "adagrad":
        return torch.optim.Adagrad(table.parameters(), lr=config.lr, eps=config.eps)
    if config.name == "rowwise_adagrad":
        return RowwiseAdagrad(table.parameters(), lr=config.lr, eps=config.eps)
    if config.name == "adam":
        return torch.optim.SparseAdam(table.parameters(), lr=config.lr, betas=config.betas, eps=config.eps)
    return Ftrl(table.parameters(), lr=config.lr, beta=config.beta, l1=config.l1, l2=config.l2)


class Reference:
    """The model, its tables over the sorted `vocabulary` of each table, and their optimizers."""

    def __init__(
        self,
        schema: Schema,
        specs: dict[str, TableSpec],
        vocabulary: dict[str, np.ndarray],
        weights: dict[str, np.ndarray],
        tower: nn.Module,
        tower_optimizer: TowerOptimizerConfig,
    ) -> None:
        self.schema, self.specs, self.vocabulary = schema, specs, vocabulary
        self.tables = {}
        for name, initial in weights.items():
            table = nn.EmbeddingBag(*initial.shape, mode="sum", sparse=True)
            table.weight.data = torch.from_numpy(initial.copy())
            self.tables[name] = table
        self.optimizers = {name: row_optimizer(specs[name], table) for name, table in self.tables.items()}
        self.tower = copy.deepcopy(tower)
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[tower_optimizer.name]
        self.tower_optimizer = kind(self.tower.parameters(), lr=tower_optimizer.lr, fused=True)

    def step(self, batch: Batch) -> float:
        """One step on the joined batch; returns its mean loss."""
        inputs = {f.name: self._pooled(f.table, f.pooling, batch.ids[f.name], len(batch)) for f in self.schema.features}
        logits = self.tower(torch.from_numpy(batch.dense_BI), inputs)
        loss = F.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.label_BT))
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # else torch warns that they are off
            loss.backward()
            for optimizer in [*self.optimizers.values(), self.tower_optimizer]:
                optimizer.step()
                optimizer.zero_grad()
        return loss.item()

    def _pooled(self, table: str, pooling: str, ids: Ragged, batch: int) -> torch.Tensor:
        where = torch.from_numpy(np.searchsorted(self.vocabulary[table], ids.values_N))
        lengths = np.ones(batch, np.int64) if ids.lengths_B is None else ids.lengths_B
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64))
        module = self.tables[table]
        if pooling == "max":  # embedding_bag has no sparse gradient of it
            bags = F.embedding(where, module.weight, sparse=True).split(lengths.tolist())
            return torch.stack([bag.max(0).values if len(bag) else bag.new_zeros(bag.shape[1]) for bag in bags])
        if pooling == "weighted":
            weights = torch.from_numpy(ids.weights_N)
            return F.embedding_bag(where, module.weight, offsets, mode="sum", sparse=True, per_sample_weights=weights)
        return F.embedding_bag(where, module.weight, offsets, mode=pooling, sparse=True)

    def rows(self, name: str) -> np.ndarray:
        return self.tables[name].weight.detach().numpy().copy()

    def slots(self, name: str) -> np.ndarray:
        """Optimizer slots in the layout of a server's rows: (vocabulary, slots)."""
        weight = self.tables[name].weight
        state = self.optimizers[name].state.get(weight, {})
        keys = {"sgd": (), "adagrad": ("sum",), "rowwise_adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq"),
                "ftrl": ("z", "n")}[self.specs[name].optimizer.name]  # fmt: skip
        if not keys:
            return np.zeros((len(weight), 0), np.float32)
        width = 1 if self.specs[name].optimizer.name == "rowwise_adagrad" else weight.shape[1]
        parts = [state[k].reshape(len(weight), -1) if k in state else torch.zeros(len(weight), width) for k in keys]
        return torch.cat(parts, 1).numpy().copy()
