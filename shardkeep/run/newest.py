"""The checkpoint of a run that something reads while the job may write newer ones and delete older ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shardkeep.base.errors import CheckpointError
from shardkeep.ps.checkpoints import Checkpoint
from shardkeep.run.trained import Which, checkpoint_of, config_of

T = TypeVar("T")
_ATTEMPTS = 5


def with_checkpoint(run: Path, which: Which, use: Callable[[Checkpoint], T]) -> tuple[Checkpoint, T]:
    """Calls `use` with a checkpoint of the run. Returns the checkpoint and the result.

    If the job deletes the newest checkpoint meanwhile, `use` is called again with a newer one, a few times. Raises
    UserError, CheckpointError, and what `use` raises."""
    config = config_of(run)
    for attempt in range(_ATTEMPTS):
        checkpoint = checkpoint_of(config, run, which)
        try:
            return checkpoint, use(checkpoint)
        except CheckpointError:
            deleted = any(not link.folder.is_dir() for link in checkpoint.chain)
            if which != "last" or not deleted or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")
