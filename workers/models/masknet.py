"""MaskNet: hidden layers whose inputs are multiplied by masks made of the embeddings."""

# B = batch, T = labels, I = dense columns, X = width of the joined input, H = width of the masked input

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from shardkeep.workers.model_config import MaskConfig
from shardkeep.workers.models.layers.axes import ByInput
from shardkeep.workers.models.layers.hidden import HiddenOptions, Mlp
from shardkeep.workers.models.layers.inputs import Concat

_BLOCKS, _DIM = 3, 64


class MaskNet(nn.Module):
    """MaskNet (Wang et al., arXiv:2102.07619), of embeddings of any dims, normalized each; dense columns as they are.

    serial: a block for each width of `hidden`, each on the output of the one before. parallel: `mask.blocks` blocks
    of `mask.dim` on the embeddings, then an MLP of `hidden` over their outputs.
    """

    def __init__(
        self,
        *,
        num_dense: int,
        features: Mapping[str, int],
        structure: str,
        mask: MaskConfig,
        hidden: Sequence[int],
        options: HiddenOptions,
    ) -> None:
        super().__init__()
        self.joined = Concat(num_dense, features)
        self.norms = ByInput({name: nn.LayerNorm(int(width)) for name, width in features.items()})
        width, self.parallel = self.joined.out_width, structure == "parallel"
        ends = [width, *hidden]
        if self.parallel:
            count, dim = mask.blocks or _BLOCKS, mask.dim or _DIM
            self.blocks = nn.ModuleList(MaskBlock(width, width, dim, mask, options) for _ in range(count))
            self.top = Mlp(dim * count, hidden, options)
        else:
            self.blocks = nn.ModuleList(MaskBlock(width, ends[k], out, mask, options) for k, out in enumerate(hidden))
            self.top = Mlp(ends[-1], [], options)
        self.logit = options.output(self.top.out_width)

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, T) of dense columns (B, I) and pooled embeddings (B, dim of the feature)."""
        joined_BX = self.joined(dense_BI, embeddings)
        vectors = (norm(embeddings[name]) for name, norm in zip(self.joined.names, self.norms, strict=True))
        x_BH = torch.cat([dense_BI, *vectors], dim=1)
        if self.parallel:
            x_BH = torch.cat([block(joined_BX, x_BH) for block in self.blocks], dim=1)
        else:
            for block in self.blocks:
                x_BH = block(joined_BX, x_BH)
        logits_BT: torch.Tensor = self.logit(self.top(x_BH))
        return logits_BT


class MaskBlock(nn.Module):
    """relu(LN(W (mask * x))) with mask = W2 relu(W1 e + b1) + b2 of embeddings e (equations 4 to 8 of the paper)."""

    def __init__(self, width: int, inputs: int, outputs: int, mask: MaskConfig, options: HiddenOptions) -> None:
        super().__init__()
        inner = max(1, round(inputs * mask.ratio))
        self.mask = nn.Sequential(options.linear(width, inner), nn.ReLU(inplace=True), options.linear(inner, inputs))
        self.hidden = Mlp(inputs, [outputs], replace(options, norm="layer", bias=False))

    def forward(self, joined_BX: torch.Tensor, x_BH: torch.Tensor) -> torch.Tensor:
        masked: torch.Tensor = self.hidden(self.mask(joined_BX) * x_BH)
        return masked
