"""Row optimizers against torch and against the formulas in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import pytest
import torch

from shardkeep.base.plugging.plugs import Plug
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.table import table_kernels
from shardkeep.ps.server.table.optimizers.kernels.shared_kernels import SIGNATURE
from shardkeep.ps.server.table.optimizers.registry import OPTIMIZERS
from tests.support.cases import every
from tests.support.one_table import OneTable, exported, scalars_of
from tests.support.row_formulas import FORMULAS, new_slots

NUM_IDS, DIM, STEPS = 40, 7, 50
WARM_UP = {"warmup_steps": 10, "decay": "cosine", "decay_steps": 60, "final_factor": 0.1}


def make_table(optimizer: dict[str, Any], dim: int = DIM) -> OneTable:
    return OneTable(TableSpec(name="t", dim=dim, optimizer=optimizer, init={"scale": 0.5}), seed=3)


def random_steps(seed: int, dim: int = DIM, *, everything: bool = False) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    for _ in range(STEPS):
        ids = all_ids() if everything else np.unique(rng.integers(0, NUM_IDS, 25))
        yield ids, rng.normal(size=(ids.size, dim)).astype(np.float32)


def all_ids() -> np.ndarray:
    return np.arange(NUM_IDS, dtype=np.int64)


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


def update(table: OneTable, ids: np.ndarray, grad: np.ndarray, squares: np.ndarray, step: int) -> None:
    """As the shard does it for rows with given mean squares."""
    slots = table.slots_to_load(ids)
    table_kernels.update(table.descriptor, slots, np.column_stack([grad, squares]), scalars_of(table, step))


@every("plug", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_has_one_name_and_a_kernel_of_all_optimizers_signature(plug: Plug[Any, Any]) -> None:
    assert get_args(plug.config.model_fields["name"].annotation) == (plug.name,)
    (signature,) = plug.load().signatures
    assert SIGNATURE.args == signature


Optimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
TORCH: dict[str, tuple[dict[str, Any], Optimizer]] = {
    "sgd": ({"name": "sgd", "lr": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (
        {"name": "adagrad", "lr": 0.1, "initial_accumulator": 0.2},
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.2),
    ),
    "adagrad from 0": ({"name": "adagrad", "lr": 0.1}, lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "adam": (
        {"name": "adam", "lr": 0.05, "betas": (0.8, 0.99), "eps": 1e-6},
        lambda p: torch.optim.SparseAdam(p, lr=0.05, betas=(0.8, 0.99), eps=1e-6),
    ),
}
DENSE_TORCH: dict[str, tuple[dict[str, Any], Optimizer]] = {
    "adam": (
        {"name": "adam", "lr": 0.05, "betas": (0.8, 0.99), "eps": 0.01, "eps_after_correction": True},
        lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.8, 0.99), eps=0.01),
    ),
    "adam with decay": (
        {"name": "adam", "lr": 0.01, "weight_decay": 0.05, "eps_after_correction": True},
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.05),
    ),
}
CASES = [(name, False) for name in TORCH] + [(name, True) for name in DENSE_TORCH]


@every(("case", "dim"), zip(CASES, itertools.cycle([1, 7, 16])))
def test_fifty_steps_agree_with_torchs_sparse_optimizers_and_with_its_dense_ones_where_all_rows_have_gradients(
    case: tuple[str, bool], dim: int
) -> None:
    name, dense = case
    config, make = (DENSE_TORCH if dense else TORCH)[name]
    table = make_table(config, dim)
    weight = torch.nn.Parameter(torch.from_numpy(table.pull(all_ids())).double())
    optimizer = make([weight])
    with torch.sparse.check_sparse_tensor_invariants():
        for step, (ids, grad) in enumerate(random_steps(5, dim, everything=dense)):
            table.apply(ids, grad, step=step)
            grads = torch.from_numpy(grad).double()
            sparse = torch.sparse_coo_tensor(torch.from_numpy(ids)[None], grads, weight.shape, is_coalesced=True)
            weight.grad = grads if dense else sparse
            optimizer.step()
    assert_close(table.pull(all_ids()), weight.detach().numpy(), 1e-6)


CONFIGS: list[dict[str, Any]] = [
    {"name": "sgd", "lr": 0.1, "weight_decay": 0.01},
    {"name": "sgd", "lr": 0.1, "schedule": WARM_UP},
    {"name": "adagrad", "lr": 0.1, "weight_decay": 0.01, "eps": 1e-3, "initial_accumulator": 0.1},
    {"name": "rowwise_adagrad", "lr": 0.1},
    {"name": "rowwise_adagrad", "lr": 0.1, "weight_decay": 0.01, "initial_accumulator": 0.1, "schedule": WARM_UP},
    {"name": "adam", "lr": 0.01, "weight_decay": 0.01, "schedule": WARM_UP},
    {"name": "adam", "lr": 0.01, "eps": 0.1, "eps_after_correction": True},
    {"name": "partial_rowwise_adam", "lr": 0.01},
    {"name": "partial_rowwise_adam", "lr": 0.01, "eps": 0.1, "weight_decay": 0.01, "schedule": WARM_UP},
    {"name": "lars_sgd", "lr": 10.0},
    {"name": "lars_sgd", "lr": 50.0, "eta": 0.002, "momentum": 0.5, "weight_decay": 3.0, "schedule": WARM_UP},
    {"name": "lamb", "lr": 0.01},
    {"name": "lamb", "lr": 0.05, "betas": (0.8, 0.99), "eps": 0.1, "weight_decay": 0.5, "schedule": WARM_UP},
    {"name": "ftrl", "lr": 0.1},
    {"name": "ftrl", "lr": 0.1, "beta": 0.5, "l1": 0.3, "l2": 0.1},
    {"name": "ftrl", "lr": 0.1, "l2": 0.1, "schedule": WARM_UP},
]


SUMMED = [c for c in CONFIGS if c["name"] in {"adagrad", "adam", "lamb", "ftrl"}]
PARTIAL = {"name": "partial_rowwise_adam", "lr": 0.01}
SPARSE = [(config, False) for config in CONFIGS] + [(config, True) for config in [*SUMMED, PARTIAL]]


@every(("case", "dim"), zip(SPARSE, itertools.cycle([1, 7, 16])))
def test_fifty_sparse_steps_agree_with_the_formula_in_float64(case: tuple[dict[str, Any], bool], dim: int) -> None:
    """A sum of gradients is squared as its parts were: an element's root is its share of the row's mean square."""
    config, summed = case
    table = make_table(config, dim)
    c = table.spec.optimizer
    weights = table.pull(all_ids()).astype(np.float64)
    slots = {i: new_slots(c, dim) for i in range(NUM_IDS)}
    for step, (ids, grad) in enumerate(random_steps(11, dim)):
        squares = np.random.default_rng(step).uniform(0.1, 9.0, ids.size).astype(np.float32)
        if summed:
            update(table, ids, grad, squares, step)
        else:
            table.apply(ids, grad, step=step)
        rate = c.lr * c.schedule.factor(step)
        for id_, g, square in zip(ids.tolist(), grad.astype(np.float64), squares.tolist(), strict=True):
            root = g * math.sqrt(square * dim / (g @ g)) if summed else g
            weights[id_] = FORMULAS[c.name](c, step, rate, weights[id_], g, root, slots[id_])
    assert_close(table.pull(all_ids()), weights, 1e-5 if summed else 1e-6)


@every("size", [1e-5, 1e-22, 0.0])
@every("name", ["adagrad", "adam", "lamb", "ftrl"])
def test_gradients_that_cancel_leave_the_squares_of_their_parts_and_nothing_more(name: str, size: float) -> None:
    decay = {} if name in ("ftrl", "lamb") else {"weight_decay": 0.5}
    table = make_table({"name": name, "lr": 0.1, **decay})
    ids, weights = all_ids(), table.pull(all_ids())
    squares = np.full(ids.size, 1e-4, np.float32)
    update(table, ids, np.full((ids.size, DIM), size, np.float32), squares, 0)
    _, after, slots_NS = exported(table)
    shrunk = np.abs(weights) * decay.get("weight_decay", 0.0)
    found = slots_NS[:, :DIM] if name == "adagrad" else slots_NS[:, DIM:]
    blend = {"adam": 0.001, "lamb": 0.001}.get(name, 1.0)
    assert np.isfinite(after).all()
    assert (np.abs(found / blend - 1e-4 - shrunk**2) <= 2 * 1e-2 * shrunk + 1e-6).all()  # the binomial's third term


def test_where_gradients_or_rows_are_zeros() -> None:
    zeros, ones = np.zeros((NUM_IDS, DIM), np.float32), np.ones((NUM_IDS, DIM), np.float32)
    for name in ("lars_sgd", "lamb"):  # the norm of a row of zeros scales the step
        for init in ("zeros", {"name": "constant", "value": 0.0}):
            with pytest.raises(ValueError, match=f"optimizer.name: {name}, which keeps rows of zeros"):
                TableSpec(name="t", dim=DIM, optimizer={"name": name}, init=init)
    for name in ("adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "lamb"):
        table = make_table({"name": name, "eps": 0.0})
        before = table.pull(all_ids())
        table.apply(all_ids(), zeros, step=0)
        assert (table.pull(all_ids()) == before).all()

    table = make_table({"name": "lars_sgd", "lr": 10.0})  # momentum alone moves a row
    before = table.pull(all_ids())
    table.apply(all_ids(), zeros, step=0)
    assert (table.pull(all_ids()) == before).all()
    table.apply(all_ids(), ones, step=1)
    once = table.pull(all_ids())
    table.apply(all_ids(), zeros, step=2)
    assert np.allclose(table.pull(all_ids()) - once, 0.9 * (once - before), rtol=1e-4, atol=1e-7)

    table = make_table({"name": "ftrl", "l1": 5.0})  # makes exact zeros
    table.apply(all_ids(), 0.1 * ones, step=0)
    assert (table.pull(all_ids()) == 0.0).all()
