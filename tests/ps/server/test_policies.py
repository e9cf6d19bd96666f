"""Tables with admission and eviction against plain dicts, over pushes, snapshots, increments and reloads."""

from __future__ import annotations

import functools
import math
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints
from shardkeep.ps.checkpoints.row_stream import count_rows, stream_rows
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import Gradients
from shardkeep.ps.placement import BUCKETS, bucket_of, buckets_of, keys_of
from shardkeep.ps.server.pages import SMALL
from shardkeep.ps.server.snapshot import walk
from shardkeep.ps.server.snapshot.files import load_snapshots, write_snapshot
from shardkeep.ps.server.table import index
from shardkeep.ps.server.table.initializers.config import InitConfig
from shardkeep.ps.server.table.optimizers.adam import AdamConfig
from shardkeep.ps.server.table.optimizers.registry import OPTIMIZERS
from shardkeep.ps.server.table.optimizers.sgd import SgdConfig
from shardkeep.ps.server.table.policies.config import AdmitConfig, EvictConfig
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.examples import examples
from tests.support.marked_tables import Between
from tests.support.one_table import ids_in, records_of
from tests.support.tables import gradients

DIM = 2
LEAST = 64 * BUCKETS
"""The smallest capacity of a table."""
Push = dict[int, float]


@functools.cache
def bucket(id_: int) -> int:
    return int(bucket_of(np.array([id_]))[0])


@functools.cache
def key(id_: int) -> int:
    return int(keys_of(np.array([id_]))[0])


def spec_of(admit: dict[str, Any] | None, evict: dict[str, Any] | None, **more: Any) -> TableSpec:
    return TableSpec(
        name="t",
        dim=DIM,
        optimizer=more.pop("optimizer", SgdConfig(lr=1.0)),
        init=InitConfig(name="zeros"),
        admit=None if admit is None else AdmitConfig(**admit),
        evict=None if evict is None else EvictConfig(**evict),
        **more,
    )


@dataclass
class Row:
    value: float = 0.0
    clock: int = 0
    score: float = 0.0


@dataclass
class Model:
    """What a table with policies does, in plain Python: SGD with rate 1."""

    spec: TableSpec
    rows: dict[int, Row] = field(default_factory=dict)
    counts: dict[int, Row] = field(default_factory=dict)
    evicted: int = 0

    def apply(self, pushes: list[Push], step: int) -> None:
        admit, evict = self.spec.admit, self.spec.evict
        for id_ in sorted({id_ for push in pushes for id_ in push}):
            times = sum(id_ in push for push in pushes)
            if id_ not in self.rows and admit is not None:
                counted = self.counts.setdefault(id_, Row())
                counted.score, counted.clock = counted.score + times, step
                if counted.score < admit.min_count:
                    continue
                del self.counts[id_]
            row = self.rows.setdefault(id_, Row())
            row.value -= float(np.float32(sum(push.get(id_, 0.0) for push in pushes)))
            if evict is not None:
                row.score = float(np.float32(self.score(row, step, evict) + times))
                row.clock = step
        if evict is not None:
            self.expire(self.rows, evict, step)
            self.cut(self.rows, evict, step)
        if admit is not None:
            assert self.spec.candidates is not None and self.spec.candidates.evict is not None
            self.expire(self.counts, self.spec.candidates.evict, step)
            self.cut(self.counts, self.spec.candidates.evict, step)

    def score(self, row: Row, step: int, evict: EvictConfig) -> float:
        return float(row.score * np.exp(math.log(evict.decay) / evict.decay_steps * (step - row.clock)))

    def expire(self, rows: dict[int, Row], evict: EvictConfig, step: int) -> None:
        share, period = step % evict.sweep_steps, evict.sweep_steps
        for id_, row in list(rows.items()):
            if not share * BUCKETS // period <= bucket(id_) < (share + 1) * BUCKETS // period:
                continue
            old = evict.ttl_steps is not None and step - row.clock > evict.ttl_steps
            if old:
                del rows[id_]
                self.evicted += rows is self.rows

    def cut(self, rows: dict[int, Row], evict: EvictConfig, step: int) -> None:
        capacity, by_bucket = (evict.max_rows or 0) // BUCKETS, defaultdict[int, list[int]](list)
        for id_ in rows if capacity else []:
            by_bucket[bucket(id_)].append(id_)

        def rank(id_: int) -> tuple[float, ...]:
            row = rows[id_]
            score = np.float32(self.score(row, step, evict))
            return (score, row.clock, key(id_)) if evict.policy == "lfu" else (row.clock, score, key(id_))

        for inside in by_bucket.values():
            excess = len(inside) - (capacity - capacity // 8) if len(inside) > capacity else 0
            for id_ in sorted(inside, key=rank)[:excess]:
                del rows[id_]
                self.evicted += rows is self.rows


def push_of(push: Push) -> Gradients:
    ids = np.array(sorted(push), dtype=np.int64)
    return gradients({0: (ids, np.array([[push[int(i)]] * DIM for i in ids], np.float32).reshape(-1, DIM))})


def rows_of(shards: list[Tables], t: int = 0) -> dict[int, tuple[float, int, float]]:
    """Value, clock and score of each row; without counters, zeros."""
    found = {}
    for tables in shards:
        table = tables[t]
        records, at = records_of(table.records, table.num_rows), table.layout.first_counter
        ids = ids_in(table.records, table.num_rows).tolist()
        clocks = records.view(np.uint32)[:, at] if table.layout.num_counters else np.zeros(len(ids))
        scores = records[:, at + 1] if table.layout.num_counters else np.zeros(len(ids))
        values = records[:, 2] if table.layout.dim else np.zeros(len(ids))
        rows = zip(ids, values, clocks, scores, strict=True)
        found |= {i: (float(value), int(clock), float(score)) for i, value, clock, score in rows}
    return found


ALL = {"ttl_steps": 20, "decay": 0.9, "decay_steps": 1, "sweep_steps": 3}
SPECS = {
    "ttl": spec_of(None, {"ttl_steps": 3, "sweep_steps": 2}),
    "admit": spec_of({"min_count": 3, "window_steps": 4}, None),
    "few candidates": spec_of({"min_count": 9, "window_steps": 900, "max_candidates": LEAST}, None),
    "lfu": spec_of(None, {"max_rows": LEAST}),
    "lru": spec_of(None, {"max_rows": LEAST, "policy": "lru"}),
    "all": spec_of({"min_count": 2, "window_steps": 6}, {**ALL, "max_rows": LEAST}),
    "int8": spec_of({"min_count": 2}, {"ttl_steps": 5, "sweep_steps": 2, "max_rows": LEAST}, dtype="int8"),
    "bf16": spec_of(None, {"max_rows": LEAST}, dtype="fp16", state_dtype="bf16", optimizer=AdamConfig(lr=0.1)),
}
FEW = np.arange(600_000, dtype=np.int64)
UNIVERSE = np.concatenate([FEW[bucket_of(FEW) < 2], FEW[:50]])
"""Ids of two buckets, about 150 each, and of others."""


class Servers:
    """Some servers with the same pushes, and their checkpoints."""

    def __init__(self, spec: TableSpec, folder: Path, count: int, last: Checkpoint | None = None) -> None:
        self.spec, self.checkpoints, self.last, self.step = spec, Checkpoints(folder), last, 0
        self.shards = [Tables([spec], seed=3, buckets=buckets_of(s, count)) for s in range(count)]
        for s, tables in enumerate(self.shards):
            if last is not None:
                load_snapshots(tables, last, shard=s, num_shards=count)
            tables.changed.follow("" if last is None else last.id)

    def push(self, pushes: list[Push], *, pulls: bool = False) -> None:
        """A step; `pulls`: rows are found by the slots of a pull, not looked up."""
        for s, tables in enumerate(self.shards):
            mine = [{i: g for i, g in push.items() if bucket(i) * len(self.shards) // BUCKETS == s} for push in pushes]
            made = [push_of(push) for push in mine]
            if pulls:
                made = [Gradients(m.sections, m.values, tables.pull(m.sections, np.empty_like(m.values))) for m in made]
            tables.apply(made, step=self.step)
        self.step += 1

    def digest(self) -> list[int]:
        return [sum(tables[t].digest() for tables in self.shards) % (1 << 128) for t in range(len(self.shards[0]))]

    def saved(self, *, increment: bool, complete: bool = True) -> list[int]:
        """The digests at the instant of a checkpoint, which is written while others push."""
        base, step = self.last if increment else None, self.step
        partial, at_mark = self.checkpoints.begin(step), self.digest()
        marks = [tables.snapshot("" if base is None else base.id) for tables in self.shards]
        files = [file for s, mark in enumerate(marks) for file in write_snapshot(mark, partial, shard=s)]
        if complete:
            self.last = self.checkpoints.commit(step, files, {}, base=base)
            for tables in self.shards:
                tables.changed.complete(self.last.id)
        return at_mark

    def loaded(self, count: int) -> Servers:
        other = Servers(self.spec, self.checkpoints.folder, count, self.last)
        other.step = self.step
        return other


def random_push(rng: np.random.Generator, count: int = 40) -> Push:
    return {int(i): float(rng.integers(-3, 4)) for i in rng.choice(UNIVERSE, count, replace=False)}


@every(("number", "name"), enumerate(["admit", "all", "few candidates", "lfu", "lru", "ttl"]))
def test_tables_with_policies_do_as_the_model(tmp_path: Path, number: int, name: str) -> None:
    """One server that looks ids up, or three that find them by the slots of a pull."""
    count, pulls = (1, False) if number % 2 else (3, True)
    spec, rng = SPECS[name], np.random.default_rng(7)
    servers, model = Servers(spec, tmp_path, count), Model(spec)
    for step in range(29):
        pushes = [random_push(rng, rng.integers(1, 60)) for _ in range(1 if pulls else 2)]
        model.apply(pushes, step)
        servers.push(pushes, pulls=pulls)
        if step % 7:
            continue
        have = rows_of(servers.shards)
        assert {id_: row[0] for id_, row in have.items()} == {id_: row.value for id_, row in model.rows.items()}
        if spec.evict is not None:
            assert {i: row[1] for i, row in have.items()} == {i: row.clock for i, row in model.rows.items()}
            scores = {i: pytest.approx(row.score, rel=1e-5) for i, row in model.rows.items()}
            assert {i: row[2] for i, row in have.items()} == scores
        if spec.admit is not None:
            counts = {i: row[1:] for i, row in rows_of(servers.shards, 1).items()}
            assert counts == {i: (row.clock, row.score) for i, row in model.counts.items()}
    assert model.evicted > 20 or spec.evict is None
    assert sum(tables[0].counts().get("evicted_rows", 0) for tables in servers.shards) == model.evicted
    assert name != "few candidates" or sum(tables[1].counts()["evicted_rows"] for tables in servers.shards) > 20


@every(("name", "then", "now"), [("all", 2, 3), ("int8", 3, 1), ("bf16", 1, 1), ("few candidates", 1, 2)])
def test_checkpoints_hold_what_was_there_while_rows_go_and_reloaded_servers_decide_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, then: int, now: int
) -> None:
    servers, rng = Servers(SPECS[name], tmp_path, then), np.random.default_rng(11)
    monkeypatch.setattr(walk, "ROWS_AT_ONCE", 20)
    monkeypatch.setattr(walk, "time", Between(lambda: servers.push([random_push(rng)])))
    for turn in range(6):
        for _ in range(5):
            servers.push([random_push(rng)])
        before = servers.step
        at_mark = servers.saved(increment=turn % 4 > 0, complete=turn % 4 != 2)
        assert servers.step > before + 1
        if turn % 4 == 2:  # the next increment has its changes, too
            continue
        found = servers.loaded(now)
        assert found.digest() == at_mark
        if name in ("all", "few candidates"):
            assert servers.last is not None
            blocks = list(stream_rows(servers.last, "t"))
            rows = [row for block in blocks for row in zip(block.ids_N.tolist(), block.rows_ND[:, 0], strict=True)]
            assert dict(rows) == {i: row[0] for i, row in rows_of(found.shards).items()}
            assert count_rows(servers.last, "t") == len(dict(rows)) == len(rows)
    monkeypatch.undo()
    servers.saved(increment=True)
    found = servers.loaded(now)
    for _ in range(22):
        push = random_push(rng)
        found.push([push])
        servers.push([push])
    assert found.digest() == servers.digest()


# ---- any sequence ----

RULES: list[tuple[dict[str, Any] | None, dict[str, Any] | None]] = [
    (None, None),
    (None, {"ttl_steps": 2, "sweep_steps": 1}),
    ({"min_count": 2, "window_steps": 3}, {"max_rows": LEAST, "policy": "lru"}),
    ({"min_count": 3, "window_steps": 5}, {"ttl_steps": 4, "sweep_steps": 3, "max_rows": LEAST, "decay": 0.5}),
]
FROM_ZEROS = sorted(name for name, plug in OPTIMIZERS.items() if not plug.config.keeps_zeros)
KINDS = [(rows, state) for rows in ("fp32", "fp16", "bf16", "int8") for state in ("fp32", "bf16")]
IDS = st.sets(st.one_of(st.integers(0, 30), st.sampled_from(FEW[bucket_of(FEW) == 0].tolist())), max_size=60)
"""Among them more of one bucket than its capacity."""


class Disturbed(RuleBasedStateMachine):
    """Servers that are saved, reloaded in other numbers and saved again, beside one server that only gets the pushes
    and a dict that knows which ids have rows."""

    @initialize(
        rules=st.sampled_from(RULES), optimizer=st.sampled_from(FROM_ZEROS), kind=st.sampled_from(KINDS),
        count=st.integers(1, 3),
    )  # fmt: skip
    def begin(self, rules: tuple[Any, Any], optimizer: str, kind: tuple[str, str], count: int) -> None:
        rows, state = kind
        if state == "bf16" and optimizer in ("sgd", "rowwise_adagrad", "ftrl"):  # which keep no such state
            state = "fp32"
        self.spec = spec_of(*rules, optimizer=OPTIMIZERS[optimizer].config(), dtype=rows, state_dtype=state)
        self.folder, self.model = tempfile.TemporaryDirectory(), Model(self.spec)
        self.alone, self.servers = (Servers(self.spec, Path(self.folder.name), number) for number in (1, count))

    @rule(pushes=st.lists(IDS, min_size=1, max_size=2), seed=st.integers(0, 1000))
    def push(self, pushes: list[set[int]], seed: int) -> None:
        rng = np.random.default_rng(seed)
        made = [{id_: float(rng.normal()) for id_ in sorted(ids)} for ids in pushes]
        self.model.apply(made, self.alone.step)
        self.alone.push(made)
        self.servers.push(made)

    @rule(increment=st.booleans(), complete=st.booleans())
    def save(self, increment: bool, complete: bool) -> None:
        if self.servers.last is None or self.servers.last.step < self.servers.step:
            self.servers.saved(increment=increment, complete=complete)

    @precondition(lambda self: self.servers.last is not None and self.servers.last.step == self.servers.step)
    @rule(count=st.integers(1, 3))
    def reload(self, count: int) -> None:
        self.servers = self.servers.loaded(count)

    @invariant()
    def same(self) -> None:
        assert self.servers.digest() == self.alone.digest()
        assert set(self.model.rows) == set(rows_of(self.alone.shards))

    def teardown(self) -> None:
        self.folder.cleanup()


TestDisturbed = Disturbed.TestCase
TestDisturbed.settings = examples(40, stateful_step_count=14)


@every("others_come", [False, True], ids=["slots are empty", "slots have other rows"])
@every("late", ["rows moved", "rows went"])
def test_a_late_push_finds_its_rows_though_they_moved_or_went(tmp_path: Path, late: str, others_come: bool) -> None:
    """It remembers slots that now have other rows, or none."""
    remembering, looking = (Servers(SPECS["ttl"], tmp_path, 1) for _ in range(2))
    others, mine = list(range(100)), list(range(100, 130))
    kept = mine if late == "rows moved" else others[:1]
    push = push_of(dict.fromkeys(mine, 3.0))
    for servers in (remembering, looking):
        servers.push([dict.fromkeys(others + mine, 1.0)])
        if servers is remembering:
            pulled = servers.shards[0].pull(push.sections, np.empty_like(push.values))
        for _ in range(6):
            servers.push([dict.fromkeys(kept, 1.0)])
        assert set(rows_of(servers.shards)) == set(kept)
        if others_come:
            servers.push([dict.fromkeys(range(1000, 1200), 1.0)])
    remembering.shards[0].apply([Gradients(push.sections, push.values, pulled)], step=8)
    looking.shards[0].apply([push], step=8)
    assert rows_of(remembering.shards) == rows_of(looking.shards) and remembering.digest() == looking.digest()


def test_tables_hold_what_they_should_while_their_index_shrinks_and_grows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Waves of thousands of ids against a dict of last pushes, with increments in between, and a server that loads
    them."""
    monkeypatch.setattr(index, "SHRINK_FROM_BYTES", 3 * SMALL)
    monkeypatch.setattr(index, "MOVE_AT_LEAST", 16)
    servers, rng = Servers(SPECS["ttl"], tmp_path, 2), np.random.default_rng(5)
    clocks, sizes = dict[int, int](), list[int]()
    for step in range(70):
        count = int(rng.choice([2500, 1200])) if step % 16 < 5 else int(rng.integers(1, 60))
        ids = rng.choice(20_000, count, replace=False).tolist()
        servers.push([dict.fromkeys(ids, 1.0)])
        clocks |= dict.fromkeys(ids, step)
        for id_ in [id_ for id_, clock in clocks.items() if step - clock > 3]:
            if bucket(id_) // (BUCKETS // 2) == step % 2:
                del clocks[id_]
        have = [id_ for tables in servers.shards for id_ in ids_in(tables[0].records, tables[0].num_rows).tolist()]
        assert len(have) == len(clocks) and set(have) == clocks.keys()
        sizes.append(servers.shards[0][0].index.num_entries)
        if step % 7 == 3:
            at_mark = servers.saved(increment=servers.last is not None)
            assert servers.loaded(1).digest() == at_mark
    assert sum(b < a for a, b in pairwise(sizes)) > 3 and max(sizes) > 3 * min(sizes[20:])
