"""PLE: levels of experts, some of which are a label's own."""

# B = batch, T = labels, I = dense columns, H = width of a level's experts, E = experts of a gate

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardkeep.workers.models.layers.hidden import HiddenOptions, Mlp
from shardkeep.workers.models.layers.inputs import Concat
from shardkeep.workers.models.tasks.mmoe import Gate
from shardkeep.workers.models.tasks.towers import TaskTowers


class Ple(nn.Module):
    """Progressive Layered Extraction (Tang et al., RecSys 2020), equations 1 to 7, of `levels` levels.

    The first level sees dense columns and embeddings of any dims; all experts are MLPs of `hidden`. The last level has
    no gate for the shared experts. With one level it is the paper's CGC."""

    def __init__(
        self,
        *,
        num_dense: int,
        features: Mapping[str, int],
        levels: int,
        shared_experts: int,
        task_experts: int,
        hidden: Sequence[int],
        task_hidden: Sequence[int],
        options: HiddenOptions,
    ) -> None:
        super().__init__()
        self.joined = Concat(num_dense, features)
        widths, counts = (
            [self.joined.out_width, *[hidden[-1]] * levels],
            [task_experts] * options.outputs + [shared_experts],
        )
        self.levels = nn.ModuleList(
            Level(width, hidden, counts, options, shares=k < levels - 1) for k, width in enumerate(widths[:-1])
        )
        self.towers = TaskTowers(hidden[-1], task_hidden, options)

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, T) of dense columns (B, I) and pooled embeddings (B, dim of the feature)."""
        inputs = [self.joined(dense_BI, embeddings)] * (len(self.towers.hidden) + 1)
        for level in self.levels:
            inputs = level(inputs)
        logits_BT: torch.Tensor = self.towers(inputs)
        return logits_BT


class Level(nn.Module):
    """An extraction network. A label's gate mixes its own experts and the shared ones by its own input; the gate of the
    shared experts mixes all, by the shared input.

    Args:
        counts: Experts of each label, and at the end the shared ones.
        shares: Whether a level follows, which needs the shared gate."""

    def __init__(
        self, inputs: int, hidden: Sequence[int], counts: Sequence[int], options: HiddenOptions, *, shares: bool
    ) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp(inputs, hidden, options) for _ in range(sum(counts)))
        self.counts = tuple(counts)
        mixed = [count + counts[-1] for count in counts[:-1]] + [sum(counts)] * shares
        self.gates = nn.ModuleList(Gate(inputs, count, options) for count in mixed)

    def forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The mixtures (B, H) of each label, and behind them the shared one where a level follows.

        Args:
            inputs: (B, width) of each label, and at the end the shared one."""
        owners = [x for x, count in zip(inputs, self.counts, strict=True) for _ in range(count)]
        outputs = [expert(x) for expert, x in zip(self.experts, owners, strict=True)]
        ends = list(itertools.accumulate(self.counts))
        shared = outputs[ends[-2] :]
        own = (outputs[end - count : end] for end, count in zip(ends[:-1], self.counts[:-1], strict=True))
        mixed = [*([*experts, *shared] for experts in own), outputs]
        parts = zip(self.gates, inputs, mixed, strict=False)
        return [gate(x, torch.stack(experts, dim=1)) for gate, x, experts in parts]
