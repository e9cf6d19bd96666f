"""Encoded: a stock model over sequences. An encoder makes one vector of each id column, and the stock model sees it as
the pooled row of one more feature."""

# B = samples, I = dense columns, N = entries of all samples, E = width of an entry, D = dim of a row, T = labels

from __future__ import annotations

from collections.abc import Mapping, Sequence as Several
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardkeep.workers.embeddings.sequence import Sequence, SequenceShape
from shardkeep.workers.encoder_config import ENCODERS, EncoderSettings
from shardkeep.workers.models.layers.axes import ByInput
from shardkeep.workers.models.layers.hidden import HiddenOptions


class Encoded(nn.Module):
    """A stock model, built with all features and id columns, behind an encoder for each group of sequences.

    Args:
        model: Its dense columns are followed by the numbers that encoders leave.
        groups: Group -> its encoder.
    """

    def __init__(self, model: nn.Module, features: Several[str], groups: Mapping[str, GroupEncoder]) -> None:
        super().__init__()
        self.model = model
        self.features, self.groups = tuple(features), tuple(groups)
        self.encoders = ByInput(groups)

    def forward(self, dense_BI: torch.Tensor, embeddings: Mapping[str, Any]) -> torch.Tensor:
        """Logits (B, T) of dense columns (B, I), pooled rows (B, D of the feature), and a `Sequence` for each group."""
        features = {name: embeddings[name] for name in self.features}
        vectors, dense = dict(features), [dense_BI]
        for group, encoder in zip(self.groups, self.encoders, strict=True):
            columns, numbers_BS = encoder(embeddings[group], features)
            vectors |= columns
            dense.append(numbers_BS)
        logits_BT: torch.Tensor = self.model(torch.cat(dense, dim=1), vectors)
        return logits_BT


class GroupEncoder(nn.Module):
    """The vectors of the id columns of one group of sequences.

    An entry is the rows of all columns side by side. The target is the rows of the features that the columns are
    compared with in the same places, and zeros for a column without one. First-order weights, the last value of each
    row under some models, are summed over the entries.

    Args:
        first_order: Whether rows end with a first-order weight.
        targets: Column -> feature.

    Attributes:
        num_dense: Means of numbers that it leaves to the model.
    """

    def __init__(
        self,
        shape: SequenceShape,
        config: EncoderSettings,
        options: HiddenOptions,
        *,
        first_order: bool,
        targets: Mapping[str, str],
    ) -> None:
        super().__init__()
        self.dims = {column: width - first_order for column, width in shape.ids.items()}
        self.first_order, self.targets = first_order, dict(targets)
        self.num_dense = 0 if config.takes_numbers else shape.numbers
        self.encoder = ENCODERS[config.name].load()(replace(shape, ids=self.dims), config, options)

    def forward(
        self, sequence: Sequence, features: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Column -> (B, D), and the means of the numbers that it leaves, (B, `num_dense`)."""
        rows = [sequence.ids[column] for column in self.dims]
        entries_NE = torch.cat([row[:, :dim] for row, dim in zip(rows, self.dims.values(), strict=True)], dim=1)
        vectors_BE = self.encoder(entries_NE, self._target(features), sequence)
        vectors = torch.split(vectors_BE, list(self.dims.values()), dim=1)
        if self.first_order:
            weights_BC = sequence.summed(torch.cat([row[:, -1:] for row in rows], dim=1))
            vectors = tuple(
                torch.cat(pair, dim=1) for pair in zip(vectors, torch.split(weights_BC, 1, dim=1), strict=True)
            )
        means_BS = sequence.mean(sequence.numbers[:, : self.num_dense])
        return dict(zip(self.dims, vectors, strict=True)), means_BS

    def _target(self, features: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """(B, E); None where no column has a target."""
        if not self.targets:
            return None
        first = features[next(iter(self.targets.values()))]
        parts = [
            features[self.targets[column]][:, :dim] if column in self.targets else first.new_zeros(first.shape[0], dim)
            for column, dim in self.dims.items()
        ]
        return torch.cat(parts, dim=1)
