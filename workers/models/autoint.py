"""AutoInt: self-attention between fields, beside an MLP."""

# B = batch, T = labels, I = dense columns, F = fields, D = common dim, H = heads, A = width of all heads

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardkeep.workers.model_config import AttentionConfig
from shardkeep.workers.models.layers.hidden import HiddenOptions, Mlp
from shardkeep.workers.models.layers.inputs import Concat, Fields


class AutoInt(nn.Module):
    """AutoInt+ (Song et al., arXiv:1810.11921): logit = w . attention + deep. With no `hidden` layers it is AutoInt.

    Embeddings of another dim are projected to `default_dim`. A dense column has a learned vector there.
    """

    def __init__(
        self,
        *,
        num_dense: int,
        features: Mapping[str, int],
        default_dim: int,
        attention: AttentionConfig,
        hidden: Sequence[int],
        options: HiddenOptions,
    ) -> None:
        super().__init__()
        self.fields = Fields(num_dense, features, default_dim, options)
        widths = [default_dim, *[attention.dim] * attention.layers]
        self.attention = nn.Sequential(
            *(Attention(widths[k], attention.dim, attention.heads, options) for k in range(attention.layers))
        )
        self.logit = options.output(self.fields.num_fields * attention.dim)
        self.joined = Concat(num_dense, features)
        self.deep: nn.Sequential | None = None
        if hidden:
            mlp = Mlp(self.joined.out_width, hidden, options)
            self.deep = nn.Sequential(mlp, options.output(mlp.out_width, bias=False))

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, T) of dense columns (B, I) and pooled embeddings (B, dim of the feature)."""
        attended_BFA = self.attention(self.fields(dense_BI, embeddings))
        logits_BT: torch.Tensor = self.logit(attended_BFA.flatten(1))
        return logits_BT if self.deep is None else logits_BT + self.deep(self.joined(dense_BI, embeddings))


class Attention(nn.Module):
    """An interacting layer, equations 5 to 8 of the paper: relu(heads side by side + W_res e).

    A head is the sum over k of softmax_k(<W_query e_m, W_key e_k>) W_value e_k, without a scale.
    """

    among_columns = True

    def __init__(self, inputs: int, width: int, heads: int, options: HiddenOptions) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.residual = (options.linear(inputs, width, bias=False) for _ in range(4))

    def forward(self, fields_BFD: torch.Tensor) -> torch.Tensor:
        """(B, F, A)."""
        query_BHFX, key_BHFX, value_BHFX = (
            layer(fields_BFD).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        share_BHFF = (query_BHFX @ key_BHFX.transpose(2, 3)).softmax(3)
        heads_BFA = (share_BHFF @ value_BHFX).transpose(1, 2).flatten(2)
        return torch.relu(heads_BFA + self.residual(fields_BFD))
