"""Tables with recipes of their own, against real services in this process."""

from __future__ import annotations

import contextlib
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import CheckpointError, RemoteError
from shardkeep.compression.recipes import RECIPES
from shardkeep.ps.server.journal.journal import Journal
from shardkeep.ps.transport.transport import LocalTransport
from shardkeep.ps.wire.message import Kind
from tests.support.cases import every
from tests.support.clients import DIMS, SUMS, Job, sums_of
from tests.support.codecs import codec_of, there_and_back

STEPS = range(7)
POOL = {"pool_rows": 2000, "second_moment": True}
Tables = dict[str, dict[str, Any]]


MIXED: Tables = {
    "big": {"compression": "balanced"},
    "small": {"compression": "none"},
    "wide": {"freeze": True, "compression": "fp16"},
}
RESIDUALS = {"values": "int8", **POOL}
INT4_ROWS = {"values": "int4", "keep": 0.2, **POOL}


@every(("optimizer", "rows", "ids"), [("adam", "fp32", "coded"), ("partial_rowwise_adam", "int8", "raw")])
def test_an_uncompressed_table_has_the_bits_of_a_job_without_compression(optimizer: str, rows: str, ids: str) -> None:
    """Also where the others send second moments, and where a worker has rows of this table alone."""
    tables: Tables = {name: {"optimizer": {"name": optimizer}} for name in DIMS}
    tables["small"]["dtype"] = rows
    plain = Job(tables, workers=2, mode="sync")
    own = tables | {"small": tables["small"] | {"compression": "none"}}
    push = {"values": "int8", "keep": 0.1, **POOL}
    mixed = Job(own, servers=2, workers=2, mode="sync", ids=ids, push=push, pull={"values": "int8"})
    expected, pulled = chain(*plain.run(STEPS)), chain(*mixed.run(STEPS))
    assert mixed.digests()["small"] == plain.digests()["small"]
    assert mixed.digests()["big"] != plain.digests()["big"]
    pairs = [(a["small"], b["small"]) for a, b in zip(expected, pulled, strict=True) if "small" in a]
    assert len(pairs) > len(STEPS) and all(np.array_equal(a, b) for a, b in pairs)
    assert mixed.client.residuals_and_cache()["unsent_rows"] > 0  # rounding errors of the others


@every(("recipe", "pool"), [("fp16", {}), ("safe", {}), ("safe", POOL), ("balanced", POOL)])
def test_a_tables_own_recipe_does_what_the_same_settings_of_the_job_do(recipe: str, pool: dict[str, Any]) -> None:
    """`wide` is alone in its dim, so it has a pool of its own in both jobs."""
    push = RECIPES[recipe].settings["compression"]["push"]
    settings = {key: push[key] for key in ("values", "scale", "keep") if key in push}
    whole = Job({}, mode="sync", push=pool | settings)
    single = Job({"wide": {"compression": recipe}}, mode="sync", push=pool)
    whole.run(STEPS)
    single.run(STEPS)
    assert single.digests()["wide"] == whole.digests()["wide"]
    assert single.digests()["big"] != whole.digests()["big"]


def test_every_byte_is_counted_as_what_it_is_and_each_table_is_rounded_as_it_says() -> None:
    """By hand, in one step: rows of 8 values as int8 with a scale of one byte and a second moment, rows of 8 as
    float32, rows of 6 values as int4 with a scale of one byte and a second moment."""
    own = {
        "small": {"compression": "none"},
        "wide": {"compression": "safe"},
    }
    push = {"values": "int8", "pool_rows": 100, "second_moment": True}
    job, exact = Job(own, push=push, pull={"values": "int8", "scale": "fp16"}), Job({})
    wanted = {"big": np.arange(40), "small": np.arange(10), "wide": np.arange(30)}
    rows, plain = (each.client.pull(0, each.client.request(wanted)).result() for each in (job, exact))
    codecs = {"big": codec_of("int8", "fp16"), "small": codec_of("fp32"), "wide": codec_of("int8")}
    for name, codec in codecs.items():
        assert np.array_equal(rows[name], there_and_back(codec, plain[name])), name
    got = job.traffic.ledger.totals()["pull"]
    assert got["values"] == 40 * 8 + 10 * 8 * 4 + 30 * 6 and got["scales"] == 40 * 2 + 30

    grads = {n: np.ones((i.size, DIMS[n]), np.float32) for n, i in wanted.items()}
    job.client.push(0, job.client.request(wanted), grads)
    job.client.fence(1)
    sent = job.traffic.ledger.totals()["push"]
    assert sent["ids"] == 8 * (40 + 10 + 30)
    assert sent["values"] == 40 * 8 + 10 * 8 * 4 + 30 * 3
    assert (sent["scales"], sent["moments"]) == (40 + 30, 40 + 30)


def test_nothing_of_a_table_with_a_share_of_its_own_is_dropped() -> None:
    """A row is minus the sum of what arrived, and the pool holds the rest."""
    own = dict.fromkeys(DIMS, SUMS) | {"big": SUMS | {"compression": "extreme"}}
    push = {"values": "int8", "keep": 0.5, "pool_rows": 3000}
    job = Job(own, push=push)
    job.run(STEPS, last=False)
    memory = job.client.memory
    state = memory.state()
    assert memory.lost_squares == 0.0
    for table, group, index in (("big", "8 of 0", 0), ("small", "8 of 1", 0), ("wide", "6", 0)):
        mine = state[f"{group}/tables"] == index
        left = dict(zip(state[f"{group}/ids"][mine].tolist(), state[f"{group}/rests"][mine], strict=True))
        arrived, total, none = job.weights(table), sums_of(table, STEPS), np.zeros(DIMS[table])
        for id_, expected in total.items():
            np.testing.assert_allclose(left.get(id_, none) - arrived.get(id_, none), expected, atol=1e-4)
        assert left and len(arrived) <= len(total)
    again = Job(own, push=push).client.memory
    again.load([state])
    assert all(np.array_equal(array, again.state()[key]) for key, array in state.items())
    with pytest.raises(
        CheckpointError, match="of a pool of dim 8 of 0; the pools are of dim 6, 8: resume with the same"
    ):
        Job({}, push={"values": "int8", "pool_rows": 3000}).client.memory.load([state])


@every(("own", "push"), [(MIXED, RESIDUALS), ({"big": SUMS}, INT4_ROWS)], ids=["residuals", "int4 rows"])
def test_going_back_some_steps_repeats_their_bits(own: Tables, push: dict[str, Any]) -> None:
    straight, back = (Job(own, servers=2, ids="coded", push=push) for _ in range(2))
    straight.run(STEPS)
    for step in range(6):
        back.step(step)
    sent = [bytes(message.buffer) for message in back.sent(Kind.PUSH) if message.step >= 3]
    back.packets.clear()
    back.client.regroup(LocalTransport(back.handlers), 0, 3)
    back.run(range(3, STEPS.stop))
    assert [bytes(message.buffer) for message in back.sent(Kind.PUSH)][: len(sent)] == sent
    assert back.digests() == straight.digests()


def test_rows_of_the_cache_are_those_that_were_pulled_in_each_tables_format() -> None:
    own = {"small": {"compression": "none"}, "big": {"compression": "balanced"}}
    cached = {"values": "int8", "cache_rows": 500, "lease": 3}
    job = Job(own, mode="async", push=RESIDUALS, pull=cached)
    for step in STEPS:
        job.step(step)
    ids = {"big": np.arange(50), "small": np.arange(9), "wide": np.arange(7)}
    first, again = (job.client.pull(STEPS.stop, job.client.request(ids)).result() for _ in range(2))
    assert all(np.array_equal(first[name], again[name]) for name in ids)
    counters = job.client.residuals_and_cache()
    assert counters["cache_hits"] > 20 + 66 and counters["unsent_rows"] > 0


@every(("own", "push", "ids"), [(MIXED, RESIDUALS, "raw"), ({"big": SUMS}, INT4_ROWS, "coded")], ids=["raw", "coded"])
def test_a_journal_of_compressed_pushes_is_replayed_to_the_same_bits(
    tmp_path: Path, own: Tables, push: dict[str, Any], ids: str
) -> None:
    jobs = [
        Job(own, servers=2, workers=2, mode="sync", journal=journal, push=push, ids=ids) for journal in (tmp_path, None)
    ]
    jobs[0].run(STEPS)
    for shard, (journal, service) in enumerate(zip(jobs[0].journals, jobs[1].services, strict=True)):
        journal.close()
        with contextlib.closing(Journal(tmp_path / str(shard), sync=False)) as kept:
            assert service.life.replay(kept.replay()) == 2 * len(STEPS)
    assert jobs[1].digests() == jobs[0].digests()


def test_a_server_refuses_gradients_of_a_frozen_table() -> None:
    job, other = Job({"wide": {"freeze": True}}), Job({})
    before = job.digests()
    other.client.calls.regroup(LocalTransport(job.handlers), 0)
    other.step(0)
    with pytest.raises(RemoteError, match="table wide: is frozen, and a push has gradients of it"):
        other.client.wait_acknowledged()
    assert job.digests() == before
