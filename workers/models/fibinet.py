"""FiBiNET: bilinear products of all pairs of fields, with and without learned weights of the fields, then an MLP."""

# B = batch, T = labels, I = dense columns, F = fields, D = common dim, P = pairs of fields

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardkeep.base.errors import UserError
from shardkeep.workers.models.layers.axes import laid_out, named
from shardkeep.workers.models.layers.hidden import HiddenOptions, Mlp
from shardkeep.workers.models.layers.inputs import Fields, FirstOrder


class FiBiNet(nn.Module):
    """FiBiNET (Huang et al., arXiv:1905.09433): logit = first order + deep(pairs of e, pairs of SENET(e)).

    SENET: a = relu(W2 relu(W1 z)) with z the mean of each field's vector; field i becomes a_i e_i. `reduction`
    divides the fields between W1 and W2. Embeddings of another dim are projected to `default_dim`.
    """

    first_order_column = True

    def __init__(
        self,
        *,
        num_dense: int,
        features: Mapping[str, int],
        default_dim: int,
        bilinear: str,
        reduction: int,
        hidden: Sequence[int],
        options: HiddenOptions,
    ) -> None:
        super().__init__()
        self.first_order = FirstOrder(num_dense, features)
        self.fields = Fields(num_dense, self.first_order.dims, default_dim, options)
        num_fields = self.fields.num_fields
        if num_fields < 2:
            raise UserError("model.name: fibinet multiplies pairs of columns; the data has one dense or sparse column")
        reduced = max(1, num_fields // reduction)
        self.squeeze = options.linear(num_fields, reduced, bias=False)
        self.excite = options.linear(reduced, num_fields, bias=False)
        self.pairs = nn.ModuleList(Bilinear(num_fields, default_dim, bilinear) for _ in range(2))
        self.deep = Mlp(2 * (pairs_of(num_fields) * default_dim), hidden, options)
        self.logit = options.output(self.deep.out_width)

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, T) of dense columns (B, I) and pooled rows (B, dim of the feature + 1)."""
        first_B1, vectors = self.first_order(dense_BI, embeddings)
        fields_BFD = self.fields(dense_BI, vectors)
        weight_BF = torch.relu(self.excite(torch.relu(self.squeeze(fields_BFD.mean(2)))))
        plain, weighted = self.pairs[0](fields_BFD), self.pairs[1](fields_BFD * weight_BF.unsqueeze(2))
        logits_BT: torch.Tensor = first_B1 + self.logit(self.deep(torch.cat([plain, weighted], dim=1)))
        return logits_BT


def pairs_of(fields: int) -> int:
    """How many pairs i < j there are."""
    count = int(fields) * (int(fields) - 1) // 2
    return named(count, fields, lambda names: [a + b for i, a in enumerate(names) for b in names[i + 1 :]])


class Bilinear(nn.Module):
    """(v_i W) * v_j, element by element, for all i < j (equations 5 to 7 of the paper).

    `kind`: W is one for `all`, field i's for `each`, the pair's for `interaction`.
    """

    in_order = True
    left_P: torch.Tensor
    right_P: torch.Tensor

    def __init__(self, num_fields: int, dim: int, kind: str) -> None:
        super().__init__()
        left_P, right_P = torch.triu_indices(num_fields, num_fields, offset=1)
        self.register_buffer("left_P", left_P, persistent=False)
        self.register_buffer("right_P", right_P, persistent=False)
        self.kind = kind
        # The last field is never left.
        count = {"all": 1, "each": num_fields - 1, "interaction": pairs_of(num_fields)}[kind]
        weight = nn.Parameter(torch.randn(count, dim, dim) * dim**-0.5)  # Xavier, of each matrix
        self.weight = laid_out(weight, count, dim, dim)

    def forward(self, fields_BFD: torch.Tensor) -> torch.Tensor:
        """(B, P * D)."""
        left_BPD = fields_BFD.index_select(1, self.left_P)
        weight_PDD = self.weight.index_select(0, self.left_P) if self.kind == "each" else self.weight
        mapped_PBD = left_BPD.transpose(0, 1) @ weight_PDD
        return (mapped_PBD.transpose(0, 1) * fields_BFD.index_select(1, self.right_P)).flatten(1)
