"""Batches: joined requests, a full queue, a replaced model, an end that answers what waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import shardkeep
from shardkeep.base.errors import UserError
from shardkeep.inference.protocol.datatypes import Values
from shardkeep.inference.protocol.status import Refusal, Status
from shardkeep.inference.protocol.tensors import Description, Heading, InferRequest
from shardkeep.inference.server.batcher import Batcher, Goal, Scored
from shardkeep.inference.server.entrance import Entrance
from shardkeep.inference.server.metrics import NoMetrics
from shardkeep.inference.server.served_model import Loaded, ServedModel
from shardkeep.inference.server.settings import Limits
from shardkeep.inference.server.signature import Rows
from tests.support.served_clicks import as_bytes, as_typed, texts, trained_once
from tests.support.serving import LIMIT_S, datatype_of


def rows_of(loaded: Loaded, columns: dict[str, Values]) -> Rows:
    described = (Description.of(name, datatype_of(values), [len(values)]) for name, values in columns.items())
    return loaded.signature.rows(InferRequest("clicks", "", Heading(tuple(described)), list(columns.values())))


def in_a_loop(served: ServedModel, limits: Limits, body: Callable[[Batcher], Awaitable[None]]) -> None:
    async def whole() -> None:
        batcher = Batcher(served, limits, NoMetrics())
        async with asyncio.timeout(LIMIT_S):
            await body(batcher)
            await batcher.close()

    asyncio.run(whole())


@pytest.fixture
def served(predictor: shardkeep.Predictor) -> ServedModel:
    return ServedModel(predictor)


def test_requests_that_arrive_together_are_one_batch_and_keep_their_scores(
    served: ServedModel, predictor: shardkeep.Predictor
) -> None:
    parts = [texts(count, seed=count) for count in (1, 3, 70, 2)]

    async def body(batcher: Batcher) -> None:
        forms = (as_bytes, as_typed, as_bytes, as_typed)
        waits = [
            batcher.submit(rows_of(served.current, form(part)), 1) for form, part in zip(forms, parts, strict=True)
        ]
        assert batcher.waiting == 4
        for scored, part in zip(await asyncio.gather(*waits), parts, strict=True):
            assert np.abs(scored.answer[:, 0] - predictor.predict(part)).max() < 1e-6

    in_a_loop(served, Limits(delay_s=0.01), body)


def test_a_bad_value_fails_its_own_request_alone(served: ServedModel) -> None:
    good, bad = as_bytes(texts(2)), as_bytes(texts(2)) | {"price": [b"1", b"cheap"]}

    async def body(batcher: Batcher) -> None:
        waits = [batcher.submit(rows_of(served.current, each), 1) for each in (good, bad, good)]
        first, second, third = await asyncio.gather(*waits, return_exceptions=True)
        assert isinstance(second, Refusal) and str(second).startswith("row 2, column price: 'cheap' is not a number")
        assert isinstance(first, Scored) and isinstance(third, Scored)
        assert np.array_equal(first.answer, third.answer)

    in_a_loop(served, Limits(delay_s=0.01), body)


def test_requests_of_threads_are_joined_and_each_gets_its_own_scores_or_refusal(
    served: ServedModel, predictor: shardkeep.Predictor
) -> None:
    parts = [texts(1, seed=k) for k in range(24)]
    requests = [rows_of(served.current, as_bytes(part)) for part in parts]

    async def body(batcher: Batcher) -> None:
        entrance, loop = Entrance(batcher), asyncio.get_running_loop()
        with ThreadPoolExecutor(len(requests)) as threads:
            waits = [loop.run_in_executor(threads, entrance.scores, rows, 1) for rows in requests]
            answers = await asyncio.gather(*waits, return_exceptions=True)
        refusals = [each for each in answers if isinstance(each, Refusal)]
        assert all(each.status is Status.BUSY for each in refusals) and len(refusals) < len(requests)
        for answer, part in zip(answers, parts, strict=True):
            if isinstance(answer, Scored):
                assert np.abs(answer.answer[:, 0] - predictor.predict(part)).max() < 1e-6
        assert sum(isinstance(each, Scored) for each in answers) + len(refusals) == len(requests)

    in_a_loop(served, Limits(delay_s=0.01, requests=12), body)


def test_a_full_queue_refuses_and_an_end_answers_what_waits(served: ServedModel) -> None:
    async def body(batcher: Batcher) -> None:
        rows = rows_of(served.current, as_bytes(texts(1)))
        waits = [batcher.submit(rows, 1) for _ in range(3)]
        with pytest.raises(Refusal, match=r"^3 requests wait already; try again later$") as raised:
            batcher.submit(rows, 1)
        assert raised.value.status is Status.BUSY
        await batcher.close()
        assert all(wait.done() for wait in waits) and not batcher.waiting
        with pytest.raises(Refusal, match="stopping"):
            batcher.submit(rows, 1)

    in_a_loop(served, Limits(delay_s=60.0, requests=3), body)


def test_bytes_that_wait_are_bounded(served: ServedModel) -> None:
    async def body(batcher: Batcher) -> None:
        rows = rows_of(served.current, as_bytes(texts(1)))
        wait = batcher.submit(rows, 900)
        with pytest.raises(Refusal, match="1 requests wait already"):
            batcher.submit(rows, 200)
        await wait
        await batcher.submit(rows, 5000)  # alone it is as large as a message may be

    in_a_loop(served, Limits(delay_s=0.01, size=1000), body)


def test_a_request_of_many_rows_is_scored_in_a_thread_while_others_arrive(
    served: ServedModel, predictor: shardkeep.Predictor
) -> None:
    many = texts(3000)

    async def body(batcher: Batcher) -> None:
        large = batcher.submit(rows_of(served.current, as_bytes(many)), 1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the batch has begun
        small = batcher.submit(rows_of(served.current, as_bytes(texts(1))), 1)
        assert not large.done() and not small.done()
        assert np.abs((await large).answer[:, 0] - predictor.predict(many)).max() < 1e-6
        await small

    in_a_loop(served, Limits(delay_s=0.0), body)


def test_a_client_that_is_gone_costs_no_scores(served: ServedModel) -> None:
    async def body(batcher: Batcher) -> None:
        rows = rows_of(served.current, as_bytes(texts(1)))
        gone, stays = batcher.submit(rows, 1), batcher.submit(rows, 1)
        gone.cancel()
        await stays
        lonely = batcher.submit(rows, 1)
        lonely.cancel()

    in_a_loop(served, Limits(delay_s=0.01), body)


def test_a_replaced_model_serves_the_next_batch(
    predictor: shardkeep.Predictor, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = shardkeep.load(trained_once(tmp_path_factory, seed=9))
    served, columns = ServedModel(predictor, made_at=1.0), texts(5)

    async def body(batcher: Batcher) -> None:
        rows = rows_of(served.current, as_bytes(columns))
        before = await batcher.submit(rows, 1)
        served.replace(other, made_at=2.0)
        after = await batcher.submit(rows, 1)
        assert np.abs(before.answer[:, 0] - predictor.predict(columns)).max() < 1e-6
        assert np.abs(after.answer[:, 0] - other.predict(columns)).max() < 1e-6
        assert (before.model.made_at, after.model.made_at) == (1.0, 2.0)

    in_a_loop(served, Limits(), body)


def test_a_model_of_other_columns_cannot_replace_one(
    served: ServedModel, predictor: shardkeep.Predictor, narrow: Path
) -> None:
    with pytest.raises(UserError, match="reads price, user; the server began with one that reads price, age, user"):
        served.replace(shardkeep.load(narrow))
    assert served.current.predictor is predictor


def test_a_batch_waits_for_as_many_requests_as_there_lately_were() -> None:
    goal = Goal()
    for requests in (1, 2, 3):
        goal.reached(requests)
    assert goal.requests == 4
    goal.missed(2)
    assert goal.requests == 3
    for _ in range(Goal.PROBE_EVERY):
        goal.reached(3)
        assert goal.requests == 3
    goal.reached(3)
    assert goal.requests == 4
    goal.reached(9)
    assert goal.requests == 10
