"""Pooled lookups of a loop of the user's own beside torch.nn.EmbeddingBag."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardkeep import Bag, EmbeddingClient, TableSpec
from shardkeep.base.errors import ShardkeepError
from tests.support.cases import every

LR = 0.3
TABLES = [
    TableSpec(name=name, dim=dim, optimizer={"name": "sgd", "lr": LR}) for name, dim in (("item", 4), ("user", 3))
]


def bags_of(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (count,), generator=random)
    return torch.randint(0, 9, (int(lengths.sum()),), generator=random), lengths


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


@every(("pooling", "form"), [("sum", "lengths"), ("mean", "offsets"), ("max", "numpy")])
def test_bags_pool_and_train_as_embedding_bag_does(pooling: Any, form: str) -> None:
    with EmbeddingClient.local(TABLES, consistency="sync") as client:
        plain = nn.EmbeddingBag(9, 4, mode=pooling, include_last_offset=True)
        with torch.no_grad():
            plain.weight.copy_(client.read({"item": torch.arange(9)})["item"])
        optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
        scale = torch.arange(1.0, 8.0)[:, None]
        for step in range(4):
            values, lengths = bags_of(7, step)
            given: dict[str, Any] = {
                "lengths": {"values": values, "lengths": lengths},
                "offsets": {"values": values, "offsets": offsets_of(lengths)},
                "numpy": {"values": values.numpy(), "lengths": lengths.numpy()},
            }[form]
            rows = client.pool({"tags": Bag(**given, table="item", pooling=pooling)})
            expected = plain(values, offsets_of(lengths))
            assert rows["tags"].shape == (7, 4)
            torch.testing.assert_close(rows["tags"], expected)
            for found in (rows["tags"], expected):
                (found * scale).square().sum().backward()
            client.apply(rows)
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(client.read({"item": torch.arange(9)})["item"], plain.weight.detach())


def test_trainable_weights_get_the_gradients_of_embedding_bag() -> None:
    values, lengths = bags_of(7, 1)
    with EmbeddingClient.local(TABLES, consistency="sync") as client:
        weights = [
            torch.rand(values.numel(), generator=torch.Generator().manual_seed(2)).requires_grad_() for _ in "ab"
        ]
        table = client.read({"item": torch.arange(9)})["item"].requires_grad_()
        expected = nn.functional.embedding_bag(
            values, table, offsets_of(lengths), mode="sum", per_sample_weights=weights[0], include_last_offset=True
        )
        rows = client.pool({"item": Bag(values, lengths, weights=weights[1] * 1.0)})
        torch.testing.assert_close(rows["item"], expected)
        for found in (rows["item"], expected):
            found.pow(3).sum().backward()
        torch.testing.assert_close(weights[1].grad, weights[0].grad)
        client.apply(rows)
        assert table.grad is not None
        found = client.read({"item": torch.arange(9)})["item"]
        torch.testing.assert_close(found, (table - LR * table.grad).detach())


def test_weights_may_come_when_the_rows_are_there() -> None:
    values, lengths = bags_of(7, 1)
    weight = torch.rand(values.numel(), generator=torch.Generator().manual_seed(3)).requires_grad_()
    with EmbeddingClient.local(TABLES, consistency="sync") as client:
        later = client.prefetch({"tags": Bag(values, lengths, weights=lambda: weight * 2.0, table="item")})
        with torch.no_grad():
            weight.mul_(3.0)  # as an optimizer's step in between does
        expected = client.pool({"tags": Bag(values, lengths, weights=weight.detach() * 2.0, table="item")})
        rows = later.result()
        assert torch.equal(rows["tags"], expected["tags"])
        rows["tags"].sum().backward()
        assert weight.grad is not None and bool(weight.grad.any())
        short = {"tags": Bag(values, lengths, weights=lambda: torch.ones(1), table="item")}
        with pytest.raises(ShardkeepError, match=rf"feature tags: 1 weights for {values.numel()} ids"):
            client.pool(short)


@every(
    ("bags", "text"),
    [
        ({"item": torch.arange(3)}, "feature item: is given a Tensor; allowed: a Bag"),
        ({"item": Bag(torch.arange(3))}, "feature item: a Bag takes lengths or offsets, one of the two"),
        ({"item": Bag(torch.arange(3), np.array([1, 1]))}, "feature item: 3 ids with 2 lengths that sum to 2"),
        ({"item": Bag(torch.arange(3), np.array([4, -1]))}, "feature item: 3 ids with 2 lengths that sum to 3"),
        ({"item": Bag(torch.arange(3), np.array([1.5, 1.5]))}, "item: lengths or offsets are float64; allowed: whole"),
        ({"item": Bag(torch.arange(3), offsets=np.array([0, 2, 1, 3]))}, "offsets begin at 0, do not fall, and end"),
        ({"item": Bag(torch.ones(3), np.array([3]))}, "feature item: ids are float32; allowed: whole numbers"),
        ({"item": Bag(torch.arange(3), [3], weights=[1.0])}, "feature item: 1 weights for 3 ids"),
        ({"item": Bag(torch.arange(3), [3], weights=[1, 1, 1], pooling="mean")}, "pooling mean takes no weights"),
        ({"item": Bag(torch.arange(3), [3], pooling="first")}, "pooling 'first'; allowed: sum, mean, max, none"),
        ({"itm": Bag(torch.arange(3), [3])}, "pool: unknown table itm; did you mean item?"),
        ({"a": Bag(torch.arange(3), [3], table="item"), "user": Bag(torch.arange(2), [1, 1])}, "different numbers"),
        ([1], "pool: is given a list; allowed: a dict of feature name to Bag"),
    ],
)
def test_bags_that_cannot_be_are_told_in_one_line(bags: Any, text: str) -> None:
    with EmbeddingClient.local(TABLES) as client, pytest.raises(ShardkeepError) as told:
        client.pool(bags)
    assert text in str(told.value) and "\n" not in str(told.value)
