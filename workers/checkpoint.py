"""A worker's part in checkpoints: where all ranks meet, the thread that writes, the dense model's files."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from shardkeep.base.errors import CheckpointError, ConfigError, ShardkeepError
from shardkeep.base.files import atomic_write
from shardkeep.ps.checkpoint_probe import check_token, write_token
from shardkeep.ps.checkpoints import Checkpoint, Checkpoints, FileRecord
from shardkeep.ps.client.row_client import RowClient
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.config import CheckpointConfig
from shardkeep.workers.dense.state_tree import joined, split
from shardkeep.workers.dense.tower import Tower
from shardkeep.workers.rank_state import Bytes, rank_state, save_rank_states

TIMEOUT_S = 1800.0
"""Seconds that all servers together get to write their snapshots."""

AUTO_AFTER_STEPS = 50
"""Steps after which `every_steps: auto` is worked out."""
AUTO_SECONDS, AUTO_JOURNAL_BYTES, AUTO_FEWEST_STEPS = 600.0, 4e9, 100
"""About what may be lost when all is lost, the size that a server's journal may reach, and the least for small jobs."""

_TENSORS, _REST = "tower.safetensors", "tower.json"
_PART = "tower"

TowerState = tuple[dict[str, torch.Tensor], Any]
"""Tensors by where they are in the state, and the rest of it as JSON types."""


class CheckpointWriter:
    """Writes checkpoints of the whole job while training goes on. Every rank makes the same calls; rank 0 leads.

    At a step boundary all ranks meet for as long as it takes to mark the servers' rows and to copy the tower. A thread
    of rank 0 then writes: one checkpoint at a time.

    Args:
        facts: What the manifest tells of the job at a step, JSON types; asked at the step boundary.
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
        self._writing: threading.Thread | None = None
        self._written: deque[dict[str, Any]] = deque()
        self._every = None if config.every_steps == "auto" else config.every_steps  # None = not worked out yet
        self._began = (0, time.perf_counter())
        self._journals: list[int] = []
        self._left = False
        self._base: Checkpoint | None = None  # the newest complete one, if increments are wanted

    def open(self, start_step: int) -> None:
        """Makes sure that the folder is this job's and that all servers and workers see it. Every rank calls it. Raises
        ConfigError (it holds later checkpoints than the step at which the job starts), CheckpointError or RemoteError.
        """
        self._begin_counting(start_step)
        token = "" if self._collective.rank else self._sign(start_step)
        token = str(self._collective.broadcast_object(token, purpose="agreements"))
        if self._collective.rank:
            check_token(self._checkpoints.folder, token)  # it reads its state there
        else:
            self._base = self._newest()

    def _sign(self, start_step: int) -> str:
        """Rank 0's part in `open`; the token by which others know the folder."""
        newest = max((step for step, _ in self._checkpoints.complete()), default=0)
        if newest > start_step:
            raise ConfigError(
                f"checkpoint.dir: {self._checkpoints.folder} holds step {newest} of another run, and this one starts "
                f"at step {start_step}; allowed: another folder, or --resume of that run"
            )
        token = write_token(self._checkpoints.folder)
        self._client.admin.check_folder(token)
        return token

    def open_again(self, start_step: int, before: CheckpointWriter | None) -> bool:
        """Goes on after the generation that `before` wrote in; whether the step that it begins with has a checkpoint.
        Every rank calls it."""
        self._begin_counting(start_step)
        mine = self._every if before is None else before._every
        asked = torch.tensor([-1 if mine is None else mine])
        known = int(self._collective.all_gather(asked, purpose="agreements").max())
        self._every = None if known < 0 else known
        if self._collective.rank == 0:
            self._base = self._newest()
        has = start_step in (step for step, _ in self._checkpoints.complete())
        return bool(self._collective.broadcast_object(has, purpose="agreements"))

    def _newest(self) -> Checkpoint | None:
        """The checkpoint that an increment could build on; None where no increments are wanted."""
        if self._config.full_every == 1:
            return None
        try:
            found = self._checkpoints.latest()
            if found is not None:
                found.check_sizes()
        except CheckpointError:  # the next one holds all rows
            return None
        return found

    def _base_at(self, step: int) -> Checkpoint | None:
        """What the checkpoint of a step builds on; None = it is to hold all rows."""
        base = self._base
        if base is None or base.step >= step or len(base.chain) >= self._config.full_every:
            return None
        return base

    def _begin_counting(self, step: int) -> None:
        """From here on is counted what `every_steps: auto` depends on."""
        self._began = (step, time.perf_counter())
        if self._every is None and not self._collective.rank:
            self._journals = self._journal_bytes()

    def _journal_bytes(self) -> list[int]:
        return [journal.bytes for journal in self._client.admin.journal_size()]

    def due(self, step: int) -> bool:
        """Whether a checkpoint is taken when `step` steps are done. Every rank asks it for every step; may block."""
        if self._every is None and step >= self._began[0] + AUTO_AFTER_STEPS:
            self._every = int(self._collective.broadcast_object(self._auto(step), purpose="agreements"))
            if not self._collective.rank:
                text = f"one every {self._every} steps from here on"
                self._written.append({"step": step, "every_steps": self._every, "text": text})
        return bool(self._every and step % self._every == 0)

    def _auto(self, step: int) -> int:
        """Rank 0's answer to `every_steps: auto`. That time is in it changes no bit of what is trained."""
        if self._collective.rank:
            return 0
        start, began = self._began
        grown = [now - before for now, before in zip(self._journal_bytes(), self._journals, strict=True)]
        by_time = AUTO_SECONDS * (step - start) / (time.perf_counter() - began)
        by_size = AUTO_JOURNAL_BYTES * (step - start) / max(1, *grown)
        return max(AUTO_FEWEST_STEPS, int(min(by_time, by_size)))

    def begin(self, step: int) -> None:
        """Begins the checkpoint of `step` steps done. Blocks until every rank has called it, an earlier checkpoint is
        written, and the state of this step is noted; training may go on then."""
        waiting = time.perf_counter()
        self.settle()
        waited_s = time.perf_counter() - waiting
        self.finish()
        started = time.perf_counter()  # from here on, none waits for a rank that is slower
        self._client.fence(step)
        # The others' pushes are applied, too, and nobody pushes before the next barrier.
        self._collective.barrier(purpose="agreements")
        ranks = self._collective.gather_arrays(rank_state(self._client, self._tower), purpose="agreements")
        if self._collective.rank == 0:
            self._lead(step, ranks, started, waited_s)
        self._collective.barrier(purpose="agreements")

    def finish(self) -> None:
        """Blocks until no checkpoint is being written any more. Every rank calls it."""
        self.settle()  # its calls have deadlines
        self._collective.barrier(timeout_s=TIMEOUT_S + 60.0, purpose="agreements")

    def settle(self) -> None:
        """Blocks until the thread has ended. For a generation that is lost: its calls fail, and nobody meets."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def leave(self) -> None:
        """Training ends early: a checkpoint under way may still become complete, else it is left as it is, for another
        may take its place. Does not wait; idempotent."""
        self._left = True

    def records(self) -> Iterator[dict[str, Any]]:
        """On rank 0 a record for the user of each checkpoint that was written, or failed, since the last call."""
        while self._written:
            yield self._written.popleft()

    def _lead(self, step: int, ranks: Sequence[Bytes], started: float, waited_s: float) -> None:
        """`started`: when all ranks had come; `waited_s`: seconds before, for an earlier checkpoint to be written."""
        try:
            facts, tower = self._facts(step), tower_state(self._tower)
            base = self._base_at(step)
            self._client.admin.take_snapshot(step, "" if base is None else base.id)
        except Exception as error:  # whatever a model's state does: the job is worth more than a checkpoint
            self._give_up(step, error)
            return
        held_s = waited_s + time.perf_counter() - started

        def write() -> None:
            try:
                done = self._write(step, tower, ranks, facts, base)
            except Exception as error:
                self._give_up(step, error)
                self._base = self._newest()
                return
            seconds, size = time.perf_counter() - started, sum(file.size for file in done.files)
            what = f"{size / 1e6:.1f} MB" + (f" changed since step {done.base.step}" if done.base is not None else "")
            text = f"step {step} in {done.folder.name}: {what}, {seconds:.2f} s, training held up {held_s:.2f} s"
            self._written.append({"step": step, "bytes": size, "seconds": seconds, "held_s": held_s, "text": text})

        self._writing = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._writing.start()

    def _write(
        self, step: int, tower: TowerState, ranks: Sequence[Bytes], facts: dict[str, Any], base: Checkpoint | None
    ) -> Checkpoint:
        """Writes all parts, then the manifest. `base`: what servers were asked for the changes since."""
        partial = self._checkpoints.begin(step)
        snapshots = self._client.admin.write_snapshot(step, timeout_s=TIMEOUT_S)
        files = [FileRecord(**file) for snapshot in snapshots for file in snapshot.files]
        files += save_tower(tower, partial)  # last: servers keep rows until they write them
        files += save_rank_states(ranks, partial)
        if all(snapshot.full for snapshot in snapshots):  # no server knew
            base = None
        done = self._checkpoints.commit(step, files, facts, base=base)
        if self._config.full_every > 1:
            self._base = done
        with contextlib.suppress(ShardkeepError):  # then journals, and the next one, have more than they need
            self._client.admin.checkpoint_saved(step, done.id)
        with contextlib.suppress(OSError):  # the next one tries again
            self._checkpoints.prune(self._config.keep)
        return done

    def _give_up(self, step: int, error: Exception) -> None:
        """Tells why there is no checkpoint, and gives back what it takes on disk and on the servers."""
        if self._left:
            return
        with contextlib.suppress(ShardkeepError):  # a server that is gone has no mark
            self._client.admin.drop_snapshot()
        self._checkpoints.abandon(step)
        why = " ".join(str(error).split()) or type(error).__name__
        self._written.append({"step": step, "text": f"no checkpoint at step {step}: {why}; training goes on"})


def tower_state(tower: Tower) -> TowerState:
    """A copy of parameters, buffers, optimizer and scaler: tensors by where they are, and the rest as JSON types."""
    tensors: dict[str, torch.Tensor] = {}
    rest = split(tower.state_dict(), tensors)
    return {key: t.to("cpu", copy=True).contiguous() for key, t in tensors.items()}, rest  # tied weights share memory


def save_tower(state: TowerState, checkpoint: Path) -> list[FileRecord]:
    """Writes a tower's state below `checkpoint`/tower; the files' records. Raises OSError."""
    folder = checkpoint / _PART
    folder.mkdir()
    tensors, rest = state
    save_file(tensors, folder / _TENSORS)
    atomic_write(folder / _REST, json.dumps(rest) + "\n")
    return [FileRecord.of(checkpoint, folder / name) for name in (_TENSORS, _REST)]


def load_tower(tower: Tower, checkpoint: Checkpoint) -> None:
    """Gives a tower of the same model and config the state in a checkpoint. Raises CheckpointError."""
    paths = {Path(file.path).name: file.check(checkpoint.folder) for file in checkpoint.below(_PART)}
    try:
        tensors = load_file(paths[_TENSORS])
        rest = json.loads(paths[_REST].read_text(encoding="utf-8"))
        tower.load_state_dict(joined(rest, tensors))
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        why = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{checkpoint.folder / _PART}: does not fit the model: {why}") from error
