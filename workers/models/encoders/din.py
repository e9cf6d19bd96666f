"""DIN: the entries of a history, weighted by hidden layers over each entry and the target."""

# B = samples, N = entries of all samples, E = width of an entry, S = numbers, H = width of the first hidden layer

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from shardkeep.workers.embeddings.sequence import Sequence, SequenceShape
from shardkeep.workers.encoder_config import DinEncoderConfig
from shardkeep.workers.models.layers.axes import laid_out
from shardkeep.workers.models.layers.hidden import HiddenOptions, Mlp


class DinEncoder(nn.Module):
    """Deep Interest Network (Zhou et al., arXiv:1706.06978): the sum of a(k, q) k over the entries k, with target q.

    a is a linear layer over hidden layers. An empty history gives zeros, and without `softmax` a long one more than a
    short one, as in the paper's section 4.3. The hidden layers see entries only, never padding.
    """

    def __init__(self, shape: SequenceShape, config: DinEncoderConfig, options: HiddenOptions) -> None:
        super().__init__()
        own = replace(options, activation=config.activation, norm=config.norm, dropout=config.dropout)
        self.first = PairLinear(sum(shape.ids.values()), shape.numbers, config.hidden[0], own)
        self.hidden = Mlp(None, config.hidden, own)
        self.weight = own.linear(self.hidden.out_width, 1)
        self.softmax = config.softmax

    def forward(self, entries_NE: torch.Tensor, target_BE: torch.Tensor, sequence: Sequence) -> torch.Tensor:
        """(B, E)."""
        weight_N1 = self.weight(self.hidden(self.first(entries_NE, target_BE, sequence)))
        if self.softmax:
            weight_N1 = _softmax(weight_N1, sequence)
        return sequence.summed(weight_N1 * entries_NE)


class PairLinear(nn.Module):
    """The linear layer over [q, k, q - k, q * k] and the entry's numbers n.

    W1 q + W2 k + W3 (q - k) + W4 q k + W5 n + b = (W1 + W3) q + (W2 - W3) k + W4 q k + W5 n + b: the first product is
    of samples, not of entries, and two of the four products over entries are left. The parameters are these sums;
    their initial values are drawn as those of the layer over all inputs.
    """

    def __init__(self, width: int, numbers: int, outputs: int, options: HiddenOptions) -> None:
        super().__init__()
        whole = options.linear(4 * width + numbers, outputs)
        q_HE, k_HE, difference_HE, product_HE, numbers_HS = torch.split(
            whole.weight.detach(), [width] * 4 + [numbers], dim=1
        )
        self.target = nn.Linear(width, outputs)
        self.entry = nn.Linear(width, outputs, bias=False)
        self.product = nn.Linear(width, outputs, bias=False)
        self.numbers = nn.Linear(numbers, outputs, bias=False) if numbers else None
        for layer in (self.target, self.entry, self.product):
            laid_out(layer.weight, outputs, width, inputs=1)
        if self.numbers is not None:
            laid_out(self.numbers.weight, outputs, numbers, inputs=1)
        with torch.no_grad():
            self.target.weight.copy_(q_HE + difference_HE)
            self.target.bias.copy_(whole.bias)
            self.entry.weight.copy_(k_HE - difference_HE)
            self.product.weight.copy_(product_HE)
            if self.numbers is not None:
                self.numbers.weight.copy_(numbers_HS)

    def forward(self, entries_NE: torch.Tensor, target_BE: torch.Tensor, sequence: Sequence) -> torch.Tensor:
        """(N, H)."""
        product_NH = self.product(sequence.spread(target_BE) * entries_NE)
        sums_NH: torch.Tensor = product_NH + self.entry(entries_NE) + sequence.spread(self.target(target_BE))
        return sums_NH if self.numbers is None else sums_NH + self.numbers(sequence.numbers)


def _softmax(weight_N1: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """The softmax over the entries of each sample."""
    scores_BL1 = sequence.padded(weight_N1)
    outside_BL1 = ~sequence.mask().unsqueeze(2)
    return sequence.flat(scores_BL1.masked_fill(outside_BL1, torch.finfo(scores_BL1.dtype).min).softmax(1))
