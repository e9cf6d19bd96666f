"""Samples with histories, drawn from a seed, and a model of one's own that attends to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from shardkeep.workers.embeddings.sequence import Sequence, SequenceShape

LONGEST = 20
SEEN = SequenceColumns(
    "seen", (Feature("seen_item", "item", "none"), Feature("seen_kind", "kind", "none")), ("age",), 20
)
SCHEMA = Schema(("price",), (Feature("item", "item"), Feature("tags", "tag", "mean")), ("label",), (SEEN,))


class Histories:
    """Whether the item's kind is in the history; the lists have 0 to 20 entries."""

    def __init__(self, num_samples: int, *, seed: int = 0, items: int = 60, longest: int = LONGEST) -> None:
        self.schema = SCHEMA
        random = np.random.default_rng(seed)
        self._lengths_N = random.integers(0, longest + 1, num_samples).astype(np.int32)
        self._starts_N = np.concatenate([[0], np.cumsum(self._lengths_N, dtype=np.int64)])
        self._seen = random.integers(0, items, self._starts_N[-1])
        self._age = random.random(self._starts_N[-1]).astype(np.float32)
        self._item = random.integers(0, items, num_samples)
        self._price = random.random((num_samples, 1)).astype(np.float32)
        spans = zip(self._starts_N, self._starts_N[1:], self._item, strict=False)
        inside = [(self._seen[start:stop] % 7 == item % 7).any() for start, stop, item in spans]
        self._label = np.array(inside, np.float32).reshape(-1, 1)

    def __len__(self) -> int:
        return len(self._item)

    def gather(self, rows_B: np.ndarray) -> Batch:
        spans = [np.arange(self._starts_N[r], self._starts_N[r + 1]) for r in rows_B]
        at_N = np.concatenate(spans) if spans else np.empty(0, np.int64)
        lengths_B = self._lengths_N[rows_B]
        ids = {
            "item": Ragged(self._item[rows_B]),
            "tags": Ragged(np.repeat(self._item[rows_B], 2) // 3, np.full(len(rows_B), 2, np.int32)),
            "seen_item": Ragged(self._seen[at_N], lengths_B),
            "seen_kind": Ragged(self._seen[at_N] % 7, lengths_B),
        }
        return Batch(self._price[rows_B], ids, self._label[rows_B], numbers={"seen": self._age[at_N, None]})


class Attends(nn.Module):
    """Softmax attention of the item to what was seen, and a linear layer on its entries."""

    def __init__(
        self, *, num_dense: int, features: Mapping[str, int], sequences: Mapping[str, SequenceShape], width: int = 6
    ) -> None:
        super().__init__()
        shape = sequences["seen"]
        assert shape.max_length == LONGEST
        self.entry = nn.Linear(sum(shape.ids.values()) + shape.numbers, width)
        self.query = nn.Linear(features["item"], width)
        self.out = nn.Linear(num_dense + sum(features.values()) + width, 1)

    def forward(self, dense_BI: torch.Tensor, embeddings: Mapping[str, Any]) -> torch.Tensor:
        seen: Sequence = embeddings["seen"]
        entry_NW = torch.tanh(self.entry(torch.cat([*seen.ids.values(), seen.numbers], dim=1)))
        entry_BLW = seen.padded(entry_NW)
        logit_BL = (entry_BLW * self.query(embeddings["item"])[:, None]).sum(2)
        share_BL = torch.softmax(logit_BL.masked_fill(~seen.mask(), -1e9), dim=1)
        history_BW = (entry_BLW * share_BL[:, :, None]).sum(1)
        return self.out(torch.cat([dense_BI, embeddings["item"], embeddings["tags"], history_BW], dim=1))


DIMS = {"item": 6, "tags": 6}
SHAPES = {"seen": SequenceShape({"seen_item": 6, "seen_kind": 3}, 1, LONGEST)}


def model() -> Attends:
    """For rows of `DIMS` and `SHAPES`."""
    torch.manual_seed(4)
    return Attends(num_dense=1, features=DIMS, sequences=SHAPES)


def inputs(lengths: list[int]) -> tuple[torch.Tensor, dict[str, Any]]:
    drawn, count, entries = torch.Generator().manual_seed(1), len(lengths), sum(lengths)

    def rows(height: int, dim: int) -> torch.Tensor:
        return torch.randn(height, dim, generator=drawn)

    ids = {column: rows(entries, dim).requires_grad_() for column, dim in SHAPES["seen"].ids.items()}
    seen = Sequence(ids, rows(entries, 1), torch.tensor(lengths), LONGEST)
    pooled = {name: rows(count, dim).requires_grad_() for name, dim in DIMS.items()}
    return rows(count, 1), {**pooled, "seen": seen}
