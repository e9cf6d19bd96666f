"""Scorer: a dense model that only scores. No optimizer, no ranks; the arithmetic is that of the tower's evaluation."""

# B = batch, I = dense columns, D = embedding dim, T = labels

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardkeep.workers.config import TowerConfig
from shardkeep.workers.dense.amp import MixedPrecision
from shardkeep.workers.dense.cpu import onednn


class Scorer:
    """Scores with a model, in eval mode, whose parameters no longer change.

    Args:
        model: `forward(dense_BI, embeddings) -> logits_BT`; moved to `device`, and from then on owned by the scorer.
        config: Chooses mixed precision and linear layers, as it does for training.
    """

    def __init__(self, model: nn.Module, config: TowerConfig, device: torch.device) -> None:
        self.model = model.to(device).eval()
        self.device = device
        self._precision = MixedPrecision(config.amp, device)
        onednn.choose(config.linear, self.model, device, amp=self._precision.chosen.dtype is not None)
        self._layers = onednn.plain_layers(self.model)

    def predict(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, T) in float32 without gradients, with the bits of `Tower.predict`."""
        return scored(self.model, self._precision, self._layers, dense_BI, embeddings)


def scored(
    model: nn.Module,
    precision: MixedPrecision,
    layers: Sequence[nn.Linear],
    dense_BI: torch.Tensor,
    embeddings: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Logits (B, T) in float32 of a model in eval mode. `layers`: what `onednn.plain_layers` finds in it."""
    with torch.inference_mode(), precision.autocast(), onednn.rows_alone(layers):
        logits_BT: torch.Tensor = model(dense_BI, embeddings)
        return logits_BT.float()
