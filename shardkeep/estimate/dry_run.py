"""A job's data path without its tower: some steps' ids are drawn from the data, pulled and pushed within this process.

What it measures is what a real job does, by the same client, messages and servers. Starts no process, saves nothing.
"""
# U = unique ids of a table in one rank's step, R = rows seen, D = embedding dim, S = servers

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Ids
from shardkeep.config import JobConfig
from shardkeep.estimate.rereads import Rereads, rereads
from shardkeep.estimate.table_bytes import TableBytes
from shardkeep.ps.client.request import Request
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import JaggedRows
from shardkeep.ps.placement import server_of
from shardkeep.ps.policy_config import AdmitConfig
from shardkeep.ps.transport.local import LocalTransport
from shardkeep.ps.transport.metered import MeteredTransport, Parts
from shardkeep.roles.server import build_service
from shardkeep.workers.data.samples import Dataset
from shardkeep.workers.data.sampling import StepSlices
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.embeddings.plan import Plan

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
class Played:
    """What was drawn and played.

    `rows`: rows of each table after the job's steps; `counted`: whether all ids were looked at, or only some and the
    rest estimated from how the number grew. `candidates`: ids that are counted and have no row, of tables that count.
    `shares`: of each server (S,), by table. `calls`, `bytes_S`: of one full step over all workers, the bytes by class
    as a Tally has them. `table_bytes`: the parts of the tables in them, by table and class. `ids`, `unique`: per step
    and worker. `rereads`: of the drawn steps, as if they followed one
    another.
    """

    steps: int
    samples: int
    rows: dict[str, float]
    counted: bool
    shares: dict[str, npt.NDArray[np.float64]]
    ids: float
    unique: float
    rereads: Rereads
    calls: float
    bytes_S: dict[str, npt.NDArray[np.floating]]
    table_bytes: dict[str, dict[str, float]]
    candidates: dict[str, float] = field(default_factory=dict)


def play(config: JobConfig, tables: Sequence[TableSpec], dataset: Dataset, slices: StepSlices, steps: int) -> Played:
    """Draws steps of the job's first `steps` and plays some of them. Seconds; blocks."""
    drawn = drawn_steps(slices, steps)
    embeddings = Embeddings(dataset.schema, {table.name: table for table in tables})
    passes = max(1, slices.samples_before(steps) // len(dataset))
    seen = Seen([table.name for table in tables], {table.name: table.admit for table in tables}, passes=passes)
    cast = Cast(config, tables)
    played = {int(drawn[i]) for i in np.linspace(0, len(drawn) - 1, min(len(drawn), PLAYED_STEPS)).round().astype(int)}
    samples = played_samples = 0
    reads = []
    for i, step in enumerate(drawn):
        plans = [
            embeddings.plan(dataset.gather(slices.rows(step, rank)))
            for rank in range(slices.world_size)
            if slices.rank_samples(step, rank)
        ]
        seen.add(plans)
        reads += [(i, rank, plan.unique) for rank, plan in enumerate(plans)]
        samples += slices.samples(step)
        if step in played:
            cast.play(plans)
            played_samples += slices.samples(step)
        seen.mark(i + 1, len(drawn))
    visited = min(slices.samples_before(steps), len(dataset))
    tally, scale = cast.finish(), slices.global_batch / played_samples * slices.world_size / cast.workers
    return Played(
        steps=len(drawn),
        samples=samples,
        rows={t.name: 0.0 if t.freeze else seen.rows_after(t.name, visited / samples) for t in tables},
        candidates={
            table.name: seen.candidates_after(table.name, visited / samples) for table in tables if table.candidates
        },
        counted=samples >= visited,
        shares=seen.shares(max(config.servers, 1)),
        ids=seen.num_ids * slices.global_batch / samples / slices.world_size,
        unique=seen.num_unique * slices.global_batch / samples / slices.world_size,
        rereads=rereads(reads),
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
    if candidates * slices.global_batch <= DRAWN_SAMPLES or candidates <= 4:
        return list(range(candidates))
    count = max(4, DRAWN_SAMPLES // slices.global_batch)  # 4: the growth of the rows needs a quarter, a half and all
    return [int(step) for step in np.linspace(0, candidates, min(count, candidates), endpoint=False)]


class Cast:
    """Servers and workers of the job within this process, the workers by their clients alone."""

    def __init__(self, config: JobConfig, tables: Sequence[TableSpec]) -> None:
        self.workers = min(config.workers, PLAYED_WORKERS)
        here = config.model_copy(update={"workers": self.workers})
        services = [build_service(here, tables, shard=s, generation=0) for s in range(max(config.servers, 1))]
        self._tally = Tally(len(services))
        self.by_table = TableBytes(len(tables))
        handlers = [self.by_table.watching(service.handle) for service in services]
        transport = MeteredTransport(LocalTransport(handlers), self._tally)
        self._clients = [
            RowClient(
                transport,
                tables=tables,
                rank=rank,
                consistency=config.consistency,
                compression=config.compression,
                seed=config.seed,
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
    """The distinct ids of each table among the samples drawn so far, and how their number grew."""

    def __init__(
        self, tables: Sequence[str], admits: Mapping[str, AdmitConfig | None] | None = None, *, passes: int = 1
    ) -> None:
        """`admits`: rules of tables that do not admit every id. `passes`: of the job over its data."""
        self.ids: dict[str, Ids] = {table: np.empty(0, np.int64) for table in tables}
        self.num_ids = self.num_unique = 0
        self._new: dict[str, list[Ids]] = {table: [] for table in tables}
        self._admits, self._passes = {t: admit for t, admit in (admits or {}).items() if admit is not None}, passes
        self._pushes = {table: np.empty(0, np.int64) for table in self._admits}
        self._marks: dict[str, list[float]] = {table: [] for table in tables}
        self._admitted: dict[str, list[float]] = {table: [] for table in self._admits}

    def add(self, plans: Sequence[Plan]) -> None:
        for plan in plans:
            self.num_ids += plan.inverse_N.size
            for table, ids_U in plan.unique.items():
                self.num_unique += ids_U.size
                self._new[table].append(ids_U)

    def mark(self, done: int, steps: int) -> None:
        """Remembers the rows after a quarter, a half and all of the steps."""
        if done in (steps // 4, steps // 2, steps):
            for table, new in self._new.items():
                if table in self._admits:
                    self._count(table, new)
                else:
                    self.ids[table] = np.unique(np.concatenate([self.ids[table], *new]))
                self._marks[table].append(float(self.ids[table].size))
                new.clear()

    def _count(self, table: str, new: Sequence[Ids]) -> None:
        """Adds up the pushes of each id."""
        ids_R, inverse, counts_R = np.unique(
            np.concatenate([self.ids[table], *new]), return_inverse=True, return_counts=True
        )
        known = self.ids[table].size
        counts_R[inverse[:known]] += self._pushes[table] - 1
        self.ids[table], self._pushes[table] = ids_R, counts_R
        self._admitted[table].append(self._rows_of(self._admits[table], counts_R * self._passes))

    def _rows_of(self, admit: AdmitConfig, pushes_R: Ids) -> float:
        """How many ids with so many pushes have a row."""
        if admit.min_count > 1:
            return float((pushes_R >= admit.min_count).sum())
        return float((1.0 - (1.0 - admit.probability) ** pushes_R).sum())

    def rows_after(self, table: str, times: float) -> float:
        """Rows after `times` as many samples: the growth per doubling falls at the same rate as before."""
        return _grown(self._admitted.get(table, self._marks[table]), times)

    def candidates_after(self, table: str, times: float) -> float:
        """Ids without a row after `times` as many samples."""
        return max(0.0, _grown(self._marks[table], times) - self.rows_after(table, times))

    def shares(self, num_servers: int) -> dict[str, npt.NDArray[np.float64]]:
        """Each server's share of each table's rows."""
        counts = {t: np.bincount(server_of(ids_R, num_servers), minlength=num_servers) for t, ids_R in self.ids.items()}
        return {table: counts_S / max(counts_S.sum(), 1) for table, counts_S in counts.items()}


def _grown(marks: Sequence[float], times: float) -> float:
    """A number after `times` as many samples. `marks`: it after a quarter, a half and all of them."""
    if times <= 1.0 or len(marks) < 3:
        return marks[-1]
    first, second, third = marks[-3:]
    if not 0 < first <= second < third:
        return third
    growth, before, doublings = math.log2(third / second), math.log2(second / first), math.log2(times)
    falls = min(1.0, growth / before) if before else 1.0
    steps = doublings if falls > 0.999 else falls * (1.0 - falls**doublings) / (1.0 - falls)
    return float(third * 2.0 ** (growth * steps))
