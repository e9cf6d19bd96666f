"""A worker's part in checkpoints: the dense model as safetensors and JSON, and the step boundary all ranks meet at."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from shardkeep.base.errors import CheckpointError, ConfigError
from shardkeep.base.files import atomic_write
from shardkeep.ps.checkpoints import Checkpoint, Checkpoints, FileRecord
from shardkeep.ps.client import RowClient
from shardkeep.workers.collective import Collective
from shardkeep.workers.config import CheckpointConfig
from shardkeep.workers.tower import Tower

TIMEOUT_S = 1800.0
"""Seconds that all servers together get to write their snapshots."""

_TENSORS, _REST = "tower.safetensors", "tower.json"
_PART = "tower"


class CheckpointWriter:
    """Writes checkpoints of the whole job. Every rank makes the same calls; rank 0 leads.

    Args:
        facts: What the manifest tells of the job at a step, JSON types.
        told: Called on rank 0 with a record of each checkpoint that was written, or not.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        config: CheckpointConfig,
        *,
        client: RowClient,
        tower: Tower,
        collective: Collective,
        facts: Callable[[int], dict[str, Any]],
    ) -> None:
        self._checkpoints = checkpoints
        self._config = config
        self._client = client
        self._tower = tower
        self._collective = collective
        self._facts = facts

    def open(self, start_step: int) -> None:
        """Makes sure that the folder is this job's and that all servers see it. Raises ConfigError (it holds later
        checkpoints than the step at which the job starts), CheckpointError or RemoteError."""
        if self._collective.rank:
            return
        newest = max((step for step, _ in self._checkpoints.complete()), default=0)
        if newest > start_step:
            raise ConfigError(
                f"checkpoint.dir: {self._checkpoints.folder} holds step {newest} of another run, and this one starts "
                f"at step {start_step}; allowed: another folder, or --resume of that run"
            )
        self._client.ask({"ask": "see", "token": self._checkpoints.sign()})

    def due(self, step: int) -> bool:
        """Whether a checkpoint is taken when `step` steps are done."""
        return self._config.every_steps > 0 and step % self._config.every_steps == 0

    def write(self, step: int) -> dict[str, Any] | None:
        """Writes the checkpoint of `step` steps done; on rank 0 a record of it for the user. Blocks until every rank
        has called it and the checkpoint is complete, or has failed: then training goes on, and older ones are as they
        were."""
        started = time.perf_counter()
        self._client.fence(step)
        self._collective.barrier()  # the others' pushes are applied, too, and nobody pushes before the next barrier
        record = self._lead(step, started) if self._collective.rank == 0 else None
        self._collective.barrier(timeout_s=TIMEOUT_S + 60.0)
        return record

    def _lead(self, step: int, started: float) -> dict[str, Any]:
        try:
            partial = self._checkpoints.begin(step)
            files = save_tower(self._tower, partial)
            for answer in self._client.ask({"ask": "snapshot", "step": step}, timeout_s=TIMEOUT_S):
                files += [FileRecord(**file) for file in answer["files"]]
            done = self._checkpoints.commit(step, files, self._facts(step))
        except Exception as error:  # whatever a model's state or a disk does: the job is worth more than a checkpoint
            self._checkpoints.abandon(step)
            why = " ".join(str(error).split()) or type(error).__name__
            return {"step": step, "text": f"no checkpoint at step {step}: {why}; training goes on"}
        with contextlib.suppress(OSError):  # the next one tries again
            self._checkpoints.prune(self._config.keep)
        size, seconds = sum(file.size for file in files), time.perf_counter() - started
        text = f"step {step} in {done.folder.name}: {size / 1e6:.1f} MB, {seconds:.2f} s"
        return {"step": step, "bytes": size, "seconds": seconds, "text": text}


def save_tower(tower: Tower, checkpoint: Path) -> list[FileRecord]:
    """Writes parameters, buffers, optimizer and scaler below `checkpoint`/tower; the files' records. Raises OSError."""
    folder = checkpoint / _PART
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    rest = _split(tower.state_dict(), "", tensors)
    save_file(tensors, folder / _TENSORS)
    atomic_write(folder / _REST, json.dumps(rest) + "\n")
    return [FileRecord.of(checkpoint, folder / name) for name in (_TENSORS, _REST)]


def load_tower(tower: Tower, checkpoint: Checkpoint) -> None:
    """Gives a tower of the same model and config the state in a checkpoint. Raises CheckpointError."""
    paths = {Path(file.path).name: file.check(checkpoint.folder) for file in checkpoint.below(_PART)}
    try:
        tensors = load_file(paths[_TENSORS])
        rest = json.loads(paths[_REST].read_text(encoding="utf-8"))
        tower.load_state_dict(_joined(rest, tensors))
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        why = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{checkpoint.folder / _PART}: does not fit the model: {why}") from error


def _split(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON types, its tensors moved to `tensors` and each replaced by where it is. The keys of mappings
    keep their type: a list of pairs."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()  # tied weights share memory
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"pairs": [[key, _split(part, f"{path}/{key}", tensors)] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"items": [_split(part, f"{path}/{i}", tensors) for i, part in enumerate(value)]}
    return {"value": value}


def _joined(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `_split`; tuples come back as lists."""
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "pairs" in value:
        return {key: _joined(part, tensors) for key, part in value["pairs"]}
    if "items" in value:
        return [_joined(part, tensors) for part in value["items"]]
    return value["value"]
