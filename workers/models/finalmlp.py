"""FinalMLP: two MLPs over gated inputs, fused by a bilinear form."""

# B = batch, T = labels, I = dense columns, X = width of the joined input, H = heads

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardkeep.base.errors import UserError
from shardkeep.workers.model_config import GatesConfig
from shardkeep.workers.models.layers.hidden import HiddenOptions, Mlp
from shardkeep.workers.models.layers.inputs import Concat


class FinalMlp(nn.Module):
    """FinalMLP (Mao et al., arXiv:2304.00902): two streams, each an MLP over gate * inputs. Embeddings of any dims.

    logit = b + w1 . o1 + w2 . o2 + sum over heads h of o1_h' W_h o2_h, with o1, o2 the streams' outputs.
    """

    ends_model, product = "product", staticmethod(torch.matmul)

    def __init__(
        self,
        *,
        num_dense: int,
        features: Mapping[str, int],
        default_dim: int,
        hidden: Sequence[int],
        second_hidden: Sequence[int] | None,
        fusion_heads: int,
        gates: GatesConfig,
        options: HiddenOptions,
    ) -> None:
        super().__init__()
        self.joined = Concat(num_dense, features)
        width = self.joined.out_width
        contexts = (("first", gates.first), ("second", gates.second))
        self.gates = nn.ModuleList(
            FeatureGate(_context(f"model.gates.{key}", names, features), default_dim, width, gates.hidden, options.init)
            for key, names in contexts
        )
        second = hidden if second_hidden is None else second_hidden
        self.streams = nn.ModuleList(Mlp(width, widths, options) for widths in (hidden, second))
        ends = [stream.out_width for stream in self.streams if isinstance(stream, Mlp)]
        if any(end % fusion_heads for end in ends):
            raise UserError(
                f"model.fusion_heads: {fusion_heads} does not divide the streams' last widths, {ends[0]} and {ends[1]}"
            )
        self.first = options.output(ends[0])
        self.second = options.output(ends[1], bias=False)
        shape = (fusion_heads, *(end // fusion_heads for end in ends))
        several = (options.outputs,) if options.outputs > 1 else ()
        self.fusion = nn.Parameter(torch.randn(several + shape) * (2 / (shape[1] + shape[2])) ** 0.5)

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, T) of dense columns (B, I) and pooled embeddings (B, dim of the feature)."""
        joined_BX = self.joined(dense_BI, embeddings)
        first, second = (
            stream(joined_BX * gate(dense_BI, embeddings))
            for stream, gate in zip(self.streams, self.gates, strict=True)
        )
        heads = self.fusion.shape[-3]
        heads_B1H1X = first.unflatten(1, (1, heads, 1, -1))
        heads_B1H1Y = second.unflatten(1, (1, heads, 1, -1))
        fused_BT = (self.product(heads_B1H1X, self.fusion) * heads_B1H1Y).flatten(2).sum(2)
        logits_BT: torch.Tensor = self.first(first) + self.second(second) + fused_BT
        return logits_BT


class FeatureGate(nn.Module):
    """2 sigmoid(MLP(context)), a factor for each input; the context is named features, or a learned vector."""

    def __init__(self, context: Mapping[str, int], dim: int, outputs: int, widths: Sequence[int], init: str) -> None:
        super().__init__()
        self.context = Concat(0, context)
        self.learned = None if context else nn.Parameter(torch.randn(1, dim) * 0.01)
        options = HiddenOptions(init=init)
        mlp = Mlp(self.context.out_width or dim, widths, options)
        self.mlp = nn.Sequential(mlp, options.linear(mlp.out_width, outputs))

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """(B, X), or (1, X) where the context is learned."""
        context = self.context(dense_BI[:, :0], embeddings) if self.learned is None else self.learned
        return 2.0 * torch.sigmoid(self.mlp(context))


def _context(setting: str, names: Sequence[str], features: Mapping[str, int]) -> dict[str, int]:
    for name in names:
        if name not in features:
            raise UserError(f"{setting}: {name} is not a feature; allowed: {', '.join(features)}")
    return {name: features[name] for name in names}
