"""Loops of the user's own over EmbeddingClient, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardkeep import EmbeddingClient, Lookup
from shardkeep.base.errors import ConfigError, DataError, ShardkeepError, UserError
from shardkeep.compression.config import CompressionConfig
from shardkeep.config import TableConfig
from tests.support.cases import every
from tests.support.two_tables import TABLES

MODES = ("sync", "bounded", "async")


@pytest.fixture
def client() -> Iterator[EmbeddingClient]:
    with EmbeddingClient.local(TABLES, seed=5, consistency="sync") as client:
        yield client


def train_step(client: EmbeddingClient, ids: Any, table: str = "user") -> Lookup:
    """A step whose gradient is 1 for each value of each id."""
    rows = client.lookup({table: ids})
    rows[table].sum().backward()
    client.apply(rows)
    return rows


@every("mode", MODES)
def test_a_loop_equals_a_plain_embedding_with_sgd(mode: str) -> None:
    random = torch.Generator().manual_seed(1)
    plain, head = nn.Embedding(20, 4), nn.Linear(4, 1)
    with EmbeddingClient.local(TABLES, consistency=mode) as client:
        with torch.no_grad():
            plain.weight.copy_(client.read({"user": torch.arange(20)})["user"])
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
        for _ in range(20):
            ids = torch.randint(20, (5, 3), generator=random)  # with duplicates
            rows = client.lookup({"user": ids})
            assert rows["user"].shape == (5, 3, 4) and rows["user"].is_leaf and rows["user"].requires_grad
            for found in (plain(ids), rows["user"]):
                head(found.mean(dim=1)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            client.apply(rows)
        assert client.step == 20
        torch.testing.assert_close(client.read({"user": torch.arange(20)})["user"], plain.weight.detach())


def test_any_whole_numbers_of_any_shape_are_ids(client: EmbeddingClient) -> None:
    huge = np.array([2**64 - 1, 7], dtype=np.uint64)
    rows = client.lookup({"user": huge, "item": torch.tensor(-1, dtype=torch.int32)})
    assert rows["user"].shape == (2, 4) and rows["item"].shape == (3,)
    same = client.read({"user": torch.tensor([[-1], [7]])})["user"]
    assert torch.equal(same.reshape(2, 4), rows["user"].detach()) and not same.requires_grad
    for ids in (torch.empty(0, 2, dtype=torch.int64), torch.arange(6).reshape(2, 3).T):
        assert client.lookup({"user": ids})["user"].shape == (*ids.shape, 4)


@every("mode", MODES)
def test_read_sees_all_that_was_applied_and_stores_nothing(mode: str) -> None:
    with EmbeddingClient.local(TABLES, consistency=mode) as client:
        before = client.read({"user": torch.tensor([3])})["user"]
        assert [table["rows"] for table in client.summary()["tables"]] == [0, 0]
        train_step(client, torch.tensor([3, 3]))
        torch.testing.assert_close(client.read({"user": torch.tensor([3])})["user"], before - 0.5 * 2)
        assert [table["rows"] for table in client.summary()["tables"]] == [1, 0]


def test_a_step_without_samples_and_an_unused_table_push_nothing(client: EmbeddingClient) -> None:
    client.apply()
    client.apply(client.lookup({}))
    rows = client.lookup({"user": torch.tensor([1]), "item": torch.tensor([1])})
    rows["user"].sum().backward()
    client.apply(rows)
    assert [table["rows"] for table in client.summary()["tables"]] == [1, 0] and client.step == 3


def test_scale_multiplies_gradients_and_rows_whose_gradient_is_not_finite_are_left_out(client: EmbeddingClient) -> None:
    ids = torch.tensor([1, 2])
    before = client.read({"user": ids})["user"]
    rows = client.lookup({"user": ids})
    (rows["user"] * torch.tensor([[float("nan")], [1.0]])).sum().backward()
    client.apply(rows, scale=0.25)
    torch.testing.assert_close(client.read({"user": ids})["user"], before - torch.tensor([[0.0], [0.5 * 0.25]]))
    assert client.dropped_rows == 1 and client.summary()["dropped_rows"] == 1


@every(
    ("ids", "kind", "text"),
    [
        ({"user": torch.tensor([1.0])}, DataError, "table user: ids are float32; allowed: whole numbers"),
        ({"user": np.array([True])}, DataError, "table user: ids are bool"),
        ({"user": [1, 2]}, DataError, "table user: ids are a list; allowed: a tensor"),
        ({"usr": torch.tensor([1])}, UserError, "unknown table usr; did you mean user?"),
        ({"q": torch.tensor([1])}, UserError, "unknown table q; the tables are user, item"),
        (torch.tensor([1]), UserError, "is given a Tensor; allowed: a dict of table name to ids"),
    ],
)
def test_ids_that_cannot_be_looked_up_are_told_in_one_line(
    client: EmbeddingClient, ids: Any, kind: type[ShardkeepError], text: str
) -> None:
    for call in (client.lookup, client.read):
        with pytest.raises(kind) as told:
            call(ids)
        assert text in str(told.value) and "\n" not in str(told.value)


def test_a_misused_client_says_so_in_one_line(client: EmbeddingClient) -> None:
    def with_gradients(of: EmbeddingClient) -> Lookup:
        rows = of.lookup({"user": torch.tensor([1])})
        rows["user"].sum().backward()
        return rows

    with EmbeddingClient.local(TABLES) as other:
        foreign = with_gradients(other)
    fresh, earlier, applied = client.lookup({"user": torch.tensor([1])}), with_gradients(client), with_gradients(client)
    twice = [with_gradients(client)] * 2
    for given, text in (
        ([fresh], "have no gradients; call loss.backward() first"),
        (twice, "the same lookup twice"),
        ([applied], ""),
        ([applied], "the rows of step 0 were applied already"),
        ([earlier], "the rows are of step 0, this is step 1; look up again"),
        ([foreign], "looked up by another client"),
        ([{"user": torch.zeros(1)}], "is given a dict; allowed: what lookup returned"),
    ):
        with pytest.raises(UserError) if text else contextlib.nullcontext() as told:
            client.apply(*given)  # type: ignore[arg-type]
        if told is not None:
            assert text in str(told.value) and "\n" not in str(told.value)
    client.close()
    client.close()
    with pytest.raises(UserError, match="lookup: the client is closed"):
        client.lookup({"user": torch.tensor([1])})


@every(
    ("tables", "consistency", "text"),
    [
        ([], "sync", "tables: is empty"),
        ([TABLES[0], TABLES[0]], "sync", "two of them are named user"),
        (["user"], "sync", "holds a str; allowed: TableSpec"),
        (
            [TableConfig(dim=4)],
            "sync",
            "holds a TableConfig .an entry of a job's config, without a name.; allowed: Tab",
        ),
        (TABLES, "loose", "consistency: 'loose'; allowed: sync, bounded, async"),
    ],
)
def test_settings_that_cannot_be_are_refused(tables: Any, consistency: str, text: str) -> None:
    for start in (EmbeddingClient.local, EmbeddingClient.serve):
        with pytest.raises(ConfigError, match=text):
            start(tables, consistency=consistency)


@every("setting", ["values", "select"])
def test_a_plug_that_cannot_be_loaded_is_refused_before_a_process_starts(setting: str) -> None:
    compression = CompressionConfig(push={setting: "nowhere_x:Own", "pool_rows": 9})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"push\.{setting}: module 'nowhere_x' cannot be imported"):
        EmbeddingClient.serve(TABLES, compression=compression)
