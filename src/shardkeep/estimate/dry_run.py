"""A job's data path without its tower: some steps' ids are drawn from the data, pulled and pushed within this process.

What it measures is what a real job does, by the same client, messages and servers. Starts no process, saves nothing.
"""
# U = unique ids of a table in one rank's step, R = rows seen, D = embedding dim, S = servers, F = columns of ids

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkeep.assembly.item_side import build_sides
from shardkeep.assembly.service import build_service
from shardkeep.base.arrays import Ids
from shardkeep.config import JobConfig
from shardkeep.estimate.table_bytes import TableBytes
from shardkeep.ps.client.request import Request
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import Catalog, JaggedRows
from shardkeep.ps.placement import server_of
from shardkeep.ps.transport.metered import MeteredTransport, Parts
from shardkeep.ps.transport.transport import LocalTransport
from shardkeep.ps.wire.rows import RowReader
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sampling import StepSlices
from shardkeep.workers.embeddings.kernels import NUM_IDS
from shardkeep.workers.embeddings.plan import Plan
from shardkeep.workers.pipeline import planned

DRAWN_SAMPLES = 1 << 18
"""Samples whose ids are looked at: two seconds for 26 features."""
PLAYED_STEPS = 32
"""Steps that are pulled and pushed."""
PLAYED_WORKERS = 4
"""Workers that are played; more are taken to be like them."""


class Tally:
    """A meter that counts calls, and bytes with what RPC adds by kind and server."""

    def __init__(self, num_servers: int) -> None:
        self.calls = 0
        self.bytes_S: dict[str, npt.NDArray[np.int64]] = defaultdict(lambda: np.zeros(num_servers, np.int64))
        """By server, of `pull`, `pull answer`, `push`, `push answer`. Rows acknowledge the push beside their pull."""

    def book(self, server: int, direction: str, step: int, parts: Parts, *, answer: bool) -> None:
        self.calls += answer  # each call has one
        self.bytes_S[f"{direction} answer" if answer else direction][server] += sum(parts.values())


@dataclass(frozen=True)
class TableRows:
    """How many rows a table has over all servers."""

    rows: float
    shares_S: npt.NDArray[np.float64]
    """Each server's share of them."""
    candidates: float = 0.0
    """Ids that are counted and have no row, of a table that counts."""


@dataclass(frozen=True)
class Played:
    """What was drawn and played.

    `rows`: of each table, by the drawn samples; `counted`: whether these are all samples of the job.
    `calls`, `bytes_S`: of one full step over all workers, the bytes by class as a Tally has them. `table_bytes`: the
    parts of the tables in them, by table and class. `ids`, `unique`: per step and worker. `unpooled`: of each column of
    a sequence the ids per sample.
    """

    steps: int
    samples: int
    rows: dict[str, TableRows]
    counted: bool
    ids: float
    unique: float
    unpooled: dict[str, float]
    calls: float
    bytes_S: dict[str, npt.NDArray[np.floating]]
    table_bytes: dict[str, dict[str, float]]


def play(config: JobConfig, tables: Sequence[TableSpec], data: Data, slices: StepSlices, steps: int) -> Played:
    """Draws steps of the job's first `steps` and plays some of them. Seconds; blocks."""
    drawn = drawn_steps(slices, steps)
    embeddings, item_side = build_sides(config, data, {table.name: table for table in tables})
    visited = slices.samples_before(steps)
    seen, cast = Seen(tables, passes=max(1, visited // len(data.train))), Cast(config, tables)
    played = {int(drawn[i]) for i in np.linspace(0, len(drawn) - 1, min(len(drawn), PLAYED_STEPS)).round().astype(int)}
    samples = played_samples = 0
    for step in drawn:
        plans = [
            planned(embeddings, item_side, data.train.gather(slices.rows(step, rank)), (step, rank))[1]
            for rank in range(slices.world_size)
            if slices.rank_samples(step, rank)
        ]
        seen.add(plans)
        samples += slices.samples(step)
        if step in played:
            cast.play(plans)
            played_samples += slices.samples(step)
    tally, scale = cast.finish(), slices.global_batch / played_samples * slices.world_size / cast.workers
    return Played(
        steps=len(drawn),
        samples=samples,
        rows=seen.rows(max(config.servers, 1)),
        counted=samples >= min(visited, len(data.train)),
        ids=seen.num_ids * slices.global_batch / samples / slices.world_size,
        unique=seen.num_unique * slices.global_batch / samples / slices.world_size,
        unpooled={
            column.name: seen.ids[column.name] / samples
            for group in data.train.schema.sequences
            for column in group.ids
        },
        calls=tally.calls / len(played) * slices.world_size / cast.workers,
        bytes_S={name: bytes_S * scale for name, bytes_S in tally.bytes_S.items()},
        table_bytes={
            table.name: {name: float(bytes_T[t]) * scale for name, bytes_T in cast.by_table.bytes_T.items()}
            for t, table in enumerate(tables)
        },
    )


def drawn_steps(slices: StepSlices, steps: int) -> list[int]:
    """The steps to look at: all of the first epoch where they are few, else some, evenly spread over it."""
    candidates = min(steps, slices.steps_per_epoch)
    count = min(candidates, max(1, DRAWN_SAMPLES // slices.global_batch))
    return [int(step) for step in np.linspace(0, candidates, count, endpoint=False)]


class Cast:
    """Servers and workers of the job within this process, the workers by their clients alone."""

    def __init__(self, config: JobConfig, tables: Sequence[TableSpec]) -> None:
        self.workers = min(config.workers, PLAYED_WORKERS)
        here = config.model_copy(update={"workers": self.workers})
        services = [build_service(here, tables, shard=s, generation=0) for s in range(max(config.servers, 1))]
        self._tally = Tally(len(services))
        self.by_table = TableBytes(len(tables))
        handlers = [self.by_table.watching(service.handle) for service in services]
        rows = RowReader(Catalog(tables), config.compression, Path(config.data.root))
        transport = MeteredTransport(LocalTransport(handlers), self._tally, rows)
        self._clients = [
            RowClient(
                transport,
                tables=tables,
                rank=rank,
                consistency=config.consistency,
                compression=config.compression,
                seed=config.seed,
                import_from=Path(config.data.root),
            )
            for rank in range(self.workers)
        ]
        self._random = np.random.default_rng(0)
        self._requests: list[Request] = []
        self._step = -1

    def play(self, plans: Sequence[Plan]) -> None:
        """Every worker pushes the last step's gradients and pulls this step's rows, as a trainer does."""
        requests = [c.request(plans[r].unique if r < len(plans) else {}) for r, c in enumerate(self._clients)]
        pulls = []
        for client, before, request in zip_longest(self._clients, self._requests, requests):
            if before is None:
                pulls.append(client.pull(self._step + 1, request))
            else:
                grads = self._gradients(client, before)
                pulls.append(client.exchange(self._step, before, grads, self._step + 1, request))
        for pull in pulls:
            pull.result()
        self._requests, self._step = requests, self._step + 1

    def finish(self) -> Tally:
        """Pushes the last step's gradients; what passed."""
        for client, request in zip(self._clients, self._requests, strict=True):
            client.push(self._step, request, self._gradients(client, request))
        for client in self._clients:
            client.wait_acknowledged()
        return self._tally

    def _gradients(self, client: RowClient, request: Request) -> JaggedRows:
        """Any finite ones: a push's size depends on how many rows it has, not on what they are."""
        grads = client.gradients(self._step, request)
        self._random.standard_normal(out=grads.flat, dtype=np.float32)
        return grads


class Seen:
    """The distinct ids of each table among the samples drawn so far, and how often each was pushed."""

    def __init__(self, tables: Sequence[TableSpec], *, passes: int = 1) -> None:
        """`passes`: of the job over its data."""
        self.ids, self.num_ids, self.num_unique = Counter[str](), 0, 0
        self._passes, self._tables = passes, {table.name: table for table in tables}
        self._pushed: dict[str, list[Ids]] = {table.name: [np.empty(0, np.int64)] for table in tables}

    def add(self, plans: Sequence[Plan]) -> None:
        for plan in plans:
            self.ids.update(dict(zip(plan.names, plan.features_FK[:, NUM_IDS].tolist(), strict=True)))
            self.num_ids += plan.inverse_N.size
            for table, ids_U in plan.unique.items():
                self.num_unique += ids_U.size
                self._pushed[table].append(ids_U)

    def rows(self, num_servers: int) -> dict[str, TableRows]:
        """The rows of each table, as its rules let expect."""
        return {name: self._rows_of(table, num_servers) for name, table in self._tables.items()}

    def _rows_of(self, table: TableSpec, num_servers: int) -> TableRows:
        ids_R, pushes_R = np.unique(np.concatenate(self._pushed[table.name]), return_counts=True)
        counts_S = np.bincount(server_of(ids_R, num_servers), minlength=num_servers)
        rows, admit, pushes_R = float(ids_R.size), table.admit, pushes_R * self._passes
        if table.freeze:
            rows = 0.0
        elif admit is not None:
            rows = float((pushes_R >= admit.min_count).sum())
        counted = ids_R.size - rows if table.candidates else 0.0
        return TableRows(rows, counts_S / max(counts_S.sum(), 1), counted)
