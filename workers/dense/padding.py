"""Padding: linear layers that multiply in widths of whole multiples, by zeros beside their inputs and weights.

Libraries and tensor cores are slower at other widths. Parameters keep their shapes: no checkpoint, export or optimizer
sees a zero, and autograd cuts off the gradients of zeros."""

# B = batch, I = inputs, O = outputs

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from shardkeep.workers.dense import onednn


def use_for(model: nn.Module, multiple: int) -> str:
    """Pads every `nn.Linear` of a model, after `onednn.use_for`; how many there are, as one line.

    Without gradients nothing is padded, so that scores have the bits of a `Scorer`."""
    layers = [(layer, product, lacking(layer, multiple)) for layer, product in onednn.layers_of(model)]
    narrow = [each for each in layers if any(each[2])]
    for layer, product, lacks in narrow:
        layer.forward = partial(_forward, layer, product, lacks)  # type: ignore[method-assign]
    return f"{multiple}: pads {len(narrow)} of {len(layers)} linear layers"


def lacking(layer: nn.Linear, multiple: int) -> tuple[int, int]:
    """The columns that inputs and outputs of a layer lack to a multiple. A width below it lacks none: a layer of one
    output would compute `multiple` of them."""
    inputs, outputs = (-n % multiple if n > multiple else 0 for n in (layer.in_features, layer.out_features))
    return inputs, outputs


def _forward(
    layer: nn.Linear, product: Callable[..., torch.Tensor], lacks: tuple[int, int], x_BI: torch.Tensor
) -> torch.Tensor:
    inputs, outputs = lacks
    if not torch.is_grad_enabled():
        return onednn.linear(x_BI, layer.weight, layer.bias)
    weight_OI = F.pad(layer.weight, (0, inputs, 0, outputs))
    bias_O = layer.bias if layer.bias is None or not outputs else F.pad(layer.bias, (0, outputs))
    y_BO = product(F.pad(x_BI, (0, inputs)) if inputs else x_BI, weight_OI, bias_O)
    return y_BO[..., : layer.out_features] if outputs else y_BO
