"""Frozen tables in loops of the user's own: their rows are read, get no gradient, and never change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardkeep
from shardkeep import EmbeddingClient, TableSpec, nn as snn
from shardkeep.compression.config import CompressionConfig
from shardkeep.workers.embeddings.bags import Bag
from tests.support.cases import every

ADAGRAD = {"name": "adagrad", "lr": 0.1}
FROZEN = TableSpec(name="frozen", dim=4, optimizer=ADAGRAD, freeze=True)
TRAINED = TableSpec(name="trained", dim=4, optimizer=ADAGRAD)
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "coded ids": {"ids": "coded"},
    "residuals": {"push": {"values": "int8", "keep": 0.5, "pool_rows": 100}},
    "single values": {"push": {"select": "top_k", "keep": 0.3, "pool_rows": 100}},
}


def rows_of(client: EmbeddingClient) -> dict[str, torch.Tensor]:
    return client.read({table.name: torch.arange(12) for table in client.tables})


@every(("form", "mode"), zip(FORMS.values(), ("sync", "bounded", "sync", "async"), strict=True), ids=FORMS)
def test_a_frozen_table_changes_neither_its_rows_nor_those_of_the_others(form: dict[str, Any], mode: str) -> None:
    ends, fixed = [], torch.empty(0)
    for tables in ([FROZEN, TRAINED], [TRAINED, FROZEN], [TRAINED]):
        compression = CompressionConfig.model_validate(form)
        with EmbeddingClient.local(tables, seed=1, consistency=mode, compression=compression) as client:
            before = rows_of(client)
            fixed = before.get("frozen", fixed)
            for step in range(5):
                ids = (torch.arange(10) * (step + 1)) % 12
                rows = client.lookup({table.name: ids for table in tables})
                assert [rows[table.name].requires_grad for table in tables] == [not table.freeze for table in tables]
                (rows["trained"] * rows.get("frozen", fixed[ids])).sum().backward()
                client.apply(rows)
            after = rows_of(client)
            assert torch.equal(after.get("frozen", fixed), fixed)
            counts = {table["name"]: table["rows"] for table in client.summary()["tables"]}
            assert counts.get("frozen", 0) == 0 and counts["trained"] > 0
            assert not torch.equal(before["trained"], after["trained"])
            ends.append(after["trained"])
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_no_byte_of_a_frozen_table_is_pushed() -> None:
    """By hand: 10 ids of 8 bytes and 10 rows of 4 float32 values, of the trained table alone."""
    with EmbeddingClient.local([FROZEN, TRAINED], consistency="sync") as client:
        rows = client.lookup({"frozen": torch.arange(1000), "trained": torch.arange(10)})
        (rows["trained"].sum() * rows["frozen"].sum()).backward()
        client.apply(rows)
        sent = client.summary()["bytes"]["push"]
        assert (sent["ids"], sent["values"]) == (80, 160)
        only = client.lookup({"frozen": torch.arange(7)})
        client.apply(only)  # nothing could reach it, so nothing is missing
        more = client.summary()["bytes"]["push"]
        assert (more["ids"], more["values"]) == (80, 160) and client.step == 2


def test_bags_of_frozen_tables_get_no_gradient_and_their_weights_do() -> None:
    with EmbeddingClient.local([FROZEN, TRAINED], consistency="sync") as client:
        weights = torch.ones(3, requires_grad=True)
        bags = {
            "frozen": Bag(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]), weights=weights),
            "trained": Bag(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1])),
        }
        pooled = client.pool(bags)
        (pooled["frozen"].sum() + pooled["trained"].sum()).backward()
        client.apply(pooled)
        rows = client.read({"frozen": torch.tensor([1, 2, 3])})["frozen"]
        assert weights.grad is not None and torch.allclose(weights.grad, rows.sum(dim=1))
        assert {t["name"]: t["rows"] for t in client.summary()["tables"]} == {"frozen": 0, "trained": 3}


@every("ahead", [False, True])
def test_modules_over_frozen_tables_train_as_frozen_embeddings_of_torch(ahead: bool) -> None:
    """One module has a frozen and a trained table, another one only a frozen table."""
    tables = [TableSpec(name="a", dim=3, optimizer={"name": "sgd", "lr": 0.5}), TableSpec(name="b", dim=3, freeze=True)]
    with EmbeddingClient.local(tables, seed=2, consistency="sync") as client:
        mixed = snn.EmbeddingBagCollection(client, {"x": "a", "y": "b"})
        frozen = snn.EmbeddingBagCollection(client, {"z": "b"})
        start = {name: rows.clone() for name, rows in client.read({t.name: torch.arange(9) for t in tables}).items()}
        plain = {name: nn.Embedding.from_pretrained(start[name].clone(), freeze=name == "b") for name in "ab"}
        optimizer = torch.optim.SGD(plain["a"].parameters(), lr=0.5)
        for step in range(6):
            ids = (torch.arange(6) + step) % 9
            given: Any = {"x": ids, "y": ids}
            other: Any = {"z": ids}
            if ahead:
                given, other = mixed.prefetch(given), frozen.prefetch(other)
            found = mixed(given)
            loss = (found["x"] * found["y"]).sum() + (found["x"] * frozen(other)["z"]).sum()
            loss.backward()
            expected = (plain["a"](ids) * plain["b"](ids)).sum() * 2
            assert loss.item() == pytest.approx(expected.item())
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
        assert client.step == 6
        ends = client.read({t.name: torch.arange(9) for t in tables})
        assert torch.equal(ends["b"], start["b"]) and torch.allclose(ends["a"], plain["a"].weight, atol=1e-6)


def test_a_model_of_frozen_rows_alone_trains_its_dense_part() -> None:
    with EmbeddingClient.local([FROZEN], consistency="bounded") as client:
        module, head = snn.EmbeddingBagCollection(client, {"f": "frozen"}), nn.Linear(4, 1)
        for _ in range(20):  # more steps than may be under way
            head(module(module.prefetch({"f": torch.arange(5)}))["f"]).sum().backward()
        assert head.weight.grad is not None and client.step == 0


def test_a_frozen_table_takes_no_admission_and_no_expiry_from_the_default_table() -> None:
    tables = {"default": {"admit": {"min_count": 2}, "evict": {"ttl_steps": 5}}, "t": {"freeze": True}}
    config = shardkeep.JobConfig.model_validate({"tables": tables})
    assert config.table("t").admit is None and config.table("t").evict is None
    assert config.table("u").admit is not None and not config.table("u").freeze
