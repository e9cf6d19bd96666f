"""The losses of the dense tower.

To add one, write a function like `bce` and name it in `LOSSES` and in `LossConfig` in workers/config.py.
"""

# B = batch, T = labels

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from shardkeep.workers.config import LOSSES, LossConfig


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
    return _summed(partial(F.binary_cross_entropy_with_logits, logits_BT, label_BT), factors_B)


def mse(logits_BT: torch.Tensor, label_BT: torch.Tensor, factors_B: torch.Tensor | None = None) -> torch.Tensor:
    """Squared error of outputs against labels: they are values, not logits."""
    return _summed(partial(F.mse_loss, logits_BT, label_BT), factors_B)


def huber(
    logits_BT: torch.Tensor, label_BT: torch.Tensor, factors_B: torch.Tensor | None = None, *, delta: float = 1.0
) -> torch.Tensor:
    """Of outputs against labels: half the squared error up to `delta`, above it delta times (the absolute error less
    half of delta)."""
    return _summed(partial(F.huber_loss, logits_BT, label_BT, delta=delta), factors_B)


def _summed(loss: Callable[..., torch.Tensor], factors_B: torch.Tensor | None) -> torch.Tensor:
    if factors_B is None:
        return loss(reduction="sum")
    return (loss(reduction="none") * factors_B[:, None]).sum()


def loss_of(config: LossConfig) -> Loss:
    """The loss that a config names."""
    loss = LOSSES[config.name]
    options = config.model_dump(include={*loss.config}, exclude_none=True)
    return partial(loss.load(), **options) if options else loss.load()
