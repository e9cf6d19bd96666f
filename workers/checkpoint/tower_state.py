"""The dense model's files in a checkpoint: writer and reader."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from shardkeep.base.errors import CheckpointError
from shardkeep.base.files import atomic_write
from shardkeep.ps.checkpoints.folder import Checkpoint, FileRecord
from shardkeep.workers.dense.state import joined, split
from shardkeep.workers.dense.tower import Tower
from shardkeep.workers.models.layers.axes import Match

_TENSORS, _REST = "tower.safetensors", "tower.json"
_PART = "tower"

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Their names in safetensors."""

TowerState = tuple[dict[str, torch.Tensor] | IO[bytes], Any]
"""Tensors by their path in the state, or a file of them, and the rest of the state as JSON types."""


def tower_state(tower: Tower, folder: Path | None = None) -> TowerState:
    """Copies parameters, buffers, optimizer and scaler.

    Of a model in shards every rank calls it. Tensors are gathered one at a time, and rank 0 writes them to a file
    without a name in `folder`, which may raise OSError."""
    tensors: dict[str, torch.Tensor] = {}
    rest = split(tower.state_dict(), tensors)
    if tower.shards is None:
        copies = {key: t.to("cpu", copy=True).contiguous() for key, t in tensors.items()}  # tied weights share memory
        return copies, rest
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # so all of them are aligned
    wholes = map(tower.shards.gathered, ordered.values())
    try:
        return ({} if folder is None else _spooled(ordered, wholes, folder)), rest
    finally:
        for _ in wholes:  # the ranks that do not write, and one that failed to
            pass


def _spooled(tensors: Mapping[str, torch.Tensor], wholes: Iterable[torch.Tensor], folder: Path) -> IO[bytes]:
    """A safetensors file of `wholes`, which look like `tensors`, one in memory at a time. Raises OSError."""
    entries, end = {}, 0
    for key, t in tensors.items():
        start, end = end, end + t.numel() * t.element_size()
        entries[key] = {"dtype": _DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [start, end]}
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - the writer of the checkpoint has it
    file.write(struct.pack("<Q", len(head)) + head)
    for whole in wholes:
        file.write(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return file


def save_tower(state: TowerState, checkpoint: Path) -> list[FileRecord]:
    """Writes a tower's state below `checkpoint`/tower. Returns the files' records. Raises OSError."""
    folder = checkpoint / _PART
    folder.mkdir()
    tensors, rest = state
    if isinstance(tensors, dict):
        write_tensors(tensors, folder / _TENSORS)
    else:
        tensors.seek(0)
        with (folder / _TENSORS).open("wb") as copy:
            shutil.copyfileobj(tensors, copy, 1 << 24)
    atomic_write(folder / _REST, json.dumps(rest) + "\n")
    return [FileRecord.of(checkpoint, folder / name) for name in (_TENSORS, _REST)]


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Writes a safetensors file. Raises OSError, by the number in the text of safetensors."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        code = int((re.findall(r"os error (\d+)", str(error)) or [errno.EIO])[0])
        raise OSError(code, os.strerror(code), str(path)) from error


def read_tower(checkpoint: Checkpoint) -> Any:
    """The state in a checkpoint. Raises CheckpointError."""
    with _fits(checkpoint):
        return _state(checkpoint)


def load_tower(tower: Tower, checkpoint: Checkpoint) -> None:
    """Loads the state in a checkpoint into a tower of the same model and config. Raises CheckpointError."""
    with _fits(checkpoint):
        tower.load_state_dict(_state(checkpoint))


def load_model(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Loads the parameters and buffers in a checkpoint into a model. Raises CheckpointError."""
    with _fits(checkpoint):
        model.load_state_dict(_state(checkpoint)["model"])


def adopt_tower(tower: Tower, checkpoint: Checkpoint, matches: Mapping[str, Match | None] | None) -> list[str]:
    """Gives a new tower the model and the optimizer state of another job.

    The step, the loss scale and what compression keeps stay new.

    Args:
        matches: Of `matches`; None = tensors match where names and shapes are the same.

    Returns: The names of the model's tensors that stay new, except those of new inputs.

    Raises CheckpointError."""
    with _fits(checkpoint):
        theirs, own = _state(checkpoint), tower.state_dict()
        before, now = theirs["model"], own["model"]
        if matches is None:
            matches = {name: Match(name, same=True) if _same(before.get(name), now[name]) else None for name in now}
        whole = torch.Tensor.detach if tower.shards is None else tower.shards.gathered
        taken = {
            name: before[match.name] if match.same else match.moved(before[match.name], whole(now[name]))
            for name, match in matches.items()
            if match is not None
        }
        state = {"state": _slots(tower, theirs, matches)}
        tower.load_state_dict(own | {"model": now | taken, "optimizer": own["optimizer"] | state})
    return [name for name, match in matches.items() if match is None]


def _same(theirs: Any, own: torch.Tensor) -> bool:
    return isinstance(theirs, torch.Tensor) and (theirs.shape, theirs.dtype) == (own.shape, own.dtype)


def _slots(tower: Tower, theirs: Any, matches: Mapping[str, Match | None]) -> dict[int, Any]:
    """The optimizer's state of the parameters that match, by their number in this tower; zeros for new values."""
    buffers = {name.rpartition(".")[2] for name, _ in tower.model.named_buffers()}
    numbers = {name: i for i, name in enumerate(n for n in theirs["model"] if n.rpartition(".")[2] not in buffers)}
    if len(numbers) != sum(len(group["params"]) for group in theirs["optimizer"]["param_groups"]):
        return {}  # which state belongs to which parameter is not known
    state, found = theirs["optimizer"]["state"], dict[int, Any]()
    for i, (name, parameter) in enumerate(tower.model.named_parameters()):
        if (match := matches.get(name)) is None or numbers[match.name] not in state:
            continue
        found[i] = {
            key: value if match.same or not value.dim() else match.moved(value, value.new_zeros(parameter.shape))
            for key, value in state[numbers[match.name]].items()
        }
    return found


def _state(checkpoint: Checkpoint) -> Any:
    paths = {Path(file.path).name: file.check(checkpoint.folder) for file in checkpoint.below(_PART)}
    return joined(json.loads(paths[_REST].read_text(encoding="utf-8")), load_file(paths[_TENSORS]))


@contextlib.contextmanager
def _fits(checkpoint: Checkpoint) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        why = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{checkpoint.folder / _PART}: does not fit the model: {why}") from error
