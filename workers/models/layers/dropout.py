"""Dropout (Srivastava et al., JMLR 2014)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

_LEVELS = 1 << 16
"""Numbers that an element's draw can be."""


class Dropout(nn.Module):
    """Sets a share of the values to 0 in training and scales the others up, as torch.nn.Dropout.

    On a CPU torch draws a double for each value, which takes a tenth of a small tower's step. Here 16 bits decide, so
    the share there is a multiple of 1/65,536.

    Args:
        share: In [0, 1).
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Values of the same shape and type."""
        if not self.training or not self.share:
            return x
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.dropout(x, self.share)
        dropped = min(round(self.share * _LEVELS), _LEVELS - 1)
        draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(1 << 63), None)  # all bits
        kept = draws.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - _LEVELS // 2
        return x * kept.to(x.dtype).mul_(_LEVELS / (_LEVELS - dropped))
