"""The registry of row optimizers: slots per row, initial slot, kernel, and the scalars of a step.

To add one, write a module with its kernel and its scalars here, and a line in `OPTIMIZERS`.

| name | follows | eps | first slot value | weight decay | bias correction | schedule |
|---|---|---|---|---|---|---|
| sgd | torch.optim.SGD | - | - | L2, touched rows | - | on lr |
| adagrad | torch.optim.Adagrad | outside the root | initial_accumulator | L2, touched rows | - | on lr |
| rowwise_adagrad | FBGEMM exact row-wise | outside the root | initial_accumulator | L2, touched rows | - | on lr |
| adam | torch.optim.SparseAdam | outside the root, uncorrected | 0 | L2, touched rows | by the job's step + 1 | on lr |
| ftrl | McMahan et al. 2013, Algorithm 1 | beta | z = n = 0 | l2 of the paper | - | on the gradient in z |
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.ps.config import AdagradConfig, AdamConfig, FtrlConfig, RowwiseAdagradConfig, SgdConfig

AnyConfig = SgdConfig | AdagradConfig | RowwiseAdagradConfig | AdamConfig | FtrlConfig
Scalars = tuple[float, ...]


@dataclass(frozen=True)
class RowOptimizer:
    """How one kind of optimizer changes rows."""

    kernels: str
    """The module of its kernel, in which `update` is the kernel; imported by the tables that it changes."""
    num_slots: Callable[[int], int]
    """Slots of a row of `dim` values."""
    scalars: Callable[[Any, int], Scalars]
    """What the kernel is told for a step, from (config, step)."""
    initial_slot: Callable[[Any], float] = lambda _config: 0.0
    """Value of every slot of a new row."""


@functools.cache
def code_address(name: str) -> int:
    """The address of the machine code of an optimizer's kernel, for `table_kernels`."""
    module = importlib.import_module(OPTIMIZERS[name].kernels)
    (compiled,) = module.update.overloads.values()
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))


def step_scalars(config: AnyConfig, step: int) -> npt.NDArray[np.float32]:
    """The scalars of a step as the kernel takes them."""
    return np.array(OPTIMIZERS[config.name].scalars(config, step), dtype=np.float32)


def _rate(config: AnyConfig, step: int) -> float:
    return config.lr * config.schedule.factor(step)


def _sgd(config: SgdConfig, step: int) -> Scalars:
    return _rate(config, step), config.weight_decay


def _adagrad(config: AdagradConfig | RowwiseAdagradConfig, step: int) -> Scalars:
    return _rate(config, step), config.weight_decay, config.eps


def _adam(config: AdamConfig, step: int) -> Scalars:
    beta1, beta2 = config.betas
    t = step + 1
    rate = _rate(config, step) * math.sqrt(1.0 - beta2**t) / (1.0 - beta1**t)
    return rate, config.weight_decay, config.eps, 1.0 - beta1, 1.0 - beta2


def _ftrl(config: FtrlConfig, step: int) -> Scalars:
    return 1.0 / config.lr, config.beta, config.l1, config.l2, config.schedule.factor(step)


def _initial_accumulator(config: AdagradConfig | RowwiseAdagradConfig) -> float:
    return config.initial_accumulator


_PLACE = "shardkeep.ps.shard.table.optimizers"
OPTIMIZERS: dict[str, RowOptimizer] = {
    "sgd": RowOptimizer(f"{_PLACE}.sgd_kernels", lambda dim: 0, _sgd),
    "adagrad": RowOptimizer(f"{_PLACE}.adagrad_kernels", lambda dim: dim, _adagrad, _initial_accumulator),
    "rowwise_adagrad": RowOptimizer(
        f"{_PLACE}.rowwise_adagrad_kernels",
        lambda dim: 1,
        _adagrad,
        _initial_accumulator,
    ),
    "adam": RowOptimizer(f"{_PLACE}.adam_kernels", lambda dim: 2 * dim, _adam),
    "ftrl": RowOptimizer(f"{_PLACE}.ftrl_kernels", lambda dim: 2 * dim, _ftrl),
}
