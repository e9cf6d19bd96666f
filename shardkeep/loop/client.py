"""EmbeddingClient for a training loop of the user's own: look rows up, backward, apply. Also `connect`, the way of a
trainer into a job whose roles were started by hand. The loop, the model and its optimizer are the user's.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from shardkeep.base.compiling.kernels import load_kernels
from shardkeep.base.errors import ConfigError, JobStopped, TransportError, UserError
from shardkeep.base.log import EventLog
from shardkeep.compression.config import CompressionConfig
from shardkeep.compression.ledger import Ledger
from shardkeep.config import JobConfig
from shardkeep.ps.client.request import Request
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig, LivenessConfig, TableSpec
from shardkeep.ps.control.grpc.addresses import check_exposed
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.transport.local import LocalTransport
from shardkeep.ps.transport.metered import LedgerMeter, MeteredTransport, Traffic
from shardkeep.ps.transport.transport import Transport
from shardkeep.roles.access import endpoint_of
from shardkeep.roles.group import join_group
from shardkeep.roles.kernel_needs import needed_kernels
from shardkeep.roles.membership import Membership
from shardkeep.roles.server import build_service
from shardkeep.workers.embeddings.lookup import Lookup, Wanted, check_lookups, finite_only, read_ids, summed
from shardkeep.workers.summary import state_digest, table_totals

Tables = Sequence[TableSpec]
IdsByTable = Mapping[str, "torch.Tensor | np.ndarray[Any, Any]"]

VERDICT_S = 2.0
"""Seconds the coordinator gets, after a lost message, to say which member was lost."""

_log = EventLog("custom")


class EmbeddingClient:
    """Embedding tables for a PyTorch loop of your own.

        with EmbeddingClient.local([TableSpec(name="user", dim=16)]) as client:
            rows = client.lookup({"user": ids})     # leaves, (*ids.shape, 16)
            loss_of(model(rows["user"])).backward()
            client.apply(rows)                      # the servers' optimizers update the rows; the next step begins

    Get one from `local`, `serve` or `connect`; leave its `with` block (or call `close`) when training is over. One
    thread at a time. `lookup`, `read`, `apply` and `close` block on the servers and raise TransportError when one does
    not answer in time, and a JobError (MemberLost, JobStopped) when the job is over, which then names the cause.
    """

    def __init__(
        self,
        rows: RowClient,
        ledger: Ledger,
        ending: contextlib.ExitStack,
        *,
        start_step: int = 0,
        control: ControlClient | None,
    ) -> None:
        self._rows = rows
        self._ledger = ledger
        self._ending = ending
        self._control = control
        self._open = True
        self._applied: Sequence[Lookup] = ()
        self.step = start_step
        """Steps done; learning-rate schedules and Adam's bias correction go by it."""
        self.dropped_rows = 0
        """Row gradients that held an infinity or a NaN and were therefore not sent."""

    @classmethod
    def local(
        cls,
        tables: Tables,
        *,
        seed: int = 0,
        consistency: ConsistencyConfig | str = "bounded",
        compression: CompressionConfig | None = None,
    ) -> EmbeddingClient:
        """The tables in this process. For trials, tests and debuggers; nothing is saved.

        Args:
            tables: Each with a name, a dim, an optimizer and an initializer.
            seed: Seed of the rows' initial values, and of stochastic rounding.
            consistency: sync, bounded or async, or a ConsistencyConfig.
            compression: Of pushes and pulls; left out = none.
        """
        config = loop_config(servers=0, seed=seed, consistency=consistency, compression=compression)
        tables = checked_tables(tables)
        load_kernels(needed_kernels(config, "server", "client", tables=tables))
        service = build_service(config, tables, shard=0, generation=0)
        transport = LocalTransport([service.handle])
        ending = contextlib.ExitStack()
        ending.callback(service.close, "the client is closed")
        ending.callback(transport.close)
        return cls(*_row_client(config, transport, tables, rank=0, generation=0), ending, control=None)

    @property
    def tables(self) -> list[TableSpec]:
        """The tables, in the order in which they were given."""
        return list(self._rows.tables.values())

    @property
    def rank(self) -> int:
        """This trainer's index, from 0."""
        return self._rows.rank

    @property
    def num_servers(self) -> int:
        return self._rows.num_servers

    def lookup(self, ids: IdsByTable) -> Lookup:
        """Rows for training.

        Args:
            ids: Per table whole numbers of any shape, a tensor or a numpy array; duplicates are welcome, any int64
                is an id. An id never seen before has its initial value, which only an `apply` stores.

        Returns:
            Per table a leaf that requires grad, float32 (*shape, dim), on the ids' device. Several lookups may
            belong to one step.

        Raises:
            UserError: An unknown table, or ids that are not whole numbers.
        """
        wanted, request = self._request("lookup", ids)
        with self._verdict():
            rows = self._rows.pull(self.step, request).result()
        return Lookup(self, self.step, wanted, rows)

    def read(self, ids: IdsByTable) -> dict[str, torch.Tensor]:
        """Rows as they are now, without gradients: for evaluation. Sees everything this trainer has applied.

        Arguments and errors as `lookup`. In `sync` it waits for the other trainers to reach this step."""
        wanted, request = self._request("read", ids)
        with self._verdict():
            self._rows.fence(self.step)
            rows = self._rows.read(request).result()
        return {table: w.gather(rows[table]) for table, w in wanted.items()}

    def apply(self, *lookups: Lookup, scale: float = 1.0) -> None:
        """Pushes the gradients of this step's lookups, summed per row, and begins the next step.

        Without lookups it pushes nothing: the step of a trainer that has no samples. Rows whose gradient is not
        finite are left out and counted in `dropped_rows`.

        Args:
            lookups: What `lookup` returned in this step, after `loss.backward()`.
            scale: Factor of all gradients. Servers add what trainers push: with several, n_rank / n_step makes it the
                mean over all samples. With a GradScaler, 1 / its scale.

        Raises:
            UserError: No gradients, lookups of an earlier step, or applied already.
        """
        self._check_open("apply")
        check_lookups(lookups, owner=self, step=self.step, applied=self._applied)
        found = summed([one.gradients() for one in lookups])
        grads = {table: finite_only(*gradients) for table, gradients in found.items()}
        if dropped := sum(found[table][0].size - ids_U.size for table, (ids_U, _) in grads.items()):
            self.dropped_rows += dropped
            _log.warning("rows with non-finite gradients are not sent", step=self.step, once="non-finite")
        request = self._rows.request({table: ids_U for table, (ids_U, _) in grads.items()})
        scaled = self._rows.gradients(self.step, request)
        for table, (_, grad_UD) in grads.items():
            np.multiply(grad_UD, np.float32(scale), out=scaled[table])
        with self._verdict():
            self._rows.push(self.step, request, scaled)
        self._applied = lookups
        self.step += 1
        if self._control is not None:
            self._control.update(step=self.step, phase="training")

    def summary(self) -> dict[str, Any]:
        """Steps, rows and bytes per table, bytes sent, staleness seen, and a digest of all rows and optimizer slots.

        Blocks for a scan of all rows on the servers. Equal digests mean equal tables, bit for bit."""
        self._check_open("summary")
        with self._verdict():
            self._rows.fence(self.step)
            servers = self._rows.admin.report()
        return {
            "steps": self.step,
            "tables": table_totals(servers),
            "bytes": self._ledger.totals(),
            "staleness": {str(steps): times for steps, times in sorted(self._rows.staleness_seen.items())},
            "dropped_rows": self.dropped_rows,
            "state_digest": state_digest(servers, b""),
        }

    def close(self) -> None:
        """Waits until the servers have applied what was pushed, and leaves. A second call does nothing."""
        self.__exit__(None, None, None)

    def __enter__(self) -> EmbeddingClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            return
        if error is not None:
            self._open = False
            self._ending.__exit__(kind, error, trace)
            return
        with self._ending:
            try:
                with self._verdict():
                    if self._control is not None and self.rank == 0:
                        self._control.report("summary", self.summary())
                    else:
                        self._rows.fence(self.step)
            finally:
                self._open = False

    def _request(self, call: str, ids: IdsByTable) -> tuple[dict[str, Wanted], Request]:
        self._check_open(call)
        if not isinstance(ids, Mapping):
            raise UserError(f"{call}: is given a {type(ids).__name__}; allowed: a dict of table name to ids")
        for table in ids:
            if table not in self._rows.tables:
                known = list(self._rows.tables)
                near = difflib.get_close_matches(str(table), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"the tables are {', '.join(known)}"
                raise UserError(f"{call}: unknown table {table}; {hint}")
        wanted = {table: read_ids(table, values) for table, values in ids.items()}
        return wanted, self._rows.request({table: w.unique_U for table, w in wanted.items()})

    def _check_open(self, call: str) -> None:
        if not self._open:
            raise UserError(f"{call}: the client is closed")
        if self._control is not None and (self._control.failed.is_set() or self._control.stop_requested.is_set()):
            raise self._control.state.error() or JobStopped("the job is over")

    @contextlib.contextmanager
    def _verdict(self) -> Iterator[None]:
        """Turns a lost message into the job's own message, where there is one: who died comes before the symptom."""
        try:
            yield
        except TransportError as error:
            if self._control is not None and error.retryable and self._control.failed.wait(VERDICT_S):
                raise self._control.state.error() or error from error
            raise


def connect(
    coordinator: str | Path,
    index: int = 0,
    tables: Tables | None = None,
    *,
    advertise: str = "127.0.0.1",
    token_file: str | Path | None = None,
    tls: str | Path | None = None,
    insecure_data_plane: bool = False,
    timeout_s: float = 10.0,
) -> EmbeddingClient:
    """Joins a job whose coordinator and servers were started by hand, as its trainer `index`.

    Blocks until all servers and trainers of the job have joined. Every trainer must take the same number of steps.

    Args:
        coordinator: Its run folder, where this process can read it; or HOST:PORT, with `token_file`.
        index: This trainer's place, from 0 to `workers` - 1 of the job's config.
        tables: The tables, the same in every trainer; left out = those named under `tables` in the job's config.
        advertise: This machine's address, as the other members reach it.
        token_file: The job's token, readable by its owner alone; left out = yours for the run folder.
        tls: Folder with ca.pem, cert.pem and key.pem, where the coordinator was given one; left out = no TLS.
        insecure_data_plane: Accept an `advertise` that other machines reach: see docs/security.md.
        timeout_s: Seconds to wait for the coordinator to appear.

    Raises:
        UserError: The tables, the address, the token, the TLS files or the index are wrong.
        JobError: The job failed or was stopped while it formed.
        DeadlineExceeded: Nobody answers at the address.
    """
    specs = None if tables is None else checked_tables(tables)
    check_exposed("--advertise", advertise, accepted=insecure_data_plane)
    endpoint = endpoint_of(str(coordinator), token_file=_path(token_file), tls=_path(tls))
    control = ControlClient(endpoint, role="worker", index=index, advertise=advertise, timeout_s=timeout_s)
    return _joined(control, specs, timeout_s)


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


def _joined(control: ControlClient, specs: Sequence[TableSpec] | None, timeout_s: float) -> EmbeddingClient:
    """Takes the place in the job and forms the group. `specs`: None = the tables of the job's config."""
    index, host = control.member.index, control.member.host
    with contextlib.ExitStack() as stack:
        config = stack.enter_context(Membership(control, wait_s=timeout_s))
        load_kernels(needed_kernels(config, "client"))
        formation = control.join(specs if specs is not None else _tables_of(config))
        transport = join_group(config, formation, "worker", index, host, None)
        stack.callback(transport.close)
        counted = _row_client(config, transport, formation.tables, rank=index, generation=formation.generation)
        return EmbeddingClient(*counted, stack.pop_all(), start_step=formation.start_step, control=control)


def loop_config(
    *, servers: int, seed: int, consistency: ConsistencyConfig | str, compression: CompressionConfig | None
) -> JobConfig:
    """The settings of a job that consists of servers and one trainer. Raises ConfigError."""
    if isinstance(consistency, str):
        if consistency not in ("sync", "bounded", "async"):
            raise ConfigError(f"consistency: {consistency!r}; allowed: sync, bounded, async or a ConsistencyConfig")
        consistency = ConsistencyConfig.model_validate({"mode": consistency})
    return JobConfig(
        name="custom-loop",
        seed=seed,
        servers=servers,
        workers=1,
        consistency=consistency,
        compression=compression or CompressionConfig(),
        liveness=LivenessConfig(restarts=0),  # the loop is the caller's: only the caller could go back a step
    )


def checked_tables(tables: Tables) -> list[TableSpec]:
    """The tables as a list. Raises ConfigError when there are none, or two of one name, or they are not TableSpecs."""
    found = list(tables)
    for table in found:
        if not isinstance(table, TableSpec):
            raise ConfigError(f"tables: holds a {type(table).__name__}; allowed: TableSpec(name=..., dim=..., ...)")
    names = [table.name for table in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"tables: two of them are named {next(n for n in names if names.count(n) > 1)}")
    if not found:
        raise ConfigError("tables: is empty; allowed: at least one TableSpec")
    return found


def _tables_of(config: JobConfig) -> list[TableSpec]:
    names = [name for name in config.tables if name != "default"]
    if not names:
        raise ConfigError("tables: the job's config names none; give them to connect(..., tables=[...])")
    return [config.table(name) for name in names]


def _row_client(
    config: JobConfig, transport: Transport, tables: Tables, *, rank: int, generation: int
) -> tuple[RowClient, Ledger]:
    """A client, and the ledger of its bytes."""
    traffic = Traffic()
    client = RowClient(
        MeteredTransport(transport, LedgerMeter(traffic)),
        tables=tables,
        rank=rank,
        generation=generation,
        consistency=config.consistency,
        compression=config.compression,
        seed=config.seed,
        timeout_s=config.liveness.step_timeout_s,
    )
    return client, traffic.ledger
