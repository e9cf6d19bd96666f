"""Linear layers with the initial values that a model names."""

# I = inputs, O = outputs

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn


def linear(inputs: int, outputs: int, *, bias: bool = True, init: str = "dlrm") -> nn.Linear:
    """A Linear with initial values by name.

    Args:
        init: A key of `INITS`. `dlrm` also draws the bias, from N(0, 1 / O); the others set it to 0.
    """
    layer = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        INITS[init](layer.weight)
        if bias and init == "dlrm":
            layer.bias.normal_(0.0, math.sqrt(1.0 / outputs))
        elif bias:
            layer.bias.zero_()
    return layer


def _dlrm(weight_OI: torch.Tensor) -> torch.Tensor:
    """N(0, 2 / (I + O)), as the DLRM reference (arXiv:1906.00091)."""
    return weight_OI.normal_(0.0, math.sqrt(2.0 / sum(weight_OI.shape)))


def _kaiming_uniform(weight_OI: torch.Tensor) -> torch.Tensor:
    """U(-a, a) with a = sqrt(6 / I) (He et al., arXiv:1502.01852)."""
    return nn.init.kaiming_uniform_(weight_OI, nonlinearity="relu")


INITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dlrm": _dlrm,
    "xavier_normal": nn.init.xavier_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "kaiming_uniform": _kaiming_uniform,
}
"""Of weights (O, I), in place. Xavier: Glorot and Bengio, AISTATS 2010."""
