"""Inputs: what a dense model gets of the rows, a tensor for each feature and a Sequence for each group of lists.

What pads them or makes zeros like them is here: nobody else looks into a Sequence.
"""

# B = samples, A = added samples, N = entries of all samples, D = embedding dim, L = max_length

from __future__ import annotations

import itertools
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


def entries_of(inputs: Inputs) -> list[torch.Tensor]:
    """The tensors of all sequences that have a row for each entry, (N, D) and (N, S)."""
    sequences = [each for each in inputs.values() if isinstance(each, Sequence)]
    return [entries for each in sequences for entries in (*each.ids.values(), each.numbers)]


def has_many_entries(inputs: Inputs) -> bool:
    """Whether each sequence has two entries or more: torch compiles a size of 0 or 1 apart."""
    return all(len(entries) > 1 for entries in entries_of(inputs))


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


def zeros(
    features: Mapping[str, int], sequences: Mapping[str, SequenceShape], count: int, device: torch.device
) -> dict[str, torch.Tensor | Sequence]:
    """Zeros for `count` samples, of which the first have one entry in each sequence. No two numbers of entries are
    equal, as far as there are samples: what traces a model would take them for one."""
    found: dict[str, torch.Tensor | Sequence] = {
        name: torch.zeros(count, dim, device=device) for name, dim in features.items()
    }
    for n, (name, shape) in enumerate(sequences.items(), start=1):
        lengths_B = (torch.arange(count, device=device) < max(count - n, 2)).long()
        entries = int(lengths_B.sum())
        ids = {column: torch.zeros(entries, dim, device=device) for column, dim in shape.ids.items()}
        found[name] = Sequence(ids, torch.zeros(entries, shape.numbers, device=device), lengths_B, shape.max_length)
    return found


def shapes_of(inputs: Inputs) -> tuple[dict[str, int], dict[str, SequenceShape]]:
    """Values per sample of each feature, and the shape of each sequence."""
    features, sequences = dict[str, int](), dict[str, SequenceShape]()
    for name, each in inputs.items():
        if isinstance(each, Sequence):
            ids = {column: rows_ND.shape[1] for column, rows_ND in each.ids.items()}
            sequences[name] = SequenceShape(ids, each.numbers.shape[1], each.max_length)
        else:
            features[name] = each.shape[1]
    return features, sequences


def leaves_of(inputs: Inputs) -> list[torch.Tensor]:
    """The tensors of rows, whose gradients are collected."""
    parts = (each.ids.values() if isinstance(each, Sequence) else (each,) for each in inputs.values())
    return list(itertools.chain.from_iterable(parts))
