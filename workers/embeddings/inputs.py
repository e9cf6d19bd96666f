"""Inputs: what a dense model gets of the rows, a tensor for each feature and a Sequence for each group of lists.

What pads them or makes zeros like them is here: nobody else looks into a Sequence.
"""

# B = samples, A = added samples, N = entries of all samples, D = embedding dim, L = max_length

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F

from shardkeep.workers.embeddings.sequence import Sequence, SequenceShape

Inputs = Mapping[str, torch.Tensor | Sequence]
"""Feature -> (B, D); name of a group -> Sequence."""
_MULTIPLE = 32
"""Of the entries of a block's sequences: vector loops of torch, of up to 32 numbers, compute a remainder in another
way."""


def has_sequences(inputs: Inputs) -> bool:
    return any(isinstance(each, Sequence) for each in inputs.values())


def spare_samples(shapes: Iterable[SequenceShape]) -> int:
    """The samples that `padded` must add at least, to have room for the entries that it adds."""
    return max((-(-(_MULTIPLE - 1) // shape.max_length) for shape in shapes), default=0)


def padded(inputs: Inputs, count: int) -> Inputs:
    """The inputs with `count` samples of zeros behind them, detached. They have as many entries of sequences as make
    the number of all entries a multiple of `_MULTIPLE`."""
    return {
        name: _with_samples(each, count) if isinstance(each, Sequence) else pad_rows(each.detach(), count)
        for name, each in inputs.items()
    }


def pad_rows(x_BC: torch.Tensor, count: int) -> torch.Tensor:
    """A matrix with `count` rows of zeros behind it."""
    return F.pad(x_BC, (0, 0, 0, count))


def _with_samples(sequence: Sequence, count: int) -> Sequence:
    full = sequence.max_length
    missing = min(-len(sequence.numbers) % _MULTIPLE, count * full)
    added_A = (missing - full * torch.arange(count, device=sequence.lengths.device)).clamp(0, full)
    return replace(
        sequence,
        ids={column: pad_rows(rows_ND.detach(), missing) for column, rows_ND in sequence.ids.items()},
        numbers=pad_rows(sequence.numbers, missing),
        lengths=torch.cat([sequence.lengths, added_A]),
    )


def zeros_like(inputs: Inputs, count: int, device: torch.device) -> tuple[Inputs, list[torch.Tensor]]:
    """Zeros for `count` samples, sequences with one entry each; and the leaves in them, which require gradients where
    the inputs do."""
    leaves: list[torch.Tensor] = []

    def zeros(like_BD: torch.Tensor) -> torch.Tensor:
        leaves.append(torch.zeros(count, like_BD.shape[1], device=device).requires_grad_(like_BD.requires_grad))
        return leaves[-1]

    def of(each: torch.Tensor | Sequence) -> torch.Tensor | Sequence:
        if not isinstance(each, Sequence):
            return zeros(each)
        ids = {column: zeros(rows_ND) for column, rows_ND in each.ids.items()}
        lengths_B = torch.ones(count, dtype=torch.int64, device=device)
        return Sequence(ids, zeros(each.numbers), lengths_B, each.max_length)

    return {name: of(each) for name, each in inputs.items()}, leaves
