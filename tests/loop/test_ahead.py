"""Pulls ahead in a loop of the user's own: equal rows, in every mode, and clear errors for a loop out of step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardkeep import EmbeddingClient, TableSpec
from shardkeep.base.errors import UserError
from shardkeep.config import ConsistencyConfig
from tests.support.cases import every

TABLES = [TableSpec(name="user", dim=4, optimizer={"name": "adagrad", "lr": 0.1})]


def batches(count: int = 12) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randint(20, (6,), generator=random) for _ in range(count)]


def train(client: EmbeddingClient, rows: Any) -> None:
    rows["user"].square().sum().backward()
    client.apply(rows)


def digest_of(client: EmbeddingClient) -> str:
    return str(client.summary(digest=True)["state_digest"])


@pytest.fixture
def client() -> Iterator[EmbeddingClient]:
    with EmbeddingClient.local(TABLES, seed=5, consistency="sync") as client:
        yield client


def plain_digest() -> str:
    with EmbeddingClient.local(TABLES, seed=5, consistency="sync") as client:
        for ids in batches():
            train(client, client.lookup({"user": ids}))
        return digest_of(client)


@every("depth", [1, 2, 5])
def test_in_sync_rows_ahead_are_those_of_lookups_bit_for_bit(depth: int) -> None:
    with EmbeddingClient.local(TABLES, seed=5, consistency="sync") as client:
        for _, rows in client.ahead(batches(), lambda ids: {"user": ids}, depth=depth):
            train(client, rows)
        assert client.step == 12 and digest_of(client) == plain_digest()


def test_in_bounded_pulls_leave_while_earlier_steps_train() -> None:
    with EmbeddingClient.local(TABLES, consistency=ConsistencyConfig(mode="bounded", staleness=2)) as client:
        pending = [client.prefetch({"user": torch.tensor([number])}) for number in range(4)]
        assert [each.pull is not None for each in pending] == [True, True, True, False]
        train(client, pending[0].result())
        assert pending[3].pull is not None
        for each in pending[1:]:
            train(client, each.result())
        assert client.step == 4 and max(client.summary()["staleness"]) == "2"


def test_a_loop_that_ends_early_continues_with_lookups(client: EmbeddingClient) -> None:
    for number, (_, rows) in enumerate(client.ahead(batches(), lambda ids: {"user": ids}, depth=3)):
        train(client, rows)
        if number == 4:
            break
    for ids in batches()[5:]:
        train(client, client.lookup({"user": ids}))
    assert digest_of(client) == plain_digest()


def test_a_batch_may_be_skipped_by_an_empty_step(client: EmbeddingClient) -> None:
    for ids, rows in client.ahead(batches(), lambda ids: {"user": ids}):
        if ids[0] % 2:
            client.apply()
        else:
            train(client, rows)
    assert client.step == 12


def test_a_loop_out_of_step_is_told_so(client: EmbeddingClient) -> None:
    with pytest.raises(UserError, match=r"ahead: step 0 was not ended; call apply for every batch, without rows to"):
        for _, rows in client.ahead(batches(), lambda ids: {"user": ids}):
            rows["user"].sum().backward()
    first, second = (client.prefetch({"user": torch.tensor([1])}) for _ in range(2))
    with pytest.raises(UserError, match="prefetch: the rows of step 1 cannot come yet; apply the steps before it"):
        second.result()
    train(client, first.result())
    train(client, second.result())
    with pytest.raises(UserError, match="ahead: depth 0; allowed: 1 or more"):
        next(client.ahead(batches(), lambda ids: {"user": ids}, depth=0))
    with pytest.raises(UserError, match=r"prefetch: unknown table usr; did you mean user\?"):
        client.prefetch({"usr": torch.tensor([1])})


def test_a_read_that_is_not_fresh_waits_for_nobody_and_a_factor_multiplies_the_learning_rate() -> None:
    found, ids = [], {"user": torch.tensor([1])}
    for factor in (1.0, 0.25):
        with EmbeddingClient.local(
            [TableSpec(name="user", dim=4, optimizer={"name": "sgd", "lr": 0.4})], consistency="sync"
        ) as client:
            before = client.read(ids, fresh=False)["user"]
            rows = client.lookup(ids)
            rows["user"].sum().backward()
            client.apply(rows, lr_factor=factor)
            assert torch.equal(client.read(ids, fresh=False)["user"], before)  # staged, until the next step's pull
            found.append(before - client.read(ids)["user"])
    torch.testing.assert_close(found, [torch.full((1, 4), 0.4), torch.full((1, 4), 0.1)])


@every("mode", ["bounded", "async"])
def test_no_push_stays_behind_when_a_loop_with_rows_ahead_reads_or_ends(mode: str) -> None:
    with EmbeddingClient.local(TABLES, seed=5, consistency=mode) as client:
        for step, (ids, rows) in enumerate(client.ahead(batches(), lambda ids: {"user": ids})):
            before = client.read({"user": ids})["user"]
            train(client, rows)
            assert not torch.equal(client.read({"user": ids})["user"], before), step
        assert client.summary()["steps"] == 12
