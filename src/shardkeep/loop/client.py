"""EmbeddingClient: embedding tables for the user's own training loop, model and dense optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

import torch

from shardkeep.base.errors import CheckpointError, ConfigError, JobStopped, UserError
from shardkeep.base.files import local
from shardkeep.base.machine.allocator import keep_freed_memory
from shardkeep.base.machine.forks import outlive_forks
from shardkeep.compression.config import CompressionConfig
from shardkeep.loop.at_exit import at_exit
from shardkeep.loop.demands import IdsOrBags
from shardkeep.loop.joining import Joined, Registered, Sections, Tables, checked_tables, join, join_local, loop_config
from shardkeep.loop.metering import checked_report
from shardkeep.loop.steps import LoopSteps, Pending
from shardkeep.loop.verdict import Verdict
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.wire.admin import GetReport
from shardkeep.workers.embeddings.bags import Bag, Pooled
from shardkeep.workers.embeddings.loop_lookup import Lookup
from shardkeep.workers.reporting.summary import loop_figures, loop_processes, state_digest

B = TypeVar("B")


class EmbeddingClient:
    """Embedding tables for a PyTorch loop of your own.

        with EmbeddingClient.local([TableSpec(name="user", dim=16)]) as client:
            rows = client.lookup({"user": ids})     # leaves, (*ids.shape, 16)
            loss_of(model(rows["user"])).backward()
            client.apply(rows)                      # the servers' optimizers update the rows; the next step begins

    Create one with `local`, `serve` or `connect`. Leave its `with` block, or call `close`, when training is over.
    Use it in one thread at a time. `lookup`, `read`, `apply` and `close` block until the servers answer. They raise
    TransportError when a server does not answer in time, and JobError (MemberLost, JobStopped) when the job is over.
    """

    def __init__(self, place: Joined | Registered) -> None:
        outlive_forks()
        keep_freed_memory()
        self._control = place.control
        self._ending = place.ending
        self._open = True
        self._asks = False
        self.num_trainers = place.num_trainers
        self.declared = isinstance(place, Joined)
        """Whether the client has its tables; see `declare`."""
        self._place = place
        if self._control is not None:
            self._ending.callback(at_exit(self))
        if isinstance(place, Joined):
            self._enter(place)

    def _enter(self, joined: Joined) -> None:
        self._rows = joined.rows
        self._ledger = joined.ledger
        self._ending = joined.ending
        self._saving = joined.saving
        self.page = joined.page
        """The address of the job's live page, with its token; None = there is none, or its run folder is not seen
        here."""
        self._resumed = joined.resumed
        self._meter, self._verdict = joined.meter, Verdict(joined.control)
        self._steps = LoopSteps(self, joined.rows, self._meter, self._verdict, joined.start_step)
        self.dense_state = joined.dense_state
        """The loop's own state, of the checkpoint that it resumed from; None = there is none."""
        self.saved = False
        """Whether the loop has called `checkpoint` or `save`."""

    @classmethod
    def local(
        cls,
        tables: Tables,
        *,
        seed: int = 0,
        consistency: ConsistencyConfig | str = "bounded",
        compression: CompressionConfig | None = None,
    ) -> EmbeddingClient:
        """Creates the tables in this process, for trials, tests and debuggers. Saves nothing.

        Args:
            tables: Each with a name, a dim, an optimizer and an initializer.
            seed: Seed of the rows' initial values.
            consistency: "sync", "bounded", "async" or a ConsistencyConfig.
            compression: Compression of pushes and pulls; None = none.

        Raises:
            ConfigError: A setting or a table is wrong.
        """
        return cls(join_local(tables, loop_config(0, seed, consistency, compression)))

    @classmethod
    def serve(
        cls,
        tables: Tables,
        *,
        servers: int = 2,
        seed: int = 0,
        consistency: ConsistencyConfig | str = "bounded",
        compression: CompressionConfig | None = None,
        run_dir: str | Path | None = None,
        restarts: int = 3,
        quiet: bool = False,
        **sections: Unpack[Sections],
    ) -> EmbeddingClient:
        """Creates the tables in server processes on this machine, which run until the client is closed.

            with EmbeddingClient.serve([TableSpec(name="user", dim=16)], servers=2) as client: ...

        At the end of the block, or by `close`, the servers apply all pushes and every process ends. The processes also
        end when the block raises and when this process ends or is killed. Nothing is saved. A server or the coordinator
        that dies is replaced, with all rows: calls take some seconds longer, and in `sync` no bit changes.

        Args:
            tables: Each with a name, a dim, an optimizer and an initializer.
            servers: Number of server processes. A hash of an id selects its server.
            seed: Seed of the rows' initial values.
            consistency: "sync", "bounded", "async" or a ConsistencyConfig.
            compression: Compression of pushes and pulls; None = none.
            run_dir: New folder for logs and summary.json; None = a temporary one, kept only if the servers fail.
            restarts: Deaths of one process in a row, without a step, that are survived; 0 = none, and no journal.
            quiet: Prints nothing, once kernels are compiled. Otherwise stderr has the addresses of page and metrics.
                `client.page` has the first.
            sections: `launch`, `telemetry` and `web` of a job's config: web=WebConfig(page="off").

        Raises:
            UserError: A setting is wrong.
            JobError: A process died and was not replaced. The text names the process and the folder of its log.
        """
        from shardkeep.loop.server_processes import join_served

        for name, given, least in (("servers", servers, 1), ("restarts", restarts, 0)):
            if given < least:
                raise ConfigError(f"{name}: {given}; allowed: {least} or more")
        config = loop_config(servers, seed, consistency, compression, restarts, sections)
        return cls(join_served(config, checked_tables(tables, config), run_dir, quiet=quiet))

    def declare(self, tables: Tables) -> None:
        """Declares the tables of a client of `connect` that has none yet; blocks until all members have joined.

        All trainers call it with the same tables. Raises as `connect`."""
        if not isinstance(self._place, Registered):
            raise UserError(f"declare: the client has its tables: {', '.join(self._rows.tables)}")
        specs = checked_tables(tables)
        self._open = False
        self._place = joined = join(self._place, specs)
        self._enter(joined)
        self._open = self.declared = True

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Refuses what a client without tables does not know, such as its step."""
            if name.startswith("__") or self.__dict__.get("declared", True):
                raise AttributeError(f"EmbeddingClient has no attribute {name!r}")
            torchrec = "of a TorchRec model shard(model, client), or connect(tables=tables_of(model))"
            raise UserError(f"the client has no tables yet; allowed: connect(tables=[...]), client.declare, {torchrec}")

    @property
    def stopping(self) -> bool:
        """Whether somebody has stopped the job, as `shardkeep stop` does. Write a checkpoint then, and leave the loop.

        Ask between two steps. Several trainers learn of it at different steps, so let them agree, by an all-reduce of
        their answers. In a loop that never asks, the next call raises JobStopped."""
        self._asks = True
        self._saving.meet_while_stopping()
        return self._stop_requested

    @property
    def tables(self) -> list[TableSpec]:
        """The tables, in the order of the `tables` argument."""
        return list(self._rows.tables.values())

    @property
    def rank(self) -> int:
        """This trainer's index, from 0."""
        return 0 if self._control is None else self._control.member.index

    @property
    def num_servers(self) -> int:
        return self._rows.num_servers

    @property
    def step(self) -> int:
        """Number of steps done. Learning-rate schedules and Adam's bias correction depend on it."""
        return self._steps.step

    @property
    def dropped_rows(self) -> int:
        """Number of row gradients that were not sent because they contain an infinity or a NaN."""
        return self._steps.dropped_rows

    def lookup(self, ids: IdsOrBags) -> Lookup:
        """Pulls rows for training. One step may have several lookups.

        Args:
            ids: Per table, integers of any shape, as a tensor or a numpy array. Any int64 is an id; ids may repeat. A
                new id gets its initial value, which only `apply` stores. With a Bag per feature this is `pool`.

        Returns:
            Per table, a leaf tensor that requires grad: float32, (*shape, dim), on the device of the ids.

        Raises:
            UserError: A table is unknown, or the ids are not integers.
        """
        self._check_open("lookup")
        return self._steps.lookup("lookup", ids)

    def pool(self, bags: Mapping[str, Bag]) -> Pooled:
        """Pulls rows for training and pools those of each bag, by the kernels of jobs.

        Args:
            bags: Per feature its ids in B bags, the same number of all. Features may share a table.

        Returns:
            Per feature, a tensor that requires grad: float32, (B, dim), on the device of the ids. An empty bag is 0. Of
            bags with `pooling="none"` a row for each id, (N, dim).

        Raises:
            UserError: A table is unknown, or a Bag's parts do not fit each other.
        """
        self._check_open("pool")
        return cast(Pooled, self._steps.lookup("pool", bags))

    def prefetch(self, ids: IdsOrBags, *, step: int | None = None) -> Pending[Lookup]:
        """Requests the rows of a later step, and returns at once.

        The request leaves as early as the consistency mode allows: in `sync` right after `apply` of the step before, in
        `bounded` and `async` up to `staleness` steps before.

        Args:
            ids: As of `lookup` or `pool`.
            step: The step, not before the running one; None = the next one that has no prefetch yet.

        Returns:
            `result()` returns what `lookup` or `pool` would. Call it in its step, and `apply` it there.
        """
        self._check_open("prefetch")
        return self._steps.prefetch(ids, step)

    def ahead(
        self, batches: Iterable[B], ids: Callable[[B], IdsOrBags], *, depth: int = 2
    ) -> Iterator[tuple[B, Lookup]]:
        """Yields each batch with its rows, which were requested up to `depth` batches before.

            for batch, rows in client.ahead(loader, lambda batch: {"user": batch.user}):
                ...
                client.apply(rows)

        Every batch is one step: end it with `apply`, without lookups to skip it.

        Args:
            batches: Any iterable; up to `depth` of its items are held.
            ids: Returns a batch's ids, as of `lookup` or `pool`.
        """
        return self._steps.ahead(batches, lambda batch: self.prefetch(ids(batch)), depth=depth)

    def read(self, ids: IdsOrBags, *, fresh: bool = True) -> dict[str, torch.Tensor]:
        """Pulls rows for evaluation, without gradients. Errors: see `lookup`.

        Args:
            ids: As of `lookup` or `pool`.
            fresh: Include every `apply` of this trainer; in `sync` also those of the others before this step, which
                waits for slower ones to apply. So one trainer may evaluate alone. False = rows as they are now.
        """
        self._check_open("read")
        return self._steps.read(ids, fresh=fresh)

    def apply(self, *lookups: Lookup, scale: float = 1.0, lr_factor: float = 1.0) -> None:
        """Pushes the gradients of this step's lookups, summed per row, and starts the next step.

        A trainer without samples calls it without lookups. Gradients that are not finite are not sent, and counted in
        `dropped_rows`.

        Args:
            lookups: The results of `lookup`, `pool` and `prefetch` for this step, after `loss.backward()`.
            scale: Factor of all gradients. Servers add the gradients of all trainers. For the mean over all samples of
                the step, pass n_rank / n_step, this trainer's share of them. With a GradScaler, multiply by 1 / its
                scale.
            lr_factor: Multiplies the learning rates of the tables in this step, as a schedule does; 1.2e-38 to 3.4e38.
                In `sync`, all trainers pass the same.

        Raises:
            UserError: There are no gradients, a lookup is of an earlier step, or it was applied already.
        """
        self._check_open("apply")
        self._steps.apply(lookups, scale=scale, lr_factor=lr_factor)
        if self._control is not None:
            self._control.update(step=self.step, phase="training")

    def report(self, *, loss: Any = None, samples: int | None = None, eval: Mapping[str, Any] | None = None) -> None:
        """Tells the job's page, metrics and records what only the loop knows. Call it once a step, or less often.

            client.report(loss=loss, samples=len(labels))
            client.report(eval={"auc": auc, "logloss": logloss})

        Args:
            loss: Of the running or the last step, a number; the records have means. A tensor on a GPU is waited for.
            samples: Of this step in this trainer, each time. The other trainers are taken to have as many.
            eval: Metrics of an evaluation, numbers by name. Those of trainer 0 are recorded.

        Raises UserError for something else. In `local`, and without telemetry, nothing is recorded."""
        self._check_open("report")
        self._meter.report(self.step, *checked_report(loss, samples, eval))

    def checkpoint(self, dense_state: Any = None) -> None:
        """Begins a checkpoint of all rows, at `step`, and of the loop's own state; returns while it is written.

        All trainers call it between the same two steps. It goes to the run folder. Trainers that are started again by
        torchrun resume from the newest one: see `dense_state`. A failure to write one is logged on stderr.

        Args:
            dense_state: Of the first trainer: state of model, optimizer, schedule. Tensors and what JSON has, in dicts
                and lists.

        Raises UserError for something else in `dense_state`.
        """
        self._check_open("checkpoint")
        if isinstance(dense_state, int):
            raise UserError(f"checkpoint: {dense_state} is no state; the step is the client's: checkpoint(STATE)")
        self.saved = True
        with self._verdict, self._meter.apart():
            self._saving.checkpoint(self.step, dense_state)

    def save(self, folder: str | Path, dense_state: Any = None) -> None:
        """Writes a checkpoint into a folder that servers and trainers see; blocks until it is complete.

        Called and raises as `checkpoint`, and CheckpointError."""
        self._check_open("save")
        self.saved = True
        with self._verdict, self._meter.apart():
            self._saving.save(Path(local(folder)).absolute(), self.step, dense_state)

    def restore(self, folder: str | Path) -> Any:
        """Resumes from a checkpoint, of any number of servers and trainers. All trainers call it before their first
        step. Returns the dense state. Once trainers were started again, it returns `dense_state`.

        Args:
            folder: The folder of a run, of its checkpoints, or of one of them, or what `save` wrote. The newest counts.

        Raises:
            UserError: There is none, or a step is done.
            CheckpointError: It is damaged, or of other tables.
        """
        if self._empty("restore"):
            path = Path(local(folder)).absolute()
            with self._verdict, self._meter.apart():
                self._steps.step, self.dense_state = self._saving.restore(path, self._meter.begin)
        return self.dense_state

    def fill(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Gives tables rows of your own, such as pretrained embeddings. All trainers call it before their first step.
        Once trainers were started again, it does nothing: the servers have the rows.

        Args:
            rows: Of the first trainer: per table floats (N, dim), the rows of the ids 0 to N - 1. Optimizer state is
                new.

        Raises UserError for rows that do not fit and after a step, CheckpointError where they cannot be written.
        """
        if self._empty("fill"):
            with self._verdict, self._meter.apart():
                self._saving.fill(rows)

    def summary(self, *, digest: bool = False) -> dict[str, Any]:
        """Returns steps, rows and bytes per table, bytes sent and staleness.

        Args:
            digest: Also `state_digest`, of all rows and optimizer slots, which the servers scan: equal digests mean
                equal tables, bit for bit."""
        self._check_open("summary")
        with self._verdict, self._meter.apart():
            self._rows.fence(self.step)
            servers = self._rows.calls.ask(GetReport(digest), dict)
        return self._figures(servers) | ({"state_digest": state_digest(servers, [])} if digest else {})

    def _figures(self, servers: list[dict[str, Any]]) -> dict[str, Any]:
        return loop_figures(self._rows, self._ledger, servers, steps=self.step, dropped_rows=self.dropped_rows)

    def close(self) -> None:
        """Waits until the servers have applied all pushes, then leaves the job. A second call does nothing.

        Raises CheckpointError if the last checkpoint that the loop began could not be written."""
        self.__exit__(None, None, None)

    def __enter__(self) -> EmbeddingClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open or self._in_fork:
            return
        if error is not None or not self.declared:
            self._open = False
            if self.declared:
                self._meter.end()
            self._ending.__exit__(kind, error, trace)
            return
        with self._ending:
            try:
                with self._verdict, self._meter.apart():
                    self._saving.wait()
                    lacks = self._saving.lacks(self.step)
                    self._close(lacks)
            finally:
                self._open = False
        if lacks:
            raise CheckpointError(lacks)

    def _close(self, lacks: str) -> None:
        """Waits until the servers have applied all pushes, and reports what the loop came to, and what it `lacks`."""
        self._rows.fence(self.step)
        control = None if self.rank else self._control
        servers = [] if control is None else self._rows.calls.ask(GetReport(digest=False), dict)
        own = self._meter.end()
        if control is None:
            return
        processes = loop_processes(servers, own.get("step_ms"))
        figures = self._figures(servers) | own | {"loop": True, "processes": processes}
        if self._asks and self._stop_requested:
            control.report("event", {"text": f"stopped at step {self.step}", "phase": "stopped", "figures": figures})
        else:
            control.report("summary", figures | ({"lacks": lacks} if lacks else {}))

    @property
    def _in_fork(self) -> bool:
        """Whether this process is a fork of the client's: torch RPC and gRPC have no threads here."""
        return self._control is not None and self._control.member.pid != os.getpid()

    @property
    def _stop_requested(self) -> bool:
        return self._control is not None and self._control.stop_requested.is_set()

    def _empty(self, call: str) -> bool:
        """Whether the servers' tables are. Raises UserError after a step."""
        self._check_open(call)
        if self._resumed:
            return False
        if self._steps.begun:
            raise UserError(f"{call}: the loop has begun; allowed: before its first step and prefetch")
        return True

    def _check_open(self, call: str) -> None:
        if not self._open:
            raise UserError(f"{call}: the client is closed")
        if self._control is None:
            return
        if self._in_fork:
            why = f"the client is of process {self._control.member.pid}, which was forked"
            raise UserError(f"{call}: {why}; allowed: call it there, or connect in a process that is spawned")
        if self._control.over.is_set() or (self._stop_requested and not self._asks):
            raise self._control.state.error() or JobStopped("the job is over")
