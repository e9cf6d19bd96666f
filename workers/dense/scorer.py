"""Scorer: a dense model that only scores. No optimizer, no ranks; the arithmetic is that of the tower's evaluation."""

# B = batch, I = dense columns, D = embedding dim, T = labels

from __future__ import annotations

import torch
from torch import nn

from shardkeep.workers.config import TowerConfig
from shardkeep.workers.dense.amp import MixedPrecision
from shardkeep.workers.dense.cpu import onednn
from shardkeep.workers.dense.cpu.few_rows import FewRows


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
        onednn.use_for_inference(self.model, device)

    def predict(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
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
