"""xDeepFM: first-order weights, a compressed interaction network and an MLP, added."""

# B = batch, T = labels, I = dense columns, F = fields, D = common dim, H = vectors of an interaction layer

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardkeep.workers.models.layers.hidden import HiddenOptions, Mlp
from shardkeep.workers.models.layers.inputs import Concat, Fields, FirstOrder


class XDeepFm(nn.Module):
    """xDeepFM (Lian et al., arXiv:1803.05170): logit = first order + w . CIN + deep.

    Embeddings of another dim are projected to `default_dim` for the CIN. A dense column has a learned vector there.
    """

    first_order_column = True

    def __init__(
        self,
        *,
        num_dense: int,
        features: Mapping[str, int],
        default_dim: int,
        cin: Sequence[int],
        hidden: Sequence[int],
        options: HiddenOptions,
    ) -> None:
        super().__init__()
        self.first_order = FirstOrder(num_dense, features)
        self.fields = Fields(num_dense, self.first_order.dims, default_dim, options)
        self.joined = Concat(num_dense, self.first_order.dims)
        self.cin = Cin(self.fields.num_fields, cin, options)
        self.cin_logit = options.output(sum(cin), bias=False)
        self.deep = Mlp(self.joined.out_width, hidden, options)
        self.logit = options.output(self.deep.out_width)

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, T) of dense columns (B, I) and pooled rows (B, dim of the feature + 1)."""
        first_B1, vectors = self.first_order(dense_BI, embeddings)
        cin_BT = self.cin_logit(self.cin(self.fields(dense_BI, vectors)))
        logits_BT: torch.Tensor = first_B1 + cin_BT + self.logit(self.deep(self.joined(dense_BI, vectors)))
        return logits_BT


class Cin(nn.Module):
    """Compressed interaction network, equation 6 of the paper, with the identity as its activation.

    Vector h of layer k is the sum over i, j of W[h, i, j] * (vector i of layer k - 1) * (field j), element by element.
    The result is the sum of each vector's elements, of all layers.
    """

    def __init__(self, num_fields: int, widths: Sequence[int], options: HiddenOptions) -> None:
        super().__init__()
        inputs = [num_fields, *widths]
        self.layers = nn.ModuleList(
            options.linear(inputs[k] * num_fields, width, bias=False) for k, width in enumerate(widths)
        )

    def forward(self, fields_BFD: torch.Tensor) -> torch.Tensor:
        """(B, sum of the widths)."""
        fields_BDF = vectors_BDH = fields_BFD.transpose(1, 2)
        sums: list[torch.Tensor] = []
        for layer in self.layers:
            products_BDX = (vectors_BDH.unsqueeze(3) * fields_BDF.unsqueeze(2)).flatten(2)
            vectors_BDH = layer(products_BDX)
            sums.append(vectors_BDH.sum(1))
        return torch.cat(sums, dim=1)
