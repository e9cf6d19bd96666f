"""NextItem: what models have in common that predict each entry of a list from those before it."""

# B = samples, N = entries of all samples, C = candidates, E = width of an item's row, Q = N, R = N or B

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardkeep.workers.embeddings.sequence import SequenceShape
from shardkeep.workers.models.encoders.attention import Places
from shardkeep.workers.models.layers.dropout import Dropout
from shardkeep.workers.models.layers.hidden import HiddenOptions
from shardkeep.workers.models.retrieval.vectors import VectorModel


@dataclass(frozen=True)
class ItemList:
    """The list of a next-item model: the name of its group, its shape, and the feature that follows it, whose table is
    that of the group's first column."""

    group: str
    shape: SequenceShape
    item: str

    @property
    def width(self) -> int:
        """Values of an item's row, which are those of its vector."""
        return next(iter(self.shape.ids.values()))


class NextItem(VectorModel):
    """Layers over the entries of a list. The output of an entry is compared with the rows of items: those that the
    layers take in are those that they are compared with.

    An entry is its item's row times sqrt(E), as in the authors' codes of SASRec and HSTU, and a learned vector of its
    place from the newest; numbers and the rows of further columns are projected and added. For dot products the outputs
    go through a layer norm.

    Args:
        layers: Modules from (N, E) and a sequence to (N, E), or with `newest` to the newest entries (B, E). An entry
            sees itself and older ones.
    """

    def __init__(
        self,
        entries: ItemList,
        layers: Iterable[nn.Module],
        options: HiddenOptions,
        *,
        cosine: bool,
        temperature: float,
    ) -> None:
        super().__init__(cosine=cosine, temperature=temperature)
        (self.column, width), *beside = entries.shape.ids.items()
        self.group, self.item, self.beside = entries.group, entries.item, tuple(column for column, _ in beside)
        numbers = entries.shape.numbers + sum(other for _, other in beside)
        self.places = Places(replace(entries.shape, ids={self.column: width}, numbers=numbers), options)
        self.dropout, self.layers = Dropout(options.dropout), nn.ModuleList(layers)
        self.norm = nn.Identity() if cosine else nn.LayerNorm(width)

    def users(self, dense_BI: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The output of the newest entry, (B, E); zeros for an empty list."""
        some_B1: torch.Tensor = (inputs[self.group].lengths > 0)[:, None]
        return self._outputs(inputs, newest=True) * some_B1

    def queries(self, dense_BI: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The output of each entry, (N, E), which predicts the next one; that of the newest predicts the item."""
        return self._outputs(inputs, newest=False)

    def items(self, dense_CI: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The rows, (C, E)."""
        rows_CE: torch.Tensor = inputs[self.item]
        return rows_CE

    def of_samples(self, loss_Q1: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        """(B, 1)."""
        losses_B1: torch.Tensor = inputs[self.group].summed(loss_Q1)
        return losses_B1

    def _outputs(self, inputs: Mapping[str, Any], *, newest: bool) -> torch.Tensor:
        sequence = inputs[self.group]
        rows_NE = sequence.ids[self.column]
        numbers = torch.cat([sequence.numbers, *(sequence.ids[column] for column in self.beside)], dim=1)
        x_RE, sequence = self.places(rows_NE * rows_NE.shape[1] ** 0.5, None, replace(sequence, numbers=numbers))
        x_RE = self.dropout(x_RE)
        for number, layer in enumerate(self.layers, start=1):
            x_RE = layer(x_RE, sequence, newest=newest and number == len(self.layers))
        outputs_RE: torch.Tensor = self.norm(x_RE)
        return outputs_RE
