"""Compression of the tower's gradient between workers: one rank's forms and state. Knows no network and no DDP.

A sum is a generator (`exchange.py`) that the training side drives. A step's changes count after `settle` only.
"""

# N = values of some parameters

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from shardkeep.compression.config import TowerCompressionConfig
from shardkeep.compression.tower.exchange import Ranks, Sum
from shardkeep.compression.tower.formats import BF16, FP16, FP32, INT8
from shardkeep.compression.tower.forms import Rounded, TopK
from shardkeep.compression.tower.lossless import Lossless
from shardkeep.compression.tower.powersgd import PowerSGD
from shardkeep.compression.tower.residuals import Residuals, merge_residuals


class DenseForm(Protocol):
    """A way to add gradients over ranks."""

    def sum(self, names: Sequence[str], grads: Sequence[torch.Tensor], ranks: Ranks) -> Sum:
        """The sum over ranks of some parameters' gradients (float32), flat, one after the other. Every rank gives the
        same parameters in the same order; which ones are summed together changes no bit of it."""
        ...


VALUES = {"fp16": FP16, "int8": INT8}


def _powersgd(config: TowerCompressionConfig, dense: DenseCompression) -> PowerSGD:
    fmt = VALUES[config.values] if config.values else FP32
    return PowerSGD(config.rank or 2, fmt, dense.shapes, dense.keep_residuals(), dense.device)


def _topk(config: TowerCompressionConfig, dense: DenseCompression) -> TopK:
    return TopK(config.keep or 0.01, VALUES[config.values or "fp16"], dense.keep_residuals())


FORMS: dict[str, Callable[[TowerCompressionConfig, DenseCompression], DenseForm]] = {
    "none": lambda _, dense: Rounded(FP32, dense.num_values),
    "lossless": lambda _, dense: Lossless(dense.num_values),
    "bf16": lambda _, dense: Rounded(BF16, dense.num_values),
    "fp16": lambda _, dense: Rounded(FP16, dense.num_values),
    "int8": lambda _, dense: Rounded(INT8, dense.num_values, dense.keep_residuals()),
    "topk": _topk,
    "powersgd": _powersgd,
}


class DenseCompression:
    """One rank's compression of the dense gradient.

    Every rank makes the same calls in each step: `begin`, `sum` for all parameters (in one or more groups, each once),
    `settle`.

    Args:
        shapes: of the parameters, by name.
        device: where gradients are.
    """

    def __init__(
        self, config: TowerCompressionConfig, shapes: Mapping[str, tuple[int, ...]], device: torch.device
    ) -> None:
        self.shapes = shapes
        self.device = device
        self.num_values: int = sum(torch.Size(shape).numel() for shape in shapes.values())
        self._warmup_steps = config.warmup_steps or 0
        self._warming = False
        self._residuals: Residuals | None = None
        self._form = FORMS[config.name](config, self)
        self._first = Rounded(FP16, self.num_values, self._residuals)

    def keep_residuals(self) -> Residuals:
        """Has this rank keep what is not sent; a form that does so asks for it when it is made."""
        sizes = {name: torch.Size(shape).numel() for name, shape in self.shapes.items()}
        self._residuals = Residuals(sizes, self.device)
        return self._residuals

    def begin(self, step: int, scale: float = 1.0) -> None:
        """Begins step `step` of the job, whose gradients are multiplied by the loss scale `scale`. What a step before
        left unsettled is forgotten."""
        self.settle(applied=False)
        self._warming = step < self._warmup_steps
        if self._residuals is not None:
            self._residuals.scale = scale

    def sum(self, names: Sequence[str], grads: Sequence[torch.Tensor], ranks: Ranks) -> Sum:
        """The sum over ranks of the gradients of the parameters `names`, flat in their order, float32. NaN somewhere
        on all ranks where a gradient of any rank is not finite."""
        form = self._first if self._warming else self._form
        return form.sum(names, [grad.detach().float() for grad in grads], ranks)

    def settle(self, applied: bool) -> None:
        """Ends the step: if the dense update was made, what was sent is sent; else residuals stay what they were."""
        for part in (self._residuals, self._form):
            if isinstance(part, Residuals | PowerSGD):
                part.settle(applied)

    @property
    def unsent_norm(self) -> float | None:
        """L2 norm of what this rank has not sent yet; None where nothing is kept."""
        return None if self._residuals is None else self._residuals.norm

    # State.

    def state_dict(self) -> dict[str, Any]:
        """What is the same on all ranks; live tensors."""
        return {"guesses": self._form.state_dict()} if isinstance(self._form, PowerSGD) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a copy; residuals become zero. Raises ValueError when it does not fit."""
        if isinstance(self._form, PowerSGD):
            self._form.load_state_dict(state.get("guesses", {}))
        self.load_local_state_dict({})

    def local_state_dict(self) -> dict[str, Any]:
        """What belongs to this rank only; live tensors. {} where nothing is kept."""
        return {} if self._residuals is None else {"residuals": self._residuals.state_dict()}

    def load_local_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a copy of a rank's state, or of several ranks' merged; {} = no residual. Raises ValueError when it
        does not fit."""
        if self._residuals is not None:
            self._residuals.load_state_dict(state.get("residuals", {}))


def merge_local(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the local states of several ranks by adding residuals, for a job that continues with other ranks."""
    residuals = merge_residuals(state.get("residuals", {}) for state in states)
    return {"residuals": residuals} if residuals else {}
