"""A distributed run equals a single-process one: step by step against plain PyTorch, bit by bit among itself."""

from __future__ import annotations

import copy
from itertools import repeat
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from shardkeep.config import JobConfig, parse_config
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import server_of
from shardkeep.workers.config import TowerOptimizerConfig
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Schema
from tests.support.cases import every
from tests.support.local_job import LocalJob, in_threads
from tests.support.one_table import pulled
from tests.support.samples import ArrayDataset, as_data, draw


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
        weight = self.tables[name].weight
        state = self.optimizers[name].state.get(weight, {})
        keys = {"sgd": (), "adagrad": ("sum",), "rowwise_adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq"),
                "ftrl": ("z", "n")}[self.specs[name].optimizer.name]  # fmt: skip
        if not keys:
            return np.zeros((len(weight), 0), np.float32)
        width = 1 if self.specs[name].optimizer.name == "rowwise_adagrad" else weight.shape[1]
        parts = [state[k].reshape(len(weight), -1) if k in state else torch.zeros(len(weight), width) for k in keys]
        return torch.cat(parts, 1).numpy().copy()


OPTIMIZERS = {
    "sgd": "{name: sgd, lr: 0.1}",
    "adagrad": "{name: adagrad, lr: 0.05}",
    "rowwise_adagrad": "{name: rowwise_adagrad, lr: 0.05}",
    "adam": "{name: adam, lr: 0.01}",
    "ftrl": "{name: ftrl, lr: 1.0, l1: 0.0001, l2: 0.001}",
}


def job_config(
    servers: int, workers: int, optimizer: str = "rowwise_adagrad", tower: str = "sgd", **more: object
) -> JobConfig:
    settings = [f"{key}={value}" for key, value in more.items()]
    return parse_config(
        f"""
        seed: 3
        servers: {servers}
        workers: {workers}
        consistency: {{mode: sync}}
        model: {{name: dlrm, bottom: [8], hidden: [8]}}
        tables: {{default: {{dim: 4, optimizer: {OPTIMIZERS[optimizer]}}}, b: {{dim: 6}}}}
        tower: {{compile: off, amp: off, optimizer: {{name: {tower}, lr: 0.01}}}}
        train: {{batch_size: 8}}
        """,
        [key.replace("__", ".") for key in settings],
    )


class SideBySide:
    """A local job and the reference; each step starts both from the reference's state."""

    def __init__(self, config: JobConfig, data: ArrayDataset) -> None:
        self.job = LocalJob(config, as_data(data))
        self.data = data
        worker = self.job.workers[0]
        features = data.schema.features
        everything = data.gather(np.arange(len(data)))
        vocabulary = {
            table: np.unique(np.concatenate([everything.ids[f.name].values_N for f in features if f.table == table]))
            for table in data.schema.tables()
        }
        self.index = {name: i for i, name in enumerate(data.schema.tables())}
        initial = {name: self._pull(name, ids) for name, ids in vocabulary.items()}
        self.reference = Reference(
            data.schema, worker.client.tables, vocabulary, initial, worker.tower.model, config.tower.optimizer
        )

    def _pull(self, name: str, ids: np.ndarray) -> np.ndarray:
        owners = server_of(ids, len(self.job.services))
        rows = np.empty((ids.size, self.job.services[0].tables[self.index[name]].spec.dim), np.float32)
        for s, service in enumerate(self.job.services):
            rows[owners == s] = pulled(service.tables[self.index[name]], ids[owners == s])
        return rows

    def copy_reference(self) -> None:
        for name, ids in self.reference.vocabulary.items():
            owners = server_of(ids, len(self.job.services))
            rows, slots = self.reference.rows(name), self.reference.slots(name)
            for s, service in enumerate(self.job.services):
                mine = owners == s
                service.tables[self.index[name]].load(ids[mine], rows[mine], slots[mine])
        for worker in self.job.workers:
            state = worker.tower.state_dict()
            state["model"] = self.reference.tower.state_dict()
            state["optimizer"] = self.reference.tower_optimizer.state_dict()
            worker.tower.load_state_dict(state)

    def step(self, step: int) -> tuple[float, float]:
        """One step of both: the largest relative errors of a table's and of the tower's update."""
        self.copy_reference()
        before = {name: self.reference.rows(name) for name in self.reference.vocabulary}
        tower_before = flat(self.reference.tower)
        in_threads([lambda w=w: self._train(w, step) for w in self.job.workers])
        self.reference.step(self.joined(step))
        table_error = max(
            relative(self._pull(name, ids) - before[name], self.reference.rows(name) - before[name], before[name])
            for name, ids in self.reference.vocabulary.items()
        )
        expected = flat(self.reference.tower) - tower_before
        tower_error = max(
            relative(flat(w.tower.model) - tower_before, expected, tower_before) for w in self.job.workers
        )
        return table_error, tower_error

    @staticmethod
    def _train(worker, step: int) -> None:
        prepared = worker.trainer.step.pipeline.prepare(step)
        worker.trainer.step.run(prepared, worker.client.pull(step, prepared.request))
        worker.client.fence(step + 1)

    def joined(self, step: int) -> Batch:
        slices = self.job.workers[0].trainer.step.pipeline.slices
        rows = np.concatenate([slices.rows(step, r) for r in range(len(self.job.workers))])
        assert rows.size == slices.samples(step)
        return self.data.gather(rows)


def flat(model) -> np.ndarray:
    return np.concatenate([p.detach().numpy().reshape(-1).copy() for p in model.parameters()])


def relative(ours: np.ndarray, expected: np.ndarray, before: np.ndarray) -> float:
    """Norm of the updates' difference over the norm of the expected update, beyond one last bit of each weight.

    Updates are differences of float32 weights, so the rounding of the weight itself is in them."""
    last_bits = np.linalg.norm(np.spacing(np.abs(before) + np.abs(expected)).astype(np.float64))
    difference = np.linalg.norm((ours - expected).astype(np.float64))
    return float(max(difference - last_bits, 0.0) / np.linalg.norm(expected.astype(np.float64)))


POOLED = dict(zip(OPTIMIZERS, ("sum", "max", "mean", "weighted", "mean"), strict=True))


@every(("optimizer", "pooling"), POOLED.items())
def test_each_step_of_one_worker_is_the_plain_pytorch_step(optimizer: str, pooling: str) -> None:
    both = SideBySide(job_config(1, 1, optimizer), draw(64, pooling=pooling))
    errors = [both.step(step) for step in range(8)]
    assert max(table for table, _ in errors) < 1e-6
    assert max(tower for _, tower in errors) < 1e-6


@every(
    ("optimizer", "workers", "samples", "settings"),
    [
        # The last step of an epoch is ragged; with 3 workers, 24 samples a step, it leaves 1 sample each.
        *zip(OPTIMIZERS, (2, 3, 2, 3, 2), (51, 75, 51, 75, 51), repeat({})),
        ("adam", 3, 25, {"tower": "adam", "train__epochs": 1}),  # of the last step, two workers have no samples
        ("adagrad", 2, 130, {"train__accumulate": 3}),
    ],
)
def test_steps_of_several_workers_are_the_plain_step_on_all_samples_of_the_step(
    optimizer: str, workers: int, samples: int, settings: dict[str, Any]
) -> None:
    both = SideBySide(job_config(2, workers, optimizer, **settings), draw(samples, pooling="mean"))
    for step in range(both.job.workers[0].trainer.total_steps):
        assert max(both.step(step)) < 1e-5, step


@every("workers", [1, 3])
def test_the_digest_does_not_depend_on_the_number_of_servers(workers: int) -> None:
    data = as_data(draw(50, pooling="mean"), draw(30, seed=1, pooling="mean"))
    summaries = [LocalJob(job_config(servers, workers, eval__every_steps=3), data).run() for servers in (1, 3)]
    assert len({s["state_digest"] for s in summaries}) == 1
    assert len({s["eval"]["auc"] for s in summaries}) == 1
    assert all(s["staleness"] == {"0": s["steps"] * workers} for s in summaries)


def test_the_digest_changes_with_the_seed_and_with_one_more_step() -> None:
    data = as_data(draw(50))
    digests = {
        LocalJob(job_config(1, 1, **more), data).run()["state_digest"]
        for more in ({}, {"seed": 4}, {"train__max_steps": 5}, {"tables__b__dim": 5})
    }
    assert len(digests) == 4


def test_the_reference_would_notice_a_lost_duplicate() -> None:
    """The comparison itself can fail: a batch whose duplicates are dropped is another step."""
    both = SideBySide(job_config(1, 1, "sgd"), draw(80))
    joined = both.joined

    def without_duplicates(step: int) -> Batch:
        batch = joined(step)
        first = batch.ids["b"]
        ids = dict(batch.ids) | {"b": Ragged(first.values_N[:0], np.zeros(len(batch), np.int32))}
        return Batch(batch.dense_BI, ids, batch.label_BT)

    both.joined = without_duplicates  # type: ignore[method-assign]
    assert max(both.step(0)) > 1e-3
