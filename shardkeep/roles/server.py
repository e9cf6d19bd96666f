"""The main of a server: starts, wires and stops the parts of one process. Loads nothing that only workers need."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from shardkeep.base.errors import DeadlineExceeded, TransportError
from shardkeep.base.log import EventLog
from shardkeep.base.machine.allocator import keep_freed_memory
from shardkeep.compression.values.codec import value_codec
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints import Checkpoint, Checkpoints
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.control.grpc.endpoint import Endpoint
from shardkeep.ps.control.records import ANY_STEP, Formation, Span
from shardkeep.ps.rpc.group import RpcGroup  # noqa: F401 - loads torch RPC while the other roles start
from shardkeep.ps.shard.journal.journal import Journal
from shardkeep.ps.shard.service import ShardService
from shardkeep.ps.shard.snapshot.files import load_snapshots
from shardkeep.ps.wire.message import Bytes
from shardkeep.roles.departure import Departure
from shardkeep.roles.membership import (
    Membership,
    control_bytes,
    end_when_the_job_failed,
    join_group,
    kept_while_useful,
    leave_if_due,
    loaded_kernels,
    process_facts,
    replaced_folder,
    tried_while_leaving,
    watched_sockets,
)
from shardkeep.run.checkpoints import checkpoints_of, resumed_from
from shardkeep.run.storage import kept_at, missed, why_unseen, with_checkpoints

if TYPE_CHECKING:
    from shardkeep.workers.timing.profiling import Profile

_log = EventLog("roles")


def run_server(
    coordinator: Endpoint, *, index: int, advertise: str, folder: Path, kernels_s: float, departure: Departure
) -> int:
    """A server's life; returns 0 when the job is completed. Raises why it was not.

    Args:
        folder: The run folder: a profile goes there, what is kept for recovery if the server that this one replaces
            kept it nowhere else, and checkpoints where the config names no other place.
        kernels_s: Seconds it took to compile kernels, for the summary.
        departure: How it leaves when a signal asks it to.
    """
    control = ControlClient(coordinator, role="server", index=index, advertise=advertise)
    end_when_the_job_failed(control)
    with kept_while_useful(control, folder), Membership(control, departure) as config:
        keep_freed_memory()
        kernels_s += loaded_kernels(config, "server")
        with contextlib.closing(_Life(config, control, index, advertise, folder, kernels_s, departure)) as life:
            unseen = why_unseen(control.shared, writes=True)
            formation: Formation | None = control.join(None, span=life.span, kept=kept_at(life.kept), unseen=unseen)
            while formation is not None and (lost := life.serve(formation)) is not None:
                departure.check()
                formation = control.join_again(None, formation, span=life.span, why=lost)
    state = control.state
    if state.state != "completed" and (error := state.error()) is not None:
        raise error
    _log.info("done")
    return 0


class _Life:
    """A server process over the generations of its job."""

    def __init__(
        self,
        config: JobConfig,
        control: ControlClient,
        index: int,
        advertise: str,
        folder: Path,
        kernels_s: float,
        departure: Departure,
    ) -> None:
        self._config, self._control, self._index, self._advertise = config, control, index, advertise
        self._departure = departure
        self._sockets = watched_sockets(control)
        self._kernels_s, self._folder = kernels_s, folder
        self._checkpoints = checkpoints_of(config, folder)
        self.kept: Path | None = None
        self._journal: Journal | None = None
        if config.liveness.restarts and config.journal != "off":
            self.kept = replaced_folder(control, folder)
            self._journal = Journal(self.kept / "journal", sync=config.journal == "fsync")
        self._profile = self._open_profile(folder)
        self._looks = False  # for checkpoints
        self._service: ShardService | None = None
        self._bereft = False  # of updates that the others have seen, since a checkpoint
        self._lost_from, self._why_lost = 0, ""
        if control.before is not None:
            self._settle(control.before)
            self._revive(control.before)

    def _settle(self, formation: Formation) -> None:
        """Takes over where checkpoints are."""
        self._config = with_checkpoints(self._config, formation)
        self._checkpoints = checkpoints_of(self._config, self._folder)
        self._looks = bool(self._config.checkpoint.every_steps or formation.origin)

    def _open_profile(self, folder: Path) -> Profile | None:
        if not self._config.profile.steps:
            return None
        from shardkeep.workers.timing.profiling import open_profile  # a server needs nothing else of this room

        return open_profile(self._config.profile, folder, "server", self._index)

    @property
    def span(self) -> Span:
        """Where this server could go on. One that lost updates since a checkpoint follows the others, but for `sync`;
        one that lost all of them has them begin anew."""
        if self._service is None:
            return Span()
        first, last = self._service.life.span
        lost_from = None
        if self._bereft and not self._service.applier.gate.stages:
            first, last, lost_from = 0, ANY_STEP, self._lost_from
        saved = self._checkpoints.last_step() if self._looks else -1
        return Span(first, last, holds=True, saved=saved, lost_from=lost_from, why=self._why_lost)

    def serve(self, formation: Formation) -> str | None:
        """Serves one generation, to the end of the job or of the generation: then how it was lost."""
        self._settle(formation)
        if self._service is None or formation.restores:
            self._service = None  # before another one takes as much memory
            if self._journal is not None:
                self._journal.clear()
                self._journal.build_on(formation.start_step)
            self._service = self._build(formation.tables, resumed_from(self._checkpoints, formation.start_step))
        self._bereft, self._why_lost = False, ""
        service = self._service
        service.life.begin(formation.generation, formation.start_step)
        try:
            handle = self._handle if self._profile is None else self._profile.led(self._handle)
            transport = join_group(
                self._config, formation, "server", self._index, self._advertise, handle, lost=self._control.lost
            )
        except TransportError as error:
            if not self._config.liveness.restarts:
                raise
            service.life.suspend(str(error))
            return str(error)
        self._control.update(step=formation.start_step, phase="serving")
        _log.info("serving", generation=formation.generation, tables=len(formation.tables))
        why = f"server {self._index} left"
        try:
            with self._departure.postponed(self._config.liveness.grace_s):
                self._wait(formation.generation)
            why = self._control.state.message or "the job is over"
        finally:
            service.life.suspend(why)
            transport.close()
            self._to_disk()
        return None if self._control.state.over else self._control.state.message

    def _wait(self, generation: int) -> None:
        """Until the job is over or the generation is lost. Raises Leaving when this server alone is to leave."""
        departure, control = self._departure, self._control
        while not control.wait_lost_or_over(generation, unless=lambda: departure.asked):
            control.stop_requested.wait(departure.works_on_s)
            leave_if_due(control, departure, self._to_disk)
            if control.stop_requested.is_set():  # it needs its servers until its end
                control.wait_lost_or_over(generation)
                return

    def _to_disk(self) -> None:
        """Of a server that leaves: the journal."""
        if self._departure.asked and self._journal is not None:
            with tried_while_leaving():
                self._journal.to_disk()

    def close(self) -> None:
        """Ends what serves; a completed job needs nothing that was kept."""
        if self._profile is not None:
            self._profile.close()
        if self._journal is not None:
            self._journal.close()
        if self._control.state.state == "completed" and self.kept is not None:
            shutil.rmtree(self.kept, ignore_errors=True)

    def _revive(self, before: Formation) -> None:
        """Makes this server what the one before was when it died: the last checkpoint, and the journal after it."""
        resumed = self._checkpoints.latest() if self._looks else None
        self._lost_from = 0 if resumed is None else resumed.step
        self._why_lost = self._missing(self._lost_from)
        service = self._service = self._build(before.tables, resumed)
        if self._why_lost and self._journal is not None:
            self._journal.clear()
            self._journal.build_on(self._lost_from)
        records = [] if self._journal is None else self._journal.replay()
        self._bereft = bool(self._why_lost) and resumed is not None
        pushes = service.life.replay(records)
        _log.info("revived", checkpoint=self._lost_from, pushes=pushes, step=service.life.span[1])
        if self._why_lost:
            text = f"server {self._index} lost its updates since step {self._lost_from}: {self._why_lost}"
            self._control.report("event", {"text": text, "lost_from": self._lost_from})
            with contextlib.suppress(DeadlineExceeded):  # the line of the recovery tells it, if it comes in time
                self._control.flush()

    def _missing(self, step: int) -> str:
        """What the checkpoint of `step` lacks to make this server what the one before was; "" = nothing."""
        if self._journal is None:
            return f"server {self._index} keeps no journal (journal: off)"
        if not self._journal.size_bytes:
            return missed(self._control, "its journal")
        if self._journal.base <= step:
            return ""
        return (
            f"the journal of server {self._index} begins after the checkpoint of step {self._journal.base}, which is "
            f"missing in {self._checkpoints.folder}"
        )

    def _build(self, tables: Sequence[TableSpec], resumed: Checkpoint | None) -> ShardService:
        service = build_service(
            self._config,
            tables,
            shard=self._index,
            generation=0,
            checkpoints=self._checkpoints,
            resumed=resumed,
            journal=self._journal,
        )
        service.process = lambda: (
            process_facts(self._kernels_s) | {"control_bytes": control_bytes(self._control, self._sockets)}
        )
        return service

    def _handle(self, *messages: Bytes) -> Future[Bytes]:
        assert self._service is not None
        return self._service.handle(*messages)


def build_service(
    config: JobConfig,
    tables: Sequence[TableSpec],
    *,
    shard: int,
    generation: int,
    checkpoints: Checkpoints | None = None,
    resumed: Checkpoint | None = None,
    journal: Journal | None = None,
) -> ShardService:
    """Server `shard` of the job, empty, or with its rows of a checkpoint. Raises CheckpointError."""
    push = config.compression.push
    value_codec(push.values, push.scale)  # loads what decodes it now, not while the first push waits
    service = ShardService(
        shard=shard,
        tables=tables,
        consistency=config.consistency,
        num_workers=config.workers,
        seed=config.seed,
        compression=config.compression,
        generation=generation,
        start_step=0 if resumed is None else resumed.step,
        checkpoints=checkpoints,
        journal=journal,
    )
    if resumed is not None:
        load_snapshots(service.tables, resumed, shard=shard, num_shards=max(config.servers, 1))
    if config.checkpoint.full_every > 1:
        service.tables.changed.follow("" if resumed is None else resumed.id)
    return service
