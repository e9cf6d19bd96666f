"""Rewind: the dense model at the start of the last steps, to go back to when a generation ends in the middle of one.

The states are in memory-mapped files, so that they outlive the process: its replacement resumes with them. They
are for a killed process, not for a machine that lost its power. Each has a checksum; a damaged one counts as not kept.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from shardkeep.base.errors import CheckpointError
from shardkeep.base.files import fill
from shardkeep.base.logs.log import EventLog
from shardkeep.workers.dense.state import joined, split
from shardkeep.workers.dense.tower import Tower
from shardkeep.workers.metrics.binned import BinnedScores

_HEAD = struct.Struct("<8sqqqQ")  # magic, step (-1 = none), bytes of the text, where tensors begin, checksum
_MAGIC = b"SKREWIN2"
_ALIGN = 64
_NONE = -1

_log = EventLog("rewind")


class Rewind:
    """The states of the last `depth` steps of one worker.

    `folder`: None = they are in memory, for this process alone. So they are once files cannot be made; `on_lost` is
    called with the reason then. Raises CheckpointError when the folder cannot be used."""

    def __init__(self, folder: Path | None, *, depth: int, on_lost: Callable[[str], None] = lambda _why: None) -> None:
        self._folder, self._on_lost = folder, on_lost
        self.evaluations = None if folder is None else folder / "evaluations.json"
        """Where `EvaluationHistory` keeps what a replacement needs; None = nowhere."""
        self._slots = [_Slot(None) for _ in range(depth)]
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._slots = [_Slot(folder / f"tower-{number}.state") for number in range(depth)]
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be written ({error.strerror or error})") from error

    def resume_range(self) -> tuple[int, int] | None:
        """The first and the last of the kept steps without a gap between them; None = none is kept.

        Reads all states: a damaged one is logged and forgotten."""
        for slot in self._slots:
            slot.drop_damaged()
        steps = {slot.step for slot in self._slots} - {_NONE}
        if not steps:
            return None
        first = last = max(steps)
        while first - 1 in steps:
            first -= 1
        return first, last

    def keep(self, tower: Tower, scores: BinnedScores | None = None) -> None:
        """Keeps the state at the start of the step that the tower is at, instead of the oldest one."""
        tensors: dict[str, torch.Tensor] = {}
        own = {} if scores is None else {"scores": scores.state()}
        state = split(
            {"tower": tower.state_dict(), "local": tower.sums.compression.memory.local_state_dict()} | own, tensors
        )
        slot = self._slots[tower.step % len(self._slots)]
        try:
            slot.write(tower.step, state, tensors)
        except OSError as error:
            self._on_lost(f"{self._folder}: cannot be written ({error.strerror or error})")
            self._slots = [_Slot(None) for _ in self._slots]
            self._slots[tower.step % len(self._slots)].write(tower.step, state, tensors)

    def take_back(self, tower: Tower, step: int, scores: BinnedScores | None = None) -> None:
        """Gives a tower the state at the start of a step, and what belonged to this rank only. Raises KeyError (it is
        not kept) and CheckpointError (it is damaged)."""
        kept = self._read(step)
        tower.load_state_dict(kept["tower"])
        tower.sums.compression.memory.load_local_state_dict(kept["local"])
        if scores is not None:
            scores.load([kept["scores"]])

    def _read(self, step: int) -> dict[str, Any]:
        slot = self._slots[step % len(self._slots)]
        if slot.step != step:
            raise KeyError(step)
        return dict(slot.read())

    def forget_after(self, step: int) -> None:
        """Forgets the states of later steps: they come again, and may come out otherwise."""
        for slot in self._slots:
            if slot.step > step:
                slot.forget()

    def clear(self) -> None:
        """Forgets all states."""
        self.forget_after(_NONE)
        if self.evaluations is not None:
            self.evaluations.unlink(missing_ok=True)

    def to_disk(self) -> None:
        """Brings the states to disk, so that they outlive the machine as well."""
        for slot in self._slots:
            slot.to_disk()

    def delete(self) -> None:
        """Deletes the files; nothing may be kept afterwards."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class LastStep:
    """The twin of `Rewind` for a model in shards: the model itself is the only state that is kept.

    It is at the start of a step until all ranks have summed its gradients, so a generation that ends before can be
    followed at this step. Copies the scores alone."""

    evaluations = None

    def __init__(self) -> None:
        self._step, self._scores = _NONE, list[torch.Tensor]()

    def resume_range(self) -> tuple[int, int] | None:
        """As of `Rewind`: one step, or none."""
        return None if self._step == _NONE else (self._step, self._step)

    def keep(self, tower: Tower, scores: BinnedScores | None = None) -> None:
        """Notes that the tower has reached its step."""
        self._step, self._scores = tower.step, [] if scores is None else [scores.state().clone()]

    def take_back(self, tower: Tower, step: int, scores: BinnedScores | None = None) -> None:
        """Takes the scores back. Raises KeyError (the tower is at another step)."""
        if not step == self._step == tower.step:
            raise KeyError(step)
        if scores is not None:
            scores.load(self._scores)

    def forget_after(self, step: int) -> None:
        """Forgets a later step."""
        self._step = self._step if self._step <= step else _NONE

    def clear(self) -> None:
        """Forgets the step."""
        self._step = _NONE

    def to_disk(self) -> None:
        """Does nothing: a part without the others is of no use."""

    def delete(self) -> None:
        """Does nothing."""


class _Slot:
    """One state in one file, or in memory: head, JSON text, tensors. The head names a step only while all of it is
    there, and the checksum covers all of the file (xxh3, 64 bits: 15 ns a KiB, below the copy's 20)."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._bytes: np.memmap[Any, np.dtype[np.uint8]] | npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._begin = 0
        self._layout: list[tuple[str, int, list[int], str]] = []  # key, offset after `_begin`, shape, dtype
        self._views: list[torch.Tensor] = []
        self.step = self._found()

    def _found(self) -> int:
        """The step of a state that another process left here."""
        if self._path is None or not self._path.exists() or self._path.stat().st_size < _HEAD.size:
            return _NONE
        self._bytes = np.memmap(self._path, np.uint8, "r+")
        magic, step, _, self._begin, _ = _HEAD.unpack_from(self._bytes.data)
        return int(step) if any(magic) else _NONE  # a file of zeros: the process was killed as it made it

    def drop_damaged(self) -> None:
        """Forgets a state that is not what was written."""
        if self.step != _NONE and not self._whole():
            _log.warning("a kept state is damaged and not used", step=self.step, file=self._path)
            self.forget()

    def _whole(self) -> bool:
        magic, step, text, begin, checksum = _HEAD.unpack_from(self._bytes.data)
        return bool(magic == _MAGIC and step == self.step and checksum == self._checksum(step, text, begin))

    def _checksum(self, step: int, text: int, begin: int) -> int:
        """Of the head's numbers, by the seed, and of all that follows the head."""
        seed = xxhash.xxh3_64_intdigest(struct.pack("<qqq", step, text, begin))
        return xxhash.xxh3_64_intdigest(self._bytes[_HEAD.size :].data, seed)

    def write(self, step: int, state: Any, tensors: dict[str, torch.Tensor]) -> None:
        layout = _layout(tensors)
        text = np.frombuffer(json.dumps({"state": state, "layout": layout}).encode(), np.uint8)
        if layout != self._layout or _HEAD.size + text.size > self._begin:
            self._make(layout, tensors, text.size)
        self._mark(_NONE, 0)
        torch._foreach_copy_(self._views, list(tensors.values()))
        self._bytes[_HEAD.size : _HEAD.size + text.size] = text
        self._mark(step, text.size)

    def read(self) -> Any:
        if not self._whole():
            raise CheckpointError(f"{self._path}: damaged: the checksum of the kept state is wrong")
        _, _, size, _, _ = _HEAD.unpack_from(self._bytes.data)
        header = json.loads(self._bytes[_HEAD.size : _HEAD.size + size].tobytes())
        return joined(header["state"], {key: self._view(*place) for key, *place in header["layout"]})

    def forget(self) -> None:
        if self._bytes.size:
            self._mark(_NONE, 0)

    def to_disk(self) -> None:
        if isinstance(self._bytes, np.memmap):
            self._bytes.flush()

    def _make(self, layout: list[tuple[str, int, list[int], str]], tensors: dict[str, torch.Tensor], text: int) -> None:
        """A fresh file with room for these tensors, and for a text that grows a little."""
        self.step, self._layout = _NONE, []
        self._begin = -(-(_HEAD.size + text + text // 4) // _ALIGN) * _ALIGN
        end = layout[-1][1] + list(tensors.values())[-1].nbytes if layout else 0
        if self._path is None:
            self._bytes = np.zeros(self._begin + end, np.uint8)
        else:
            self._path.unlink(missing_ok=True)
            with self._path.open("wb") as file:  # no hole: a full disk is an error here, and a SIGBUS in a mapping
                fill(file.fileno(), self._begin + end)
            self._bytes = np.memmap(self._path, np.uint8, "r+")
        self._views = [self._view(at, shape, dtype) for _, at, shape, dtype in layout]
        self._layout = layout

    def _mark(self, step: int, text: int) -> None:
        self.step = step
        checksum = 0 if step == _NONE else self._checksum(step, text, self._begin)
        _HEAD.pack_into(self._bytes.data, 0, _MAGIC, step, text, self._begin, checksum)

    def _view(self, at: int, shape: list[int], dtype: str) -> torch.Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        part = self._bytes[self._begin + at : self._begin + at + size]
        return torch.from_numpy(part).view(kind).view(shape) if size else torch.empty(shape, dtype=kind)


def _layout(tensors: dict[str, torch.Tensor]) -> list[tuple[str, int, list[int], str]]:
    layout, at = [], 0
    for key, tensor in tensors.items():
        layout.append((key, at, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
        at += -(-tensor.nbytes // _ALIGN) * _ALIGN
    return layout
