"""The dense model's optimizer, by its config."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import nn

from shardkeep.base.errors import UserError
from shardkeep.workers.config import TowerOptimizerConfig

_NORMS = 16
"""Steps whose mean gradient residuals are compared with: one alone may be an unusual one."""


def build_optimizer(config: TowerOptimizerConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch.optim's SGD, Adam or AdamW, fused; the rate is set again before each step."""
    if not parameters:
        raise UserError("the model has no trainable parameters")
    if config.name == "sgd":
        return torch.optim.SGD(
            parameters, lr=config.lr, momentum=config.momentum or 0.0, weight_decay=config.weight_decay, fused=True
        )
    kind: type[torch.optim.Adam] = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(
        parameters,
        lr=config.lr,
        betas=config.betas or (0.9, 0.999),
        eps=1e-8 if config.eps is None else config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


class DenseOptimizer:
    """torch's optimizer with the config's schedule and clipping.

    Args:
        clip_norm: Largest norm of the summed gradient, None = no clipping.
        over_ranks: Makes the norm of these parameters' gradients that of all, where the other ranks have others.
    """

    def __init__(
        self,
        config: TowerOptimizerConfig,
        parameters: list[nn.Parameter],
        *,
        clip_norm: float | None,
        over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda norm: norm,
    ) -> None:
        self.torch = build_optimizer(config, parameters)
        self.parameters = parameters
        self._config = config
        self._clip_norm, self._over_ranks = clip_norm, over_ranks
        self._norms: deque[float] = deque(maxlen=_NORMS)

    def of_parts(
        self, parameters: list[nn.Parameter], over_ranks: Callable[[torch.Tensor], torch.Tensor]
    ) -> DenseOptimizer:
        """One of other parameters, without a state, that goes by the same config."""
        return DenseOptimizer(self._config, parameters, clip_norm=self._clip_norm, over_ranks=over_ranks)

    @property
    def mean_norm(self) -> float:
        """Of the last steps' summed gradients; 0 = this process made no step."""
        return sum(self._norms) / max(1, len(self._norms))

    def apply(self, step: int, lr_factor: float = 1.0) -> float:
        """Clips and makes one step; none where the gradient is not finite. Returns its norm before clipping."""
        own = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        grad_norm = float(norm := self._over_ranks(own))
        if not math.isfinite(grad_norm):
            return grad_norm
        if self._clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self._clip_norm, norm)
        rate = self._config.lr * lr_factor * self._config.schedule.factor(step)
        for group in self.torch.param_groups:
            group["lr"] = rate
        self.torch.step()
        self._norms.append(grad_norm)
        return grad_norm
