"""The folder of checkpoints that the members of a job agree on, as one member knows it."""

from __future__ import annotations

from pathlib import Path

from shardkeep.config import JobConfig
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.control.records import Formation
from shardkeep.run.checkpoints import checkpoints_of, owned
from shardkeep.run.storage import with_checkpoints


class AgreedCheckpoints:
    """Follows the folder that the members agree on, over the generations of the job.

    Args:
        folder: The run folder.
        writes: Whether this member commits checkpoints: it keeps other jobs out of the folder.
    """

    def __init__(self, config: JobConfig, control: ControlClient, folder: Path, *, writes: bool = False) -> None:
        self.config = config
        """The job's config with this folder."""
        self.checkpoints = checkpoints_of(config, folder)
        self._control = control
        self._folder = folder
        self._writes = writes
        self._looks = False
        if config.checkpoint.dir is not None:
            self._own()

    def follow(self, formation: Formation) -> None:
        """Takes the folder from a formation. Raises as `owned`."""
        config = with_checkpoints(self.config, formation)
        if config != self.config:
            self.config, self.checkpoints = config, checkpoints_of(config, self._folder)
        self._own()
        here = config.checkpoint.dir is None and formation.checkpoints is None and self.checkpoints.folder.is_dir()
        self._looks = bool(config.checkpoint.on or formation.origin or here)  # here: of a loop

    def _own(self) -> None:
        if self._writes:
            run = Path(self._control.run_dir or self._folder)
            self.checkpoints = owned(self.checkpoints, self.config, run, self._control.job)

    @property
    def looks(self) -> bool:
        """Whether this member looks for checkpoints: it knows their folder, and there may be some."""
        return self._looks

    @property
    def saved(self) -> int:
        """The step of the last complete checkpoint; 0 = none, -1 = this member does not look."""
        return self.checkpoints.last_step() if self._looks else -1

    def release(self) -> None:
        """Leaves the folder to other jobs."""
        self.checkpoints.release()
