"""Scorer: a dense model that only scores. No optimizer, no ranks; the arithmetic is that of the tower's evaluation.

FewRows is for batches of a few rows: other modules over the same parameters, which cost less a call. oneDNN's operator
takes 15 µs a call, however small its matrices are; torch's own product takes 3. Its scores differ by less than 1e-6, so
only a server takes this form.
"""

# B = batch, I = dense columns, O = outputs, D = embedding dim, T = labels

from __future__ import annotations

import copy
import functools
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardkeep.workers.config import TowerConfig
from shardkeep.workers.dense import onednn
from shardkeep.workers.dense.amp import MixedPrecision
from shardkeep.workers.embeddings.inputs import Inputs


class Scorer:
    """Scores with a model, in eval mode, whose parameters no longer change.

    Args:
        model: `forward(dense_BI, embeddings) -> logits_BT`; moved to `device`, and from then on owned by the scorer.
        config: Chooses mixed precision and linear layers, as it does for training.
    """

    def __init__(self, model: nn.Module, config: TowerConfig, device: torch.device) -> None:
        self.model = model.to(device).eval()
        self.device = device
        self._precision = MixedPrecision(config.amp, device, self.model)
        onednn.choose(config.linear, self.model, device, amp=self._precision.chosen.dtype is not None)
        onednn.use_for_inference(self.model)

    def predict(self, dense_BI: torch.Tensor, embeddings: Inputs) -> torch.Tensor:
        """Logits (B, T) in float32 without gradients, with the bits of `Tower.predict`."""
        with torch.inference_mode(), self._precision.autocast():
            logits_BT: torch.Tensor = self.model(dense_BI, embeddings)
            return logits_BT.float()

    def for_few_rows(self) -> FewRows | None:
        """A form of the model that is faster for a few rows and may differ in the last bits; None = there is none."""
        if self.device.type != "cpu" or self._precision.chosen.dtype is not None:
            return None
        try:
            return FewRows(self.model)
        except Exception:  # a model of the user's own may refuse to be copied
            return None


class FewRows:
    """Scores on the CPU, in float32, with a model in eval mode whose parameters no longer change.

    Raises any exception where the model is the user's own and refuses to be copied."""

    def __init__(self, model: nn.Module) -> None:
        shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
        self._model = copy.deepcopy(model, shared)
        self.device = torch.device("cpu")
        for layer in self._model.modules():
            if type(layer) is nn.Linear:
                layer.forward = functools.partial(_linear, layer.weight, layer.bias)  # type: ignore[method-assign]
        for block in self._model.modules():
            if type(block) is nn.Sequential and [type(layer) for layer in block] == [nn.Linear, nn.ReLU]:
                linear: Any = block[0]
                block.forward = functools.partial(_hidden, linear.weight, linear.bias)  # type: ignore[method-assign]

    def predict(self, dense_BI: torch.Tensor, embeddings: Inputs) -> torch.Tensor:
        """Logits (B, T) in float32 without gradients."""
        with torch.inference_mode():
            logits_BT: torch.Tensor = self._model(dense_BI, embeddings)
            return logits_BT


def _linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None, inputs: torch.Tensor) -> torch.Tensor:
    return F.linear(inputs, weight_OI, bias_O)


def _hidden(weight_OI: torch.Tensor, bias_O: torch.Tensor | None, inputs: torch.Tensor) -> torch.Tensor:
    return F.linear(inputs, weight_OI, bias_O).relu_()
