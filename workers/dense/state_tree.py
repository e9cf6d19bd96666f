"""A state dict as JSON types and a flat mapping of tensors, and back: for files and for other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def split(value: Any, tensors: dict[str, torch.Tensor], path: str = "") -> Any:
    """`value` as JSON types, its tensors put into `tensors`, each replaced by its key there. The keys of mappings keep
    their type: a list of pairs."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"pairs": [[key, split(part, tensors, f"{path}/{key}")] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"items": [split(part, tensors, f"{path}/{i}") for i, part in enumerate(value)]}
    return {"value": value}


def joined(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `split`; tuples come back as lists."""
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "pairs" in value:
        return {key: joined(part, tensors) for key, part in value["pairs"]}
    if "items" in value:
        return [joined(part, tensors) for part in value["items"]]
    return value["value"]
