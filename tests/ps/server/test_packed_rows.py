"""Rows of fewer than 32 bits a value through everything that keeps them: servers, journals, snapshots, row streams."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from shardkeep.config import parse_config
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.checkpoints.row_stream import stream_rows
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.server.snapshot.start_rows import StartRows, write_start_rows
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.local_job import LocalJob
from tests.support.marked_tables import checkpointed, loaded
from tests.support.one_table import exported
from tests.support.push_job import IDS, Job
from tests.support.rounding import rounded
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
