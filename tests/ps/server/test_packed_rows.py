"""Rows of fewer than 32 bits a value through everything that keeps them: servers, journals, snapshots, row streams."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from safetensors.numpy import load_file

from shardkeep.config import parse_config
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.checkpoints.row_stream import stream_rows
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import BUCKETS, server_of
from shardkeep.ps.server.snapshot.start_rows import StartRows, write_start_rows
from shardkeep.ps.server.table.initializers.initial import table_key
from shardkeep.ps.server.table.optimizers.registry import OPTIMIZERS
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.examples import examples
from tests.support.local_job import LocalJob
from tests.support.marked_tables import checkpointed, loaded
from tests.support.one_table import exported
from tests.support.push_job import IDS, Job
from tests.support.rounding import random_bits, rounded
from tests.support.samples import as_data, draw
from tests.support.tables import gradients, of_one_table

STEPS, SEED = 10, 7
PRECISIONS = (("fp16", "fp32"), ("bf16", "bf16"), ("int8", "fp32"), ("int8", "bf16"), ("fp32", "bf16"))

DECAYING = {"name": "adam", "lr": 0.01, "weight_decay": 0.05, "weight_decay_on": "table"}


@every(("number", "precision"), enumerate(PRECISIONS))
def test_in_sync_no_bit_depends_on_servers_or_on_a_replay(
    tmp_path: Path, number: int, precision: tuple[str, str]
) -> None:
    """Of optimizers that update the rows that are touched, and all rows, in turn."""
    (rows, state_of), optimizer = precision, ({"name": "adam"}, DECAYING)[number % 2]

    def trained(**more: Any) -> Job:
        """All rows at first, then so few that some servers get none."""
        job = Job("sync", optimizer, workers=2, **more)
        for step in range(STEPS):
            chosen = [np.random.default_rng([step, rank]).random(IDS.size) < (0.1 if step else 2.0) for rank in (0, 1)]
            job.step(step, ids={rank: IDS[mine] for rank, mine in enumerate(chosen)})
        return job.fenced(STEPS)

    packed = {"dtype": rows, "state_dtype": state_of}
    killed, plain = trained(journals=tmp_path, **packed), trained()
    assert trained(servers=3, **packed).total == killed.total != plain.total
    assert [killed.replayed().tables.digests()] == killed.digests
    assert np.allclose(killed.rows(), plain.rows(), atol=0.05)


def test_a_job_from_its_config_has_equal_digests_with_one_server_and_three() -> None:
    data = as_data(draw(60, pooling="mean"), draw(30, seed=1, pooling="mean"))
    digests = set()
    for servers in (1, 3):
        config = parse_config(
            f"""
            seed: 3
            servers: {servers}
            workers: 2
            consistency: {{mode: sync}}
            model: {{name: dlrm, bottom: [8], hidden: [8]}}
            tables:
              default: {{dim: 4, dtype: int8}}
              b: {{dim: 6, dtype: fp32, optimizer: adam, state_dtype: bf16}}
            tower: {{compile: off, amp: off}}
            train: {{batch_size: 8}}
            """
        )
        assert (config.table("a").dtype, config.table("b").state_dtype) == ("int8", "bf16")
        digests.add(LocalJob(config, data).run()["state_digest"])
    assert len(digests) == 1


def adam_spec(rows: str, state_of: str = "fp32", dim: int = 5) -> TableSpec:
    return TableSpec(name="t", dim=dim, optimizer="adam", dtype=rows, state_dtype=state_of)


def adam_tables(spec: TableSpec, count: int) -> Tables:
    tables = Tables([spec], seed=SEED)
    grads = np.random.default_rng(0).normal(size=(count, spec.dim)).astype(np.float32)
    tables.apply([of_one_table(np.arange(count), grads)], step=0)
    return tables


@every(("rows", "state_of"), [("fp32", "fp32"), *PRECISIONS], ids=lambda value: str(value))
def test_files_hold_rows_in_their_own_precision(tmp_path: Path, rows: str, state_of: str) -> None:
    done = checkpointed([adam_tables(adam_spec(rows, state_of), 9)], Checkpoints(tmp_path), 1)
    arrays = load_file(next(done.folder.glob("server-0/*.safetensors")))
    kinds = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16, "int8": np.int8}
    assert arrays["0.0.rows"].dtype == kinds[rows] and arrays["0.0.rows"].shape == (9, 5)
    assert arrays["0.0.slots"].dtype == kinds[state_of] and arrays["0.0.slots"].shape == (9, 10)
    assert len(arrays) == 3 + (rows == "int8"), "float32 rows are stored as before there was a precision"


@every(("then", "now"), list(itertools.permutations([("fp32", "fp32"), *PRECISIONS[1:3]], 2)))
def test_a_checkpoint_of_another_precision_is_rounded_to_the_nearest_value(
    tmp_path: Path, then: tuple[str, str], now: tuple[str, str]
) -> None:
    tables = adam_tables(adam_spec(*then), 40)
    (read,) = loaded([adam_spec(*now)], checkpointed([tables], Checkpoints(tmp_path), 1))
    _, rows_ND, slots_NS = exported(tables[0])
    _, found_ND, found_NS = exported(read[0])
    half = np.full((40, 10), 1 << 31, np.uint32)
    np.testing.assert_array_equal(found_ND, rounded(rows_ND, now[0], half[:, :5]))
    np.testing.assert_array_equal(found_NS, rounded(slots_NS, now[1], half))


@every(("before", "after"), [("fp32", "int8"), ("int8", "fp32"), ("int8", "bf16")])
def test_rows_of_a_chain_of_two_precisions_are_rounded_once(tmp_path: Path, before: str, after: str) -> None:
    """A job whose tables have another precision since a resume writes increments on the checkpoint from before."""
    new, checkpoints = [adam_spec(after, dim=6)], Checkpoints(tmp_path)
    base = checkpointed([adam_tables(adam_spec(before, dim=6), 500)], checkpoints, 1)
    (tables,) = loaded(new, base)
    tables.changed.follow(base.id)
    tables.apply([gradients({0: (np.arange(100, 200), np.ones((100, 6), np.float32))})], step=1)
    increment = checkpointed([tables], checkpoints, 2, base)
    (read,) = loaded(new, increment)
    assert read.digests() == tables.digests()
    (block,) = stream_rows(increment, "t", [(0, BUCKETS)])
    (first_block,) = stream_rows(base, "t", [(0, BUCKETS)])
    unchanged = (block.ids_N < 100) | (block.ids_N >= 200)
    assert np.array_equal(block.ids_N, first_block.ids_N)
    assert np.array_equal(block.rows_ND[unchanged], first_block.rows_ND[unchanged])


@every(("rows", "state_of"), PRECISIONS)
def test_rows_of_a_file_are_rounded_once_for_servers_and_readers(tmp_path: Path, rows: str, state_of: str) -> None:
    ids, values = np.arange(300), np.random.default_rng(0).normal(size=(300, 5)).astype(np.float32)
    spec, checkpoints = adam_spec(rows, state_of), Checkpoints(tmp_path)
    given = StartRows(spec, 300, lambda: iter([(ids, values)]), "the test")
    start = checkpoints.commit(0, write_start_rows([given], checkpoints.begin(0), shard=0), {})
    (tables,) = loaded([spec], start)
    (block,) = stream_rows(start, "t", [(0, BUCKETS)])
    order = np.argsort(block.ids_N)
    assert np.array_equal(block.rows_ND[order], exported(tables[0])[1])
    # of two equally near values numpy takes the even one
    assert np.allclose(block.rows_ND[order], values, rtol=2**-8, atol=0.02 if rows == "int8" else 0)


class PackedTables(RuleBasedStateMachine):
    """One table, on any number of servers, beside a dictionary of rows that numpy updates and rounds."""

    @initialize(
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        precision=st.sampled_from(PRECISIONS),
        dim=st.sampled_from([1, 2, 5, 16]),
        servers=st.integers(1, 3),
    )
    def begin(self, optimizer: str, precision: tuple[str, str], dim: int, servers: int) -> None:
        rows, state_of = precision
        if optimizer in ("sgd", "rowwise_adagrad", "ftrl"):
            rows, state_of = rows if rows != "fp32" else "int8", "fp32"
        self.spec = TableSpec(name="t", dim=dim, optimizer=optimizer, dtype=rows, state_dtype=state_of)
        self.folder = tempfile.TemporaryDirectory()
        self.checkpoints, self.base, self.step = Checkpoints(Path(self.folder.name)), None, 0
        self.servers = [Tables([self.spec], seed=SEED) for _ in range(servers)]
        for tables in self.servers:
            tables.changed.follow("")
        self.model: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.saved: dict[int, tuple[np.ndarray, np.ndarray]] | None = None

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(ids=st.sets(st.integers(-4, 30), min_size=1, max_size=12), seed=st.integers(0, 1000))
    def push(self, ids: set[int], seed: int) -> None:
        ids_U = np.array(sorted(ids))
        grads = np.random.default_rng(seed).normal(size=(ids_U.size, self.spec.dim)).astype(np.float32)
        owners = server_of(ids_U, len(self.servers))
        for s, tables in enumerate(self.servers):
            tables.apply([of_one_table(ids_U[owners == s], grads[owners == s])], step=self.step)
        plain = Tables([self.spec.model_copy(update={"dtype": "fp32", "state_dtype": "fp32"})], seed=SEED)
        if old := [i for i in ids_U.tolist() if i in self.model]:
            plain[0].load(np.array(old), *(np.stack(part) for part in zip(*(self.model[i] for i in old), strict=True)))
        plain.apply([of_one_table(ids_U, grads)], step=self.step)
        ids_N, rows_ND, slots_NS = exported(plain[0])
        dim = self.spec.dim
        random = random_bits(int(table_key(SEED, "t")), ids_N, self.step, 0, dim + slots_NS.shape[1])
        rows_ND = rounded(rows_ND, self.spec.dtype, random[:, :dim])
        slots_NS = rounded(slots_NS, self.spec.state_dtype, random[:, dim:])
        self.model |= {id_: (rows_ND[i], slots_NS[i]) for i, id_ in enumerate(ids_N.tolist())}
        self.step += 1

    @rule(ids=st.sets(st.integers(-4, 30), min_size=1, max_size=5), seed=st.integers(0, 1000))
    def load(self, ids: set[int], seed: int) -> None:
        """Rows from outside: of all servers, so that nothing of a checkpoint's increment is missed."""
        ids_U, rng = np.array(sorted(ids)), np.random.default_rng(seed)
        rows = rng.normal(size=(ids_U.size, self.spec.dim)).astype(np.float32)
        num_slots = self.servers[0][0].layout.num_slots
        slots = np.abs(rng.normal(size=(ids_U.size, num_slots))).astype(np.float32)
        owners = server_of(ids_U, len(self.servers))
        for s, tables in enumerate(self.servers):
            mine = owners == s
            tables[0].load(ids_U[mine], rows[mine], slots[mine])
            tables.changed.follow("")
        self.base = None
        half = np.uint32(1 << 31)
        rows = rounded(rows, self.spec.dtype, np.full(rows.shape, half))
        slots = rounded(slots, self.spec.state_dtype, np.full(slots.shape, half))
        self.model |= {id_: (rows[i], slots[i]) for i, id_ in enumerate(ids_U.tolist())}

    @rule()
    def checkpoint(self) -> None:
        """An increment wherever there is a checkpoint to build on."""
        self.step += 1
        self.base = checkpointed(self.servers, self.checkpoints, self.step, self.base)
        self.saved = dict(self.model)

    @rule(servers=st.integers(1, 3))
    def reload(self, servers: int) -> None:
        if self.base is not None and self.saved is not None:
            self.servers = loaded([self.spec], self.base, servers)
            for tables in self.servers:
                tables.changed.follow(self.base.id)
            self.model = dict(self.saved)

    @invariant()
    def holds_the_rows_of_the_model(self) -> None:
        parts = [exported(tables[0]) for tables in self.servers]
        ids_N, rows_ND, slots_NS = (np.concatenate(column) for column in zip(*parts, strict=True))
        assert sorted(ids_N.tolist()) == sorted(self.model)
        for i, id_ in enumerate(ids_N.tolist()):
            np.testing.assert_array_equal(rows_ND[i], self.model[id_][0])
            np.testing.assert_array_equal(slots_NS[i], self.model[id_][1])


def test_tables_hold_what_a_dictionary_holds_through_pushes_loads_checkpoints_and_reloads() -> None:
    run_state_machine_as_test(PackedTables, settings=examples(60, stateful_step_count=10))  # type: ignore[no-untyped-call]
