"""The dense model's files in a checkpoint: writer and reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from shardkeep.base.errors import CheckpointError
from shardkeep.base.files import atomic_write
from shardkeep.ps.checkpoints import Checkpoint, FileRecord
from shardkeep.workers.dense.state_tree import joined, split
from shardkeep.workers.dense.tower import Tower

_TENSORS, _REST = "tower.safetensors", "tower.json"
_PART = "tower"

TowerState = tuple[dict[str, torch.Tensor], Any]
"""Tensors by their path in the state, and the rest of the state as JSON types."""


def tower_state(tower: Tower) -> TowerState:
    """Copies parameters, buffers, optimizer and scaler."""
    tensors: dict[str, torch.Tensor] = {}
    rest = split(tower.state_dict(), tensors)
    return {key: t.to("cpu", copy=True).contiguous() for key, t in tensors.items()}, rest  # tied weights share memory


def save_tower(state: TowerState, checkpoint: Path) -> list[FileRecord]:
    """Writes a tower's state below `checkpoint`/tower. Returns the files' records. Raises OSError."""
    folder = checkpoint / _PART
    folder.mkdir()
    tensors, rest = state
    save_file(tensors, folder / _TENSORS)
    atomic_write(folder / _REST, json.dumps(rest) + "\n")
    return [FileRecord.of(checkpoint, folder / name) for name in (_TENSORS, _REST)]


def load_tower(tower: Tower, checkpoint: Checkpoint) -> None:
    """Loads the state in a checkpoint into a tower of the same model and config. Raises CheckpointError."""
    paths = {Path(file.path).name: file.check(checkpoint.folder) for file in checkpoint.below(_PART)}
    try:
        tensors = load_file(paths[_TENSORS])
        rest = json.loads(paths[_REST].read_text(encoding="utf-8"))
        tower.load_state_dict(joined(rest, tensors))
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        why = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{checkpoint.folder / _PART}: does not fit the model: {why}") from error
