"""The dense model's file in an export, writer and reader: safetensors of parameters and buffers.

int8 stores each matrix as integers with a scale per output, which reading undoes: 4 times smaller on disk, as large and
as fast in memory. Everything else keeps its type.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from shardkeep.base.errors import CheckpointError, UserError
from shardkeep.inference.export.manifest import TowerFormat
from shardkeep.workers.checkpoint.tower_state import write_tensors

_SCALE = "::scale"


def write_tower(path: Path, state: Mapping[str, torch.Tensor], format: TowerFormat) -> None:
    """Writes a model's state. Raises UserError for values that the format does not have, OSError."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        value = value.detach().cpu()
        if format == "int8" and value.dtype == torch.float32 and value.dim() == 2:
            if not value.isfinite().all():
                raise UserError(f"--tower int8: {name} has values that are not finite; allowed: fp32")
            scale = value.abs().amax(dim=1, keepdim=True) / 127
            integers = (value / torch.where(scale > 0, scale, 1.0)).round().clamp(-127, 127)
            tensors[name], tensors[name + _SCALE] = integers.to(torch.int8), scale
        else:
            tensors[name] = value.clone(memory_format=torch.contiguous_format)  # tied weights share memory
    write_tensors(tensors, path)


def read_tower(path: Path) -> dict[str, torch.Tensor]:
    """The state, matrices of int8 as float32 again. Raises CheckpointError."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    found = {}
    for name, value in tensors.items():
        if not name.endswith(_SCALE):
            scale = tensors.get(name + _SCALE)
            found[name] = value if scale is None else value.to(torch.float32) * scale
    return found


def load_tower(model: nn.Module, path: Path) -> None:
    """Gives a model the state of a file. Raises CheckpointError where it does not fit."""
    state = read_tower(path)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        why = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{path}: does not fit the model: {why}") from error
