"""Tables with admission and eviction against plain dicts, over pushes, snapshots, increments and reloads."""

from __future__ import annotations

import functools
import math
import tempfile
from dataclasses import dataclass, field
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
from shardkeep.ps.server.snapshot import walk
from shardkeep.ps.server.snapshot.files import load_snapshots, write_snapshot
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


@functools.cache
def bucket(id_: int) -> int:
    return int(bucket_of(np.array([id_]))[0])


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
    value: float
    clock: int
    score: float


@dataclass
class Model:
    """What a table with policies does, in plain Python: SGD with rate 1."""

    spec: TableSpec
    rows: dict[int, Row] = field(default_factory=dict)
    counts: dict[int, Row] = field(default_factory=dict)
    evicted: int = 0

    def apply(self, pushes: list[dict[int, float]], step: int) -> None:
        admit, evict = self.spec.admit, self.spec.evict
        for id_ in sorted({id_ for push in pushes for id_ in push}):
            times = sum(id_ in push for push in pushes)
            if id_ not in self.rows and admit is not None and admit.min_count > 1:
                counted = self.counts.setdefault(id_, Row(0.0, 0, 0.0))
                counted.score, counted.clock = counted.score + times, step
                if counted.score < admit.min_count:
                    continue
                del self.counts[id_]
            row = self.rows.setdefault(id_, Row(0.0, 0, 0.0))
            row.value -= float(np.float32(sum(push.get(id_, 0.0) for push in pushes)))
            if evict is not None:
                row.score = float(np.float32(self.score(row, step, evict) + times))
                row.clock = step
        if evict is not None:
            self.expire(self.rows, evict, step)
            self.cut(self.rows, evict, step)
        if admit is not None and admit.min_count > 1:
            assert self.spec.candidates is not None and self.spec.candidates.evict is not None
            self.expire(self.counts, self.spec.candidates.evict, step)
            self.cut(self.counts, self.spec.candidates.evict, step)

    def score(self, row: Row, step: int, evict: EvictConfig) -> float:
        log_decay = math.log(evict.decay) / evict.decay_steps
        return float(row.score * np.exp(log_decay * (step - row.clock)))

    def expire(self, rows: dict[int, Row], evict: EvictConfig, step: int) -> None:
        share, period = step % evict.sweep_steps, evict.sweep_steps
        for id_, row in list(rows.items()):
            if not share * BUCKETS // period <= bucket(id_) < (share + 1) * BUCKETS // period:
                continue
            old = evict.ttl_steps is not None and step - row.clock > evict.ttl_steps
            low = evict.delete_below is not None and self.score(row, step, evict) < evict.delete_below
            if (old or low) and id_ not in evict.pinned:
                del rows[id_]
                self.evicted += rows is self.rows

    def cut(self, rows: dict[int, Row], evict: EvictConfig, step: int) -> None:
        capacity = (evict.max_rows or 0) // BUCKETS
        if not capacity:
            return
        ids = np.array(list(rows), dtype=np.int64)
        buckets, keys = bucket_of(ids), keys_of(ids)
        for bucket in np.unique(buckets):
            inside = [int(i) for i in np.flatnonzero(buckets == bucket)]
            if len(inside) <= capacity:
                continue

            def rank(i: int) -> tuple[float, ...]:
                row = rows[int(ids[i])]
                score = np.float32(self.score(row, step, evict))
                return (score, row.clock, keys[i]) if evict.policy == "lfu" else (row.clock, score, keys[i])

            excess = len(inside) - (capacity - capacity // 8)
            for i in sorted(inside, key=rank)[:excess]:
                if int(ids[i]) not in evict.pinned:
                    del rows[int(ids[i])]
                    self.evicted += rows is self.rows


def push_of(push: dict[int, float]) -> Gradients:
    ids = np.array(sorted(push), dtype=np.int64)
    return gradients({0: (ids, np.array([[push[int(i)]] * DIM for i in ids], np.float32).reshape(-1, DIM))})


def rows_of(tables: Tables) -> dict[int, tuple[float, int, float]]:
    """Value, clock and score of each row; without counters, zeros."""
    return contents(tables, 0)


def contents(tables: Tables, t: int) -> dict[int, tuple[float, int, float]]:
    table = tables[t]
    records = records_of(table.records, table.num_rows)
    ids = ids_in(table.records, table.num_rows).tolist()
    at = table.layout.first_counter
    clocks = records.view(np.uint32)[:, at] if table.layout.num_counters else np.zeros(len(ids))
    scores = records[:, at + 1] if table.layout.num_counters else np.zeros(len(ids))
    values = records[:, 2] if table.layout.dim else np.zeros(len(ids))
    return {i: (float(v), int(c), float(s)) for i, v, c, s in zip(ids, values, clocks, scores, strict=True)}


SPECS = {
    "ttl": spec_of(None, {"ttl_steps": 3, "sweep_steps": 2}),
    "score": spec_of(None, {"delete_below": 0.7, "decay": 0.5, "decay_steps": 2, "sweep_steps": 1}),
    "admit": spec_of({"min_count": 3, "window_steps": 4}, None),
    "few candidates": spec_of({"min_count": 9, "window_steps": 900, "max_candidates": LEAST}, None),
    "lfu": spec_of(None, {"max_rows": LEAST, "pinned": (3, 1000)}),
    "lru": spec_of(None, {"max_rows": LEAST, "policy": "lru"}),
    "all": spec_of(
        {"min_count": 2, "window_steps": 6},
        {
            "ttl_steps": 20,
            "decay": 0.9,
            "decay_steps": 1,
            "delete_below": 0.3,
            "sweep_steps": 3,
            "pinned": (5,),
            "max_rows": LEAST,
        },
    ),
}
PACKED = {
    "int8": spec_of({"min_count": 2}, {"ttl_steps": 5, "sweep_steps": 2, "max_rows": LEAST}, dtype="int8"),
    "bf16": spec_of(None, {"max_rows": LEAST}, dtype="fp16", state_dtype="bf16", optimizer=AdamConfig(lr=0.1)),
}
FEW = np.arange(600_000, dtype=np.int64)
UNIVERSE = np.concatenate([FEW[bucket_of(FEW) < 2], FEW[:50]])
"""Ids of two buckets, about 150 each, and of others."""


@every(("number", "name"), enumerate(sorted(SPECS)))
def test_tables_with_policies_do_as_the_model(number: int, name: str) -> None:
    """One server that looks ids up, or three that find them by the slots of a pull."""
    servers, found = (1, False) if number % 2 else (3, True)
    spec, rng = SPECS[name], np.random.default_rng(7)
    shards = [Tables([spec], seed=3, buckets=buckets_of(s, servers)) for s in range(servers)]
    model = Model(spec)
    for step in range(40):
        pushes = [
            {int(i): float(rng.integers(-3, 4)) for i in rng.choice(UNIVERSE, rng.integers(1, 60), replace=False)}
            for _ in range(1 if found else 2)
        ]
        model.apply(pushes, step)
        for s, tables in enumerate(shards):
            mine = [{i: g for i, g in push.items() if bucket(i) * servers // BUCKETS == s} for push in pushes]
            made = [push_of(push) for push in mine]
            if found:
                pulled = tables.pull(made[0].sections, np.empty_like(made[0].values))
                made = [Gradients(made[0].sections, made[0].values, pulled)]
            tables.apply(made, step=step)
        if step % 6 and step < 39:
            continue
        have = {id_: row for tables in shards for id_, row in rows_of(tables).items()}
        assert {id_: row[0] for id_, row in have.items()} == {id_: row.value for id_, row in model.rows.items()}
        if spec.evict is not None:
            assert {i: row[1] for i, row in have.items()} == {i: row.clock for i, row in model.rows.items()}
            scores = {i: pytest.approx(row.score, rel=1e-5) for i, row in model.rows.items()}
            assert {i: row[2] for i, row in have.items()} == scores
        if spec.admit is not None:
            counts = {i: row[1:] for tables in shards for i, row in contents(tables, 1).items()}
            assert counts == {i: (row.clock, row.score) for i, row in model.counts.items()}
    assert model.evicted > 20 or spec.evict is None
    assert sum(tables[0].counts().get("evicted_rows", 0) for tables in shards) == model.evicted
    assert name != "few candidates" or sum(tables[1].counts()["evicted_rows"] for tables in shards) > 20


@dataclass
class Servers:
    """Some servers with the same pushes, and their checkpoints."""

    spec: TableSpec
    checkpoints: Checkpoints
    shards: list[Tables]
    rng: np.random.Generator
    step: int = 0
    last: Checkpoint | None = None

    def push(self) -> None:
        push = {int(i): float(self.rng.integers(-3, 4)) for i in self.rng.choice(UNIVERSE, 40, replace=False)}
        for s, tables in enumerate(self.shards):
            mine = {i: g for i, g in push.items() if bucket(i) * len(self.shards) // BUCKETS == s}
            tables.apply([push_of(mine)], step=self.step)
        self.step += 1

    def digest(self) -> list[int]:
        return [sum(tables[t].digest() for tables in self.shards) % (1 << 128) for t in range(len(self.shards[0]))]

    def saved(self, *, increment: bool, complete: bool = True) -> list[int]:
        """The digests at the instant of a checkpoint, which is written while others push."""
        base = self.last if increment else None
        partial, at_mark = self.checkpoints.begin(self.step), self.digest()
        marks = [tables.snapshot("" if base is None else base.id) for tables in self.shards]
        step = self.step
        files = [file for s, mark in enumerate(marks) for file in write_snapshot(mark, partial, shard=s)]
        if complete:
            self.last = self.checkpoints.commit(step, files, {}, base=base)
            for tables in self.shards:
                tables.changed.complete(self.last.id)
        return at_mark

    def loaded(self, count: int) -> Servers:
        assert self.last is not None
        shards = [Tables([self.spec], seed=3, buckets=buckets_of(s, count)) for s in range(count)]
        for s, tables in enumerate(shards):
            load_snapshots(tables, self.last, shard=s, num_shards=count)
            tables.changed.follow(self.last.id)
        rng = np.random.default_rng(0)
        rng.bit_generator.state = self.rng.bit_generator.state
        return Servers(self.spec, self.checkpoints, shards, rng, self.step, self.last)


def streamed(servers: Servers) -> dict[int, float]:
    """The rows of the newest checkpoint, by the reader of files."""
    assert servers.last is not None
    blocks = list(stream_rows(servers.last, "t"))
    found = {int(i): float(row[0]) for block in blocks for i, row in zip(block.ids_N, block.rows_ND, strict=True)}
    assert count_rows(servers.last, "t") == len(found) == sum(block.ids_N.size for block in blocks)
    return found


FLEETS = [("all", 2, 3), ("int8", 3, 1), ("bf16", 1, 1), ("few candidates", 1, 2)]


@every(("name", "then", "now"), FLEETS)
def test_checkpoints_hold_what_was_there_while_rows_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, then: int, now: int
) -> None:
    spec = (SPECS | PACKED)[name]
    servers = Servers(
        spec,
        Checkpoints(tmp_path),
        [Tables([spec], seed=3, buckets=buckets_of(s, then)) for s in range(then)],
        np.random.default_rng(11),
    )
    for tables in servers.shards:
        tables.changed.follow("")
    monkeypatch.setattr(walk, "ROWS_AT_ONCE", 20)
    for turn in range(8):
        for _ in range(5):
            servers.push()
        monkeypatch.setattr(walk, "time", Between(servers.push))
        before = servers.step
        at_mark = servers.saved(increment=turn % 4 > 0, complete=turn % 4 != 2)
        assert servers.step > before + 1
        if turn % 4 == 2:  # the next increment has its changes, too
            continue
        found = servers.loaded(now)
        assert found.digest() == at_mark
        if name in SPECS:
            assert streamed(found) == {i: row[0] for tables in found.shards for i, row in rows_of(tables).items()}


@every("name", ["all", "lru", "score", "int8"])
def test_a_reloaded_server_decides_as_the_one_before(tmp_path: Path, name: str) -> None:
    spec = (SPECS | PACKED)[name]
    servers = Servers(spec, Checkpoints(tmp_path), [Tables([spec], seed=3)], np.random.default_rng(5))
    servers.shards[0].changed.follow("")
    for turn in range(3):
        for _ in range(6):
            servers.push()
        servers.saved(increment=turn > 0)
        others = servers.loaded(3)
        for _ in range(22):
            others.push()
        state = servers.rng.bit_generator.state
        for _ in range(22):
            servers.push()
        assert others.digest() == servers.digest()
        assert servers.rng.bit_generator.state != state


# ---- any sequence ----

RULES: list[tuple[dict[str, Any] | None, dict[str, Any] | None]] = [
    (None, {"ttl_steps": 2, "sweep_steps": 1}),
    ({"min_count": 2, "window_steps": 3}, {"max_rows": LEAST, "policy": "lru"}),
    ({"min_count": 3, "window_steps": 5}, {"delete_below": 0.6, "decay": 0.5, "decay_steps": 2, "sweep_steps": 2}),
    ({"probability": 0.5}, {"ttl_steps": 4, "sweep_steps": 3, "max_rows": LEAST, "pinned": (0, 1)}),
]
KINDS = [(rows, state) for rows in ("fp32", "fp16", "bf16", "int8") for state in ("fp32", "bf16")]
CROWD = FEW[bucket_of(FEW) == 0].tolist()
"""Ids of one bucket: more than its capacity."""
IDS = st.sets(st.one_of(st.integers(0, 30), st.sampled_from(CROWD)), max_size=60)


class Disturbed(RuleBasedStateMachine):
    """Servers that are saved, reloaded in other numbers and saved again, beside one server that only gets the pushes
    and a dict that knows which ids have rows."""

    @initialize(
        rules=st.sampled_from(RULES), optimizer=st.sampled_from(sorted(OPTIMIZERS)), kind=st.sampled_from(KINDS),
        servers=st.integers(1, 3),
    )  # fmt: skip
    def begin(self, rules: tuple[Any, Any], optimizer: str, kind: tuple[str, str], servers: int) -> None:
        rows, state = kind
        if state == "bf16" and optimizer in ("sgd", "rowwise_adagrad", "ftrl"):  # which keep no such state
            state = "fp32"
        config = OPTIMIZERS[optimizer].config()
        self.spec = spec_of(*rules, optimizer=config, dtype=rows, state_dtype=state)
        self.folder = tempfile.TemporaryDirectory()
        self.alone, self.model, self.step = Tables([self.spec], seed=3), Model(self.spec), 0
        shards = [Tables([self.spec], seed=3, buckets=buckets_of(s, servers)) for s in range(servers)]
        for tables in shards:
            tables.changed.follow("")
        self.servers = Servers(self.spec, Checkpoints(Path(self.folder.name)), shards, np.random.default_rng(0))

    @rule(pushes=st.lists(IDS, min_size=1, max_size=2), seed=st.integers(0, 1000))
    def push(self, pushes: list[set[int]], seed: int) -> None:
        rng = np.random.default_rng(seed)
        made = [{id_: float(rng.normal()) for id_ in sorted(ids)} for ids in pushes]
        if self.spec.admit is None or self.spec.admit.min_count > 1:
            self.model.apply(made, self.step)
        self.alone.apply([push_of(push) for push in made], step=self.step)
        count = len(self.servers.shards)
        for s, tables in enumerate(self.servers.shards):
            mine = [{i: g for i, g in push.items() if bucket(i) * count // BUCKETS == s} for push in made]
            tables.apply([push_of(push) for push in mine], step=self.step)
        self.step += 1
        self.servers.step = self.step

    @rule(increment=st.booleans(), complete=st.booleans())
    def save(self, increment: bool, complete: bool) -> None:
        last = self.servers.last
        if last is None or last.step < self.step:
            self.servers.saved(increment=increment, complete=complete)

    @precondition(lambda self: self.servers.last is not None and self.servers.last.step == self.step)
    @rule(count=st.integers(1, 3))
    def reload(self, count: int) -> None:
        self.servers = self.servers.loaded(count)

    @invariant()
    def same(self) -> None:
        if self.step:
            assert self.servers.digest() == [self.alone[t].digest() for t in range(len(self.alone))]
            if self.spec.admit is None or self.spec.admit.min_count > 1:
                assert set(self.model.rows) == set(ids_in(self.alone[0].records, self.alone[0].num_rows).tolist())

    def teardown(self) -> None:
        self.folder.cleanup()


TestDisturbed = Disturbed.TestCase
TestDisturbed.settings = examples(40, stateful_step_count=16)


def test_a_popular_id_outlives_those_that_come_once() -> None:
    """However full the bucket: its score is above theirs at every cut."""
    spec = spec_of(None, {"max_rows": LEAST, "decay": 0.9, "decay_steps": 10})
    tables, popular = Tables([spec], seed=3), CROWD[:5]
    for step in range(100):
        push = dict.fromkeys([*popular, *CROWD[5 + step : 5 + step + 20]], 1.0)
        tables.apply([push_of(push)], step=step)
        assert set(popular) <= set(ids_in(tables[0].records, tables[0].num_rows).tolist())
    assert tables[0].counts()["evicted_rows"] > 0


@every("others_come", [False, True], ids=["slots are empty", "slots have other rows"])
@every("late", ["rows moved", "rows went"])
def test_a_late_push_finds_its_rows_though_they_moved_or_went(late: str, others_come: bool) -> None:
    """It remembers slots that now have other rows, or none."""
    spec = spec_of(None, {"ttl_steps": 2, "sweep_steps": 1})
    remembering, looking = (Tables([spec], seed=3) for _ in range(2))
    others, mine = list(range(100)), list(range(100, 130))
    for tables in (remembering, looking):
        tables.apply([push_of(dict.fromkeys(others + mine, 1.0))], step=0)
    push = push_of(dict.fromkeys(mine, 3.0))
    pulled = remembering.pull(push.sections, np.empty_like(push.values))
    kept = mine if late == "rows moved" else others[:1]
    for tables in (remembering, looking):
        for step in range(1, 5):
            tables.apply([push_of(dict.fromkeys(kept, 1.0))], step=step)
        assert tables[0].num_rows == len(kept)
        if others_come:
            tables.apply([push_of(dict.fromkeys(range(1000, 1200), 1.0))], step=5)
    remembering.apply([Gradients(push.sections, push.values, pulled)], step=6)
    looking.apply([push], step=6)
    assert rows_of(remembering) == rows_of(looking) and remembering.digests() == looking.digests()
