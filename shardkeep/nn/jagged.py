"""Jagged input by duck typing: TorchRec's KeyedJaggedTensor and JaggedTensor, nested tensors, plain tensors."""

# B = samples, N = ids of a feature, D = embedding dim

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


def jagged_of(features: Any, names: Sequence[str]) -> dict[str, Jagged]:
    """The named features of an input, in the order of the names; others are left alone.

    Args:
        features: A mapping of feature name to a tensor (B,) or (B, K) or to a jagged tensor, or a keyed jagged tensor.

    Raises UserError for a feature that is missing or has no such form.
    """
    found = (
        _of_keyed(features) if callable(getattr(features, "keys", None)) and hasattr(features, "lengths") else features
    )
    if not isinstance(found, Mapping):
        kind = type(features).__name__
        raise UserError(f"features are a {kind}; allowed: a dict of feature name to tensors, or a KeyedJaggedTensor")
    for name in names:
        if name not in found:
            raise UserError(f"feature {name}: is missing; there are {', '.join(map(str, found)) or 'none'}")
    return {name: found[name] if isinstance(found[name], Jagged) else _of_one(name, found[name]) for name in names}


def _of_keyed(features: Any) -> dict[str, Jagged]:
    """Each key of a keyed jagged tensor: its lengths are those of its samples, key by key."""
    keys = list(features.keys())
    counts, values, weights = features.lengths().reshape(-1), features.values(), features.weights_or_none()
    strides = features.stride_per_key() if keys and hasattr(features, "stride_per_key") else None
    lengths = counts.split(strides or [counts.numel() // max(1, len(keys))] * len(keys)) if keys else ()
    sizes = [int(each.sum()) for each in lengths]
    if sum(sizes) != values.numel():
        raise UserError(f"features: their lengths are those of {sum(sizes)} ids, and values has {values.numel()}")
    own: Sequence[torch.Tensor | None] = [None] * len(keys) if weights is None else weights.split(sizes)
    inverse = _inverse_of(features, dict(zip(keys, lengths, strict=True)))
    return {
        key: Jagged(part, lengths[k], own[k], inverse.get(key))
        for k, (key, part) in enumerate(zip(keys, values.split(sizes), strict=True))
    }


def _inverse_of(features: Any, lengths: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The `inverse_indices` of each key; empty where a keyed jagged tensor has none. Raises UserError."""
    given = features.inverse_indices_or_none() if hasattr(features, "inverse_indices_or_none") else None
    if given is None or not given[1].numel():
        return {}
    inverse = dict(zip(given[0], given[1], strict=True))
    for key in lengths:
        if key not in inverse:
            raise UserError(f"feature {key}: inverse_indices has no such key; it has {', '.join(inverse)}")
        least, most = (int(each) for each in inverse[key].aminmax())
        if least < 0 or most >= lengths[key].numel():
            found = f"inverse_indices from {least} to {most}"
            raise UserError(f"feature {key}: {found} of {lengths[key].numel()} samples")
    return inverse


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
