"""The losses of the dense tower, by name.

To add one, write a function like `bce` and name it in `LOSSES` and in `LossConfig`.
"""

# B = batch, T = labels

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch
import torch.nn.functional as F

from shardkeep.workers.config import LossConfig


class Loss(Protocol):
    """A loss of a micro-batch."""

    def __call__(
        self, logits_BT: torch.Tensor, label_BT: torch.Tensor, factors_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The sum over samples and labels, a scalar of float32 with a graph. All inputs are float32.

        Args:
            factors_B: Multiplies each sample's loss; None = all 1.
        """
        ...


def bce(logits_BT: torch.Tensor, label_BT: torch.Tensor, factors_B: torch.Tensor | None = None) -> torch.Tensor:
    """Binary cross entropy of logits against labels in [0, 1]."""
    if factors_B is None:
        return F.binary_cross_entropy_with_logits(logits_BT, label_BT, reduction="sum")
    return _weighted(F.binary_cross_entropy_with_logits(logits_BT, label_BT, reduction="none"), factors_B)


def mse(logits_BT: torch.Tensor, label_BT: torch.Tensor, factors_B: torch.Tensor | None = None) -> torch.Tensor:
    """Squared error of outputs against labels: they are values, not logits."""
    if factors_B is None:
        return F.mse_loss(logits_BT, label_BT, reduction="sum")
    return _weighted(F.mse_loss(logits_BT, label_BT, reduction="none"), factors_B)


def huber(
    logits_BT: torch.Tensor, label_BT: torch.Tensor, factors_B: torch.Tensor | None = None, *, delta: float = 1.0
) -> torch.Tensor:
    """Of outputs against labels: half the squared error up to `delta`, above it delta times (the absolute error less
    half of delta)."""
    if factors_B is None:
        return F.huber_loss(logits_BT, label_BT, reduction="sum", delta=delta)
    return _weighted(F.huber_loss(logits_BT, label_BT, reduction="none", delta=delta), factors_B)


def _weighted(loss_BT: torch.Tensor, factors_B: torch.Tensor) -> torch.Tensor:
    return (loss_BT * factors_B[:, None]).sum()


LOSSES = MappingProxyType[str, Loss]({"bce": bce, "mse": mse, "huber": huber})


def loss_of(config: LossConfig) -> Loss:
    """The loss that a config names."""
    loss = LOSSES[config.name]
    return loss if config.delta is None else partial(huber, delta=config.delta)
