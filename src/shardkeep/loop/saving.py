"""A loop's checkpoints: the rows and the loop's own dense state of one step boundary, saved and loaded."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import CheckpointError, RemoteError, UserError
from shardkeep.base.files import atomic_write
from shardkeep.base.logs.log import EventLog
from shardkeep.base.machine.versions import versions
from shardkeep.base.settings import DAY_S
from shardkeep.loop.filling import checked_rows, write_rows
from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints, checkpoint_in
from shardkeep.ps.checkpoints.probe import write_token
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.transport.lasting import LastingTransport
from shardkeep.ps.wire.admin import CheckFolder, Done, LoadRows
from shardkeep.run.checkpoints import checkpoints_of
from shardkeep.run.trained import config_of
from shardkeep.workers.checkpoint.rank_state import load_rank_state, rank_state
from shardkeep.workers.checkpoint.tower_state import TowerState, read_tower
from shardkeep.workers.checkpoint.writer import CheckpointWriter, Contents
from shardkeep.workers.config import CheckpointConfig
from shardkeep.workers.dense.state import split

MEET_S = 1800.0
"""Seconds without a row of a server in which the trainers must come to the same call."""
ALL = 1_000_000
"""More checkpoints than anybody keeps."""

_log = EventLog("custom")


class LoopCheckpoints:
    """Saves and loads with all trainers of a loop. Every trainer makes the same calls.

    Args:
        control: The trainers meet through it; None = there is one trainer.
        folder: The job's checkpoints; None = there are none.
        num_trainers: Of the job.
        seed: Of the job.
        lasting: What sends pushes again after deaths; None = nothing does.
        samples: Returns the samples of all steps so far; 0 = not known.
    """

    def __init__(
        self,
        rows: RowClient,
        control: ControlClient | None,
        folder: Path | None,
        *,
        num_trainers: int,
        seed: int,
        lasting: LastingTransport | None = None,
        samples: Callable[[], int] = int,
    ) -> None:
        self._lasting, self._samples = lasting, samples
        self._rows, self._control, self._num_trainers, self._seed = rows, control, num_trainers, seed
        self._points = 0
        self._saves_when_stopped = False
        self._folder = folder
        self._writer: CheckpointWriter | None = None

    def checkpoint(self, step: int, dense_state: Any) -> None:
        """Begins the job's checkpoint; a thread of rank 0 writes it while training continues."""
        if self._folder is None:
            raise UserError("checkpoint: this client has no run folder; allowed: save(DIR)")
        if self._writer is None:
            try:
                self._check_seen(self._folder)
            except CheckpointError as error:  # writing fails, too, and training continues
                _log.warning(str(error))
            config = CheckpointConfig(every_steps="off")
            self._writer = CheckpointWriter(Checkpoints(self._folder), config, self._rows.calls, tell=self._tell)
        self._begin(self._writer, self._folder, step, dense_state)

    def save(self, folder: Path, step: int, dense_state: Any) -> None:
        """Writes a checkpoint into a folder; blocks until it is complete. Raises CheckpointError."""
        config = CheckpointConfig(every_steps="off", keep=ALL)
        writer = CheckpointWriter(Checkpoints(folder), config, self._rows.calls, folder=str(folder))
        self._check_seen(folder)
        self._begin(writer, folder, step, dense_state)
        writer.wait()
        failed = [record["text"] for record in writer.records if "bytes" not in record]
        self._meet()
        if failed:
            raise CheckpointError(f"save: {failed[0]}")

    def restore(self, folder: Path, begin: Callable[[int], None]) -> tuple[int, Any]:
        """Fills the servers' empty tables. Returns the step and the dense state. Raises UserError, CheckpointError.

        `begin`: takes the samples of the steps before."""
        checkpoint = checkpoint_in(folder)
        if checkpoint is None and (folder / "config.yaml").is_file():
            checkpoint = checkpoints_of(config_of(folder), folder).latest()
        if checkpoint is None:
            raise UserError(
                f"restore: {folder} has no checkpoint; allowed: a run, its checkpoints, or the folder of one"
            )
        self._meet()
        if not self._rows.rank:
            self._load_rows("restore", checkpoint.folder.parent, checkpoint.step)
        self._meet()
        state = self.resume(checkpoint)
        begin(samples_of(checkpoint))
        if self._folder is not None:
            self.checkpoint(checkpoint.step, state)  # replaced servers look nowhere else
            self.wait()
        return checkpoint.step, state

    def fill(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Fills the servers' empty tables with rows of trainer 0. Raises UserError, CheckpointError."""
        tables = list(self._rows.tables.values())
        checked_rows(tables, rows)
        self._meet()
        if not self._rows.rank:
            with contextlib.ExitStack() as stack:
                found = self._folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="shardkeep-"))
                try:
                    write_rows(tables, rows, Checkpoints(found))
                except OSError as error:
                    raise CheckpointError(f"fill: {error.filename or found}: {error.strerror or error}") from error
                self._load_rows("fill", Path(found), 0)
        self._meet()

    def resume(self, checkpoint: Checkpoint) -> Any:
        """Begins at a checkpoint whose rows the servers have: takes its residuals. Returns the dense state."""
        load_rank_state(self._rows, None, checkpoint, rank=self._rows.rank, world_size=self._num_trainers)
        self._rows.pushes.restart(checkpoint.step)
        if self._lasting is not None:
            self._lasting.begin(checkpoint.step)
        return read_tower(checkpoint)

    def meet_while_stopping(self) -> None:
        """From here on the trainers also meet while the job stops: all of them have agreed to save then."""
        self._saves_when_stopped = True

    def wait(self) -> None:
        """Blocks until the job's checkpoint under way is written."""
        if self._writer is not None:
            self._writer.wait()

    def lacks(self, step: int) -> str:
        """Why the last checkpoint that the loop began is not there; "" = it is, or there was none. Tries again if no
        step has followed; blocks."""
        if self._writer is None:
            return ""
        self._writer.again(step)
        return self._writer.failure and f"the last checkpoint is not saved: {self._writer.failure}"

    def _begin(self, writer: CheckpointWriter, folder: Path, step: int, dense_state: Any) -> None:
        """Blocks until every trainer has called it and the state of this step boundary is fixed."""
        rank = self._rows.rank
        state = _copied(dense_state) if not rank else ({}, {"value": None})
        writer.wait()
        self._rows.fence(step)
        mine = rank_state(self._rows, None)
        if rank:
            self._hand_over(folder, rank, mine)
        self._meet()
        if not rank:
            began = time.perf_counter()
            try:
                contents = Contents(step, self._facts(), state, self._taken_over(folder, mine))
            except Exception as error:
                writer.give_up(step, error)
            else:
                writer.begin(contents, began)
        self._meet()

    def _load_rows(self, call: str, folder: Path, step: int) -> None:
        try:
            self._rows.calls.ask(LoadRows(str(folder), step, self._rows.num_servers), Done, DAY_S)
        except RemoteError as error:
            raise CheckpointError(f"{call}: {error}") from error

    def _hand_over(self, folder: Path, rank: int, state: Bytes) -> None:
        """Gives rank 0 what only this trainer knows; without it, rank 0 gives the checkpoint up."""
        if not state.size:
            return
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(folder / f".rank-{rank}", state.tobytes())

    def _taken_over(self, folder: Path, mine: Bytes) -> list[Bytes]:
        states = [mine]
        for rank in range(1, self._num_trainers):
            path = folder / f".rank-{rank}"
            found = path.read_bytes() if mine.size else b""
            path.unlink(missing_ok=True)
            states.append(np.frombuffer(found, dtype=np.uint8))
        return states

    def _facts(self) -> dict[str, Any]:
        return {
            "loop": True,
            "samples": self._samples(),
            "servers": self._rows.num_servers,
            "workers": self._num_trainers,
            "seed": self._seed,
            "versions": versions(),
        }

    def _check_seen(self, folder: Path) -> None:
        """Raises CheckpointError or RemoteError where the servers do not see a folder of this trainer."""
        if not self._rows.rank:
            token = write_token(folder)
            self._rows.calls.ask(CheckFolder(token, str(folder)), Done)

    def _meet(self) -> None:
        """Blocks until every trainer has come to this call."""
        self._points += 1
        if self._control is not None and self._num_trainers > 1:
            self._control.meet(self._points, limit_s=MEET_S, stopping=self._saves_when_stopped)

    def _tell(self, record: dict[str, Any]) -> None:
        if "bytes" not in record:
            _log.warning(str(record["text"]))
        if self._control is not None:
            self._control.report("phase", {"phase": "checkpoint", **record})


def samples_of(checkpoint: Checkpoint | None) -> int:
    """The samples of the steps before a checkpoint; 0 = not known."""
    return 0 if checkpoint is None else int(checkpoint.facts.get("samples", 0))


def _copied(dense_state: Any) -> TowerState:
    """A copy of the state. Raises UserError."""
    tensors: dict[str, torch.Tensor] = {}
    rest = split(dense_state, tensors)
    try:
        json.dumps(rest)
    except TypeError as error:
        raise UserError(f"dense_state: {error}; allowed: tensors, and what JSON has, in dicts and lists") from error
    return {key: t.to("cpu", copy=True).contiguous() for key, t in tensors.items()}, rest
