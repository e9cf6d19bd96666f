"""Jagged input by duck typing: TorchRec's KeyedJaggedTensor and JaggedTensor, nested tensors, plain tensors."""

# B = samples, N = ids of a feature, D = embedding dim

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from shardkeep.base.errors import UserError


@dataclass(frozen=True)
class Jagged:
    """Ids or rows of B samples, one sample after the other.

    Args:
        ids: Ids (N,), or rows (N, D).
        counts: Of each sample (B,), whole numbers.
        weights: Of each id (N,), None = none; or a function, as of `Bag`.
        inverse: For each row of pooled output the sample that it repeats, from 0; None = one row a sample.
    """

    ids: torch.Tensor
    counts: torch.Tensor
    weights: torch.Tensor | Callable[[], torch.Tensor] | None = None
    inverse: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        return self.ids

    def lengths(self) -> torch.Tensor:
        return self.counts

    def offsets(self) -> torch.Tensor:
        """Where each sample begins, and the end of the last one (B + 1,)."""
        return torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)])

    def weights_or_none(self) -> Any:
        return self.weights


@dataclass(frozen=True, eq=False)
class Keyed(Mapping[str, Jagged]):
    """Features that stand one after the other in one tensor, with as many samples each. Parts are made when one is
    read.

    Args:
        names: Of the features, in their order.
        ids: Of all features (N,).
        counts: Of each feature and sample (F, B).
        weights: Of each id (N,), None = none.
    """

    names: Sequence[str]
    ids: torch.Tensor
    counts: torch.Tensor
    weights: torch.Tensor | None

    def chosen(self, names: Sequence[str]) -> Keyed:
        """Some of the features, in another order."""
        at, parts = [self.names.index(name) for name in names], [self[name] for name in names]
        weights = None if self.weights is None else torch.cat([part.weights_or_none() for part in parts])
        return Keyed(names, torch.cat([part.ids for part in parts]), self.counts[at], weights)

    @cached_property
    def _parts(self) -> dict[str, Jagged]:
        sizes: list[int] = self.counts.sum(1).tolist()
        own = [None] * len(sizes) if self.weights is None else torch.split(self.weights, sizes)
        return dict(zip(self.names, map(Jagged, torch.split(self.ids, sizes), self.counts, own), strict=True))

    def __getitem__(self, name: str) -> Jagged:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def jagged_of(features: Any, names: Sequence[str]) -> Mapping[str, Jagged]:
    """The named features of an input, in the order of the names; others are left alone.

    Args:
        features: A mapping of feature name to a tensor (B,) or (B, K) or to a jagged tensor, or a keyed jagged tensor.

    Raises UserError for a feature that is missing or has no such form.
    """
    keyed = callable(getattr(features, "keys", None)) and hasattr(features, "lengths")
    found = _of_keyed(features, names) if keyed else features
    if not isinstance(found, Mapping):
        kind = type(features).__name__
        raise UserError(f"features are a {kind}; allowed: a dict of feature name to tensors, or a KeyedJaggedTensor")
    if isinstance(found, Keyed) and list(found.names) == list(names):
        return found
    for name in names:
        if name not in found:
            raise UserError(f"feature {name}: is missing; there are {', '.join(map(str, found)) or 'none'}")
    if isinstance(found, Keyed) and names:
        return found.chosen(names)
    return {name: found[name] if isinstance(found[name], Jagged) else _of_one(name, found[name]) for name in names}


def _of_keyed(features: Any, names: Sequence[str]) -> Mapping[str, Jagged]:
    """Each key of a keyed jagged tensor: its lengths are those of its samples, key by key."""
    keys = list(features.keys())
    values, weights, counts = features.values(), features.weights_or_none(), features.lengths().reshape(-1)
    if (total := int(counts.sum())) != values.numel():
        raise UserError(f"features: their lengths are those of {total} ids, and values has {values.numel()}")
    alike = [counts.numel() // max(1, len(keys))] * len(keys)
    strides = features.stride_per_key() if hasattr(features, "stride_per_key") else alike
    inverse = features.inverse_indices_or_none() if hasattr(features, "inverse_indices_or_none") else None
    repeats = inverse is not None and bool(inverse[1].numel())
    if strides == alike and not repeats and counts.numel() == sum(alike):
        return Keyed(keys, values, counts.view(len(keys), -1), weights)
    lengths = counts.split(strides)
    sizes = [int(each.sum()) for each in lengths]
    own: Sequence[torch.Tensor | None] = [None] * len(keys) if weights is None else weights.split(sizes)
    parts = dict(zip(keys, map(Jagged, values.split(sizes), lengths, own), strict=True))
    return _repeated(parts, inverse, names) if inverse is not None and repeats else parts


def _repeated(parts: Mapping[str, Jagged], inverse: tuple[Any, Any], names: Sequence[str]) -> dict[str, Jagged]:
    """The parts with their `inverse_indices`. Raises UserError for a named feature that has none or wrong ones."""
    by_key = dict(zip(*inverse, strict=True))
    for name in (name for name in names if name in parts):
        own, count = by_key.get(name), len(parts[name].lengths())
        if own is None or own.min() < 0 or own.max() >= count:
            wrong = "no such key" if own is None else f"{int(own.min())} to {int(own.max())}"
            raise UserError(f"feature {name}: inverse_indices has {wrong}; allowed: 0 to {count - 1}")
    return {key: replace(part, inverse=by_key.get(key)) for key, part in parts.items()}


def _of_one(name: str, feature: Any) -> Jagged:
    if isinstance(feature, torch.Tensor) and not feature.is_nested:
        if feature.dim() not in (1, 2):
            raise UserError(
                f"feature {name}: a tensor {tuple(feature.shape)}; allowed: (B,), (B, K), or a jagged tensor"
            )
        each = feature.shape[1] if feature.dim() == 2 else 1
        return Jagged(feature.reshape(-1), torch.full((feature.shape[0],), each, dtype=torch.int64))
    if not (callable(getattr(feature, "values", None)) and callable(getattr(feature, "offsets", None))):
        raise UserError(f"feature {name}: is a {type(feature).__name__}; allowed: a tensor, or a jagged tensor")
    lengths = feature.lengths() if hasattr(feature, "lengths") else None
    lengths = feature.offsets().diff() if lengths is None else lengths
    weights = feature.weights_or_none() if hasattr(feature, "weights_or_none") else None
    return Jagged(feature.values(), lengths, weights)
