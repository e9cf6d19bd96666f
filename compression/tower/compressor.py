"""Compression of the tower's gradient between workers: one rank's forms and state. Knows no network and no DDP.

A sum is a generator (`exchange.py`) that the training side drives. A step's changes count after `settle` only.
"""

# N = values of some parameters

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from shardkeep.compression.config import FORMS, TowerCompressionConfig
from shardkeep.compression.tower.exchange import DenseForm, Ranks, Sum
from shardkeep.compression.tower.formats import FP16
from shardkeep.compression.tower.forms import Rounded, num_values
from shardkeep.compression.tower.residuals import Residuals, merge_residuals


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
        self.num_values = num_values(shapes)
        self._warmup_steps = config.warmup_steps or 0
        self._warming = False
        residuals = Residuals({name: torch.Size(shape).numel() for name, shape in shapes.items()}, device)
        self._form: DenseForm = FORMS[config.name].load()(config, shapes, residuals)
        self._residuals = residuals if self._form.has_residual else None
        self._first = Rounded(FP16, self.num_values, self._residuals)

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
        self._form.settle(applied)
        if self._residuals is not None:
            self._residuals.settle(applied)

    @property
    def unsent_norm(self) -> float | None:
        """L2 norm of what this rank has not sent yet; None where nothing is kept."""
        return None if self._residuals is None else self._residuals.norm

    # State.

    def state_dict(self) -> dict[str, Any]:
        """What is the same on all ranks; live tensors."""
        return self._form.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a copy; residuals become zero. Raises ValueError when it does not fit."""
        self._form.load_state_dict(state)
        self.load_local_state_dict({})

    def local_state_dict(self) -> dict[str, Any]:
        """What belongs to this rank only: the gradient that is not sent yet. Live tensors; {} where nothing is kept."""
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
