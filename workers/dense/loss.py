"""The losses of the dense tower, by name.

To add one, write a function like `bce` and name it in `LOSSES`.
"""

# B = batch, T = labels

from __future__ import annotations

from types import MappingProxyType
from typing import Protocol

import torch
import torch.nn.functional as F


class Loss(Protocol):
    """A loss of a micro-batch."""

    def __call__(self, logits_BT: torch.Tensor, label_BT: torch.Tensor) -> torch.Tensor:
        """The sum over samples and labels, a scalar of float32 with a graph. Both inputs are float32 (B, T)."""
        ...


def bce(logits_BT: torch.Tensor, label_BT: torch.Tensor) -> torch.Tensor:
    """Binary cross entropy of logits against labels in [0, 1]."""
    return F.binary_cross_entropy_with_logits(logits_BT, label_BT, reduction="sum")


LOSSES = MappingProxyType[str, Loss]({"bce": bce})
