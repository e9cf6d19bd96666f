"""What only one rank knows and a checkpoint must hold: gradients it has not sent yet, of rows and of the tower, and its
scores of progressive validation.

Gradients are saved, not sent: a job that resumes from the checkpoint sends them later. With another number of workers
each of the old ranks' states goes to one of the new ranks, which takes their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import CheckpointError
from shardkeep.base.files import atomic_write
from shardkeep.compression.tower.memory import merged
from shardkeep.ps.checkpoints.folder import Checkpoint, FileRecord
from shardkeep.ps.client.row_client import RowClient
from shardkeep.workers.dense.tower import Tower
from shardkeep.workers.metrics.binned import BinnedScores

_PART = "ranks"
_ROWS, _TOWER, _SCORES = "rows/", "tower/", "scores"


def rank_state(client: RowClient, tower: Tower | None, scores: BinnedScores | None = None) -> Bytes:
    """This rank's state, uint8; empty where there is nothing to hold. `tower`: None = of a loop of the user's own."""
    local = {} if tower is None else tower.sums.compression.memory.local_state_dict()
    tensors = {_TOWER + name: t.detach().cpu().contiguous() for name, t in local.items()}
    if client.memory.sends_later:
        tensors |= {_ROWS + key: torch.from_numpy(np.ascontiguousarray(a)) for key, a in client.memory.state().items()}
    if scores is not None:
        tensors[_SCORES] = scores.state()
    if not tensors:
        return np.empty(0, dtype=np.uint8)
    return np.frombuffer(save(tensors), dtype=np.uint8)


def save_rank_states(states: Sequence[Bytes], checkpoint: Path) -> list[FileRecord]:
    """Writes the ranks' states below `checkpoint`/ranks; the files' records. Raises OSError."""
    if not any(state.size for state in states):
        return []
    folder = checkpoint / _PART
    folder.mkdir()
    paths = [folder / f"rank-{rank}.safetensors" for rank in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        atomic_write(path, state.tobytes())
    return [FileRecord.of(checkpoint, path) for path in paths]


def load_rank_state(
    client: RowClient,
    tower: Tower | None,
    checkpoint: Checkpoint,
    *,
    rank: int,
    world_size: int,
    scores: BinnedScores | None = None,
) -> None:
    """Gives a rank what the checkpoint holds for it. Raises CheckpointError."""
    files = {Path(file.path).stem: file for file in checkpoint.below(_PART)}
    paths = [files[f"rank-{old}"].check(checkpoint.folder) for old in range(rank, len(files), world_size)]
    rows, towers, scored = [], [], []
    try:
        for path in paths:
            if not path.stat().st_size:
                continue
            with safe_open(path, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            rows.append({key.removeprefix(_ROWS): t.numpy() for key, t in tensors.items() if key.startswith(_ROWS)})
            towers.append({key.removeprefix(_TOWER): t for key, t in tensors.items() if key.startswith(_TOWER)})
            scored += [tensors[_SCORES]] if _SCORES in tensors else []
        if scores is not None:
            scores.load(scored)
        if any(rows):
            client.memory.load(rows)
        if any(towers) and tower is not None:
            tower.sums.compression.memory.load_local_state_dict(merged(towers))
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        why = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{checkpoint.folder / _PART}: does not fit the job: {why}") from error
