"""Hidden layers: linear layers and their initial values, the options that all stock models share, and the multilayer
perceptron."""

# B = batch, I = inputs, O = outputs

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkeep.workers.dense.amp import ENDS
from shardkeep.workers.models.layers.axes import laid_out
from shardkeep.workers.models.layers.dropout import Dropout
from shardkeep.workers.models.layers.norms import BatchNorm, Dice, Statistics

NORMS: dict[str, Callable[[int], nn.Module]] = {"batch": BatchNorm, "layer": nn.LayerNorm}
ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda _: nn.ReLU(inplace=True),  # in place: 1 % of the tower
    "gelu": lambda _: nn.GELU(),
    "prelu": lambda width: nn.PReLU(width, init=0.1),
    "dice": Dice,
}


def linear(inputs: int, outputs: int, *, bias: bool = True, init: str = "dlrm") -> nn.Linear:
    """A Linear with initial values by name.

    Args:
        init: A key of `INITS`. `dlrm` also draws the bias, from N(0, 1 / O); the others set it to 0.
    """
    layer = nn.Linear(inputs, outputs, bias=bias)
    laid_out(layer.weight, outputs, inputs, inputs=1)
    if bias:
        laid_out(layer.bias, outputs)
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


@dataclass(frozen=True)
class HiddenOptions:
    """How a model's hidden layers are made; the defaults are those of the DLRM reference.

    Attributes:
        norm: none, or a key of `NORMS`.
        activation: A key of `ACTIVATIONS`.
        dropout: Share of the activations that are set to 0 in training.
        init: Initial values of all linear layers, a key of `INITS`.
        checkpointing: Keep only the inputs of each hidden layer for the backward pass and compute the rest again.
        bias: Whether hidden layers have one.
        outputs: Of the last layer: one for each label.
    """

    norm: str = "none"
    activation: str = "relu"
    dropout: float = 0.0
    init: str = "dlrm"
    checkpointing: bool = False
    bias: bool = True
    outputs: int = 1

    def linear(self, inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
        """A Linear with these initial values."""
        return linear(inputs, outputs, bias=bias, init=self.init)

    def output(self, inputs: int, outputs: int | None = None, *, bias: bool = True) -> nn.Linear:
        """A Linear that ends a model: with AMP it computes in float32. `outputs`: None = one for each label."""
        layer = self.linear(inputs, self.outputs if outputs is None else outputs, bias=bias)
        vars(layer)[ENDS] = "forward"
        return layer

    def block(self, inputs: int | None, width: int) -> nn.Sequential:
        """Linear, norm, activation, dropout, in FuxiCTR's order; without `inputs` there is no linear layer."""
        layers: list[nn.Module] = [] if inputs is None else [self.linear(inputs, width, bias=self.bias)]
        if self.norm != "none":
            layers.append(NORMS[self.norm](width))
        layers.append(ACTIVATIONS[self.activation](width))
        if self.dropout:
            layers.append(Dropout(self.dropout))
        measures = any(isinstance(layer, _MEASURING) for layer in layers)
        return _Measured(*layers) if measures else nn.Sequential(*layers)


_MEASURING = (BatchNorm, Dice)


class _Measured(nn.Sequential):
    """A block with layers that measure the batch. Gives its output and their statistics, in the layers' order."""

    def forward(self, x_BI: torch.Tensor) -> tuple[torch.Tensor, list[Statistics]]:
        measured: list[Statistics] = []
        for layer in self:
            if isinstance(layer, _MEASURING):
                x_BI, statistics = layer(x_BI)
                measured.append(statistics)
            else:
                x_BI = layer(x_BI)
        return x_BI, measured

    def observe(self, measured: list[Statistics]) -> None:
        layers = [layer for layer in self if isinstance(layer, _MEASURING)]
        for layer, statistics in zip(layers, measured, strict=True):
            layer.observe(statistics)


class Mlp(nn.Module):
    """One hidden layer for each width. `out_width` is the width of the result.

    Without `inputs` the caller makes the product of the first layer, which has its width."""

    def __init__(self, inputs: int | None, widths: Sequence[int], options: HiddenOptions) -> None:
        super().__init__()
        ends = [inputs, *widths]
        self.blocks = nn.ModuleList(options.block(ends[i], width) for i, width in enumerate(widths))
        self.out_width = ends[-1] or 0
        self.checkpointing = options.checkpointing

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        recomputed = self.checkpointing and self.training
        for block in self.blocks:
            result = checkpoint(block, x_BI, use_reentrant=False) if recomputed else block(x_BI)
            if isinstance(block, _Measured):
                x_BI, measured = result
                block.observe(measured)
            else:
                x_BI = result
        return x_BI
