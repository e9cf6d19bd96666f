"""Modules over a client beside torch.nn: same output, same training, one push a step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkeep import EmbeddingClient, Lookup, TableSpec
from shardkeep.base.errors import UserError
from shardkeep.nn import EmbeddingBagCollection, EmbeddingCollection, Jagged
from tests.support.cases import every
from tests.support.cluster import Cluster
from tests.support.forked import SCRIPT

LR = 0.3
TABLES = [
    TableSpec(name=name, dim=dim, optimizer={"name": "sgd", "lr": LR}) for name, dim in (("item", 4), ("user", 3))
]
FEATURES = {"user": "user", "seen": "item", "bought": "item"}


class Keyed:
    """A keyed jagged tensor as TorchRec has it: values and lengths of all keys, one key after the other."""

    def __init__(self, parts: dict[str, Jagged]) -> None:
        self._parts = parts

    def keys(self) -> list[str]:
        return list(self._parts)

    def values(self) -> torch.Tensor:
        return torch.cat([part.values() for part in self._parts.values()])

    def lengths(self) -> torch.Tensor:
        return torch.cat([part.lengths() for part in self._parts.values()])

    def weights_or_none(self) -> torch.Tensor | None:
        weights = [part.weights_or_none() for part in self._parts.values()]
        return None if weights[0] is None else torch.cat([each for each in weights if each is not None])


def jagged(count: int, seed: int, *, most: int = 3, weighted: bool = False) -> Jagged:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most + 1, (count,), generator=random)
    values = torch.randint(0, 9, (int(lengths.sum()),), generator=random)
    return Jagged(values, lengths, torch.rand(values.numel(), generator=random) if weighted else None)


def batch(seed: int, *, weighted: bool = False) -> dict[str, Jagged]:
    return {name: jagged(6, 7 * seed + n, weighted=weighted) for n, name in enumerate(("other", *FEATURES))}


class Plain(nn.Module):
    """The same collection by torch.nn.EmbeddingBag, with the values of a client."""

    def __init__(self, client: EmbeddingClient, **options: Any) -> None:
        super().__init__()
        self.tables = nn.ModuleDict()
        for spec in client.tables:
            self.tables[spec.name] = nn.EmbeddingBag(9, spec.dim, include_last_offset=True, **options)
            with torch.no_grad():
                self.tables[spec.name].weight.copy_(client.read({spec.name: torch.arange(9)})[spec.name])

    def forward(self, features: dict[str, Jagged]) -> dict[str, torch.Tensor]:
        bags = {name: features[name] for name in FEATURES}
        return {
            name: self.tables[FEATURES[name]](bag.values(), bag.offsets(), bag.weights_or_none())
            for name, bag in bags.items()
        }


@pytest.fixture
def client() -> Iterator[EmbeddingClient]:
    with EmbeddingClient.local(TABLES, seed=5, consistency="sync") as client:
        yield client


def loss_of(rows: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum(((n + 1) * row * torch.arange(1, 7)[:, None]).square().mean() for n, row in enumerate(rows.values()))  # type: ignore[return-value]


FORMS: dict[str, Any] = {
    "dict": lambda features: features,
    "keyed": Keyed,
    "nested": lambda features: {
        name: torch.nested.nested_tensor_from_jagged(each.values(), offsets=each.offsets())
        for name, each in features.items()
    },
}


@pytest.mark.parametrize(("form", "pooling"), [("dict", "sum"), ("keyed", "mean"), ("nested", "max")])
def test_a_model_trains_as_with_embedding_bags(client: EmbeddingClient, form: str, pooling: Any) -> None:
    bags, plain = EmbeddingBagCollection(client, FEATURES, pooling=pooling), Plain(client, mode=pooling)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    for step in range(4):
        found, expected = bags(FORMS[form](batch(step))), plain(batch(step))
        assert list(found) == list(FEATURES)
        torch.testing.assert_close(found, expected)
        loss_of(found).backward()  # pushes
        optimizer.zero_grad()
        loss_of(expected).backward()
        optimizer.step()
        assert client.step == step + 1
    with torch.no_grad():
        torch.testing.assert_close(bags(batch(9)), plain(batch(9)))
    assert client.step == 4 and not list(bags.parameters()) and not bags.state_dict()


def test_weights_multiply_the_rows_and_plain_tensors_are_bags_and_a_factor_scales_gradients(
    client: EmbeddingClient,
) -> None:
    bags, plain = EmbeddingBagCollection(client, FEATURES, weighted=True), Plain(client, mode="sum")
    features = batch(1, weighted=True)
    torch.testing.assert_close(bags(Keyed(features)), plain(features))
    with EmbeddingClient.local(TABLES) as other:
        bags = EmbeddingBagCollection(other, {"user": "user", "seen": "item"}, scale=lambda: 0.5)
        before = other.read({"item": torch.arange(5)})["item"]
        rows = bags({"user": torch.tensor([1, 2]), "seen": torch.tensor([[1, 2, 3], [4, 4, 4]])})
        expected = torch.stack([before[1] + before[2] + before[3], 3 * before[4]])
        torch.testing.assert_close(rows["seen"].detach(), expected)
        rows["seen"].sum().backward()
        counts = torch.tensor([0, 1, 1, 1, 3])[:, None]
        torch.testing.assert_close(other.read({"item": torch.arange(5)})["item"], before - 0.5 * LR * counts)


def test_sequences_train_with_the_bits_of_torchs_embedding_whatever_the_samples_of_each_feature(
    client: EmbeddingClient,
) -> None:
    sequences, weight_VD = EmbeddingCollection(client, FEATURES), client.read({"item": torch.arange(9)})["item"]
    weight_VD.requires_grad_()
    features = {"user": jagged(2, 1), "seen": jagged(6, 2, most=5), "bought": jagged(0, 3)}
    rows = sequences(features)
    values_ND = nn.functional.embedding(features["seen"].values(), weight_VD)
    assert torch.equal(rows["seen"].values(), values_ND)
    assert torch.equal(rows["seen"].lengths(), features["seen"].lengths())
    for found_ND in (rows["seen"].values(), values_ND):
        (found_ND * torch.arange(0.1, len(found_ND))[:, None].sin()).sum().backward()
    assert weight_VD.grad is not None and [len(rows[name].lengths()) for name in FEATURES] == [2, 6, 0]
    after_VD = client.read({"item": torch.arange(9)})["item"]
    assert torch.equal(after_VD, weight_VD.detach() - LR * weight_VD.grad)


def test_all_modules_over_a_client_are_one_step(client: EmbeddingClient) -> None:
    bags, sequences = EmbeddingBagCollection(client, {"user": "user"}), EmbeddingCollection(client, {"seen": "item"})
    unused = EmbeddingBagCollection(client, {"bought": "item"})
    for step in range(3):
        features = batch(step)
        pooled, rows, _ = bags(features), sequences(features), unused(features)
        (pooled["user"].sum() + rows["seen"].values().sum()).backward()
        assert client.step == step + 1


def test_rows_ahead_are_those_of_the_plain_call() -> None:
    digests = []
    for ahead in (False, True):
        with EmbeddingClient.local(TABLES, seed=5, consistency="sync") as client:
            bags, sequences = EmbeddingBagCollection(client, FEATURES), EmbeddingCollection(client, {"other": "item"})
            coming: list[Any] = []
            for step in range(7):
                if step < 6 and ahead:
                    coming.append((bags.prefetch(batch(step)), sequences.prefetch(batch(step))))
                if step == 0:
                    continue
                first, second = coming.pop(0) if ahead else (batch(step - 1), batch(step - 1))
                (loss_of(bags(first)) + sequences(second)["other"].values().sum()).backward()
            assert client.step == 6
            digests.append(client.summary(digest=True)["state_digest"])
    assert digests[0] == digests[1]


def test_with_an_optimizer_several_backward_passes_are_one_step(client: EmbeddingClient) -> None:
    top = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(top.parameters(), lr=0.1)
    bags = EmbeddingBagCollection(client, {"user": "user"}, steps=optimizer)
    before = client.read({"user": torch.arange(9)})["user"]
    ids = torch.tensor([1, 2])
    for step in range(2):
        for _ in range(3):
            bags({"user": ids})["user"].sum().backward()
        assert client.step == step
        optimizer.step()
        assert client.step == step + 1
    after = client.read({"user": torch.arange(9)})["user"]
    torch.testing.assert_close(after[1:3], before[1:3] - 2 * 3 * LR)
    optimizer.step()  # without samples: an empty step
    assert client.step == 3


def test_a_backward_pass_that_raises_is_followed_by_a_good_one(client: EmbeddingClient) -> None:
    bags = EmbeddingBagCollection(client, {"user": "user", "seen": "item"})

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            raise RuntimeError("no gradient")

    rows = bags(batch(0))
    with pytest.raises(RuntimeError, match="no gradient"):
        (rows["user"].sum() + Fails.apply(rows["seen"]).sum()).backward()  # type: ignore[no-untyped-call]
    assert client.step == 0
    loss_of(bags(batch(1))).backward()
    assert client.step == 1


@every("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_a_step_leaves_no_memory_behind(client: EmbeddingClient, kind: Any) -> None:
    module = kind(client, {"user": "user"})
    gc.freeze()  # what is there already is not looked at
    gc.disable()  # what only it would find is found too late
    try:
        for step in range(4):
            out = module({"user": torch.tensor([step])})["user"]
            (out if isinstance(out, torch.Tensor) else out.values()).sum().backward()
        del out
        assert sum(issubclass(type(each), Lookup) for each in gc.get_objects()) == 1  # that of the last step
    finally:
        gc.enable()
        gc.unfreeze()


def test_misuse_is_told_in_one_line(client: EmbeddingClient) -> None:
    bags = EmbeddingBagCollection(client, {"user": "user", "seen": "item"})
    for features, text in (
        ({"user": torch.tensor([1])}, "feature seen: is missing; there are user"),
        ([1], "features are a list; allowed: a dict of feature name to tensors, or a KeyedJaggedTensor"),
        ({"user": torch.ones(1, 1, 1), "seen": 1}, r"feature user: a tensor \(1, 1, 1\); allowed: \(B,\), \(B, K\)"),
        ({"user": torch.tensor([1]), "seen": 1}, "feature seen: is a int; allowed: a tensor, or a jagged tensor"),
    ):
        with pytest.raises(UserError, match=text):
            bags(features)
    with pytest.raises(UserError, match="feature user: unknown table usr; the tables are item, user"):
        EmbeddingBagCollection(client, {"user": "usr"})
    with pytest.raises(UserError, match="scale or steps: another module over this client has other ones"):
        EmbeddingCollection(client, {"user": "user"}, scale="sum")
    rows = bags(batch(0))
    loss = rows["user"].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UserError, match="the rows of step 0 were pushed by an earlier backward pass; add the losses"):
        loss.backward()


@every(("pooling", "freeze"), [("sum", False), ("mean", True), ("max", False)])
def test_joined_rows_train_as_the_rows_of_each_feature(pooling: Any, freeze: bool) -> None:
    """Also where the keys stand in another order than the features, and where a table is frozen."""
    tables = [TABLES[0], TABLES[1].model_copy(update={"freeze": freeze})]
    with EmbeddingClient.local(tables, seed=3) as one, EmbeddingClient.local(tables, seed=3) as other:
        joined = EmbeddingBagCollection(one, FEATURES, pooling=pooling, joined=True)
        apart = EmbeddingBagCollection(other, FEATURES, pooling=pooling)
        for step in range(3):
            parts = batch(step)
            side_by_side = joined.joined(Keyed({name: parts[name] for name in reversed(parts)}))
            rows = torch.cat(list(apart(parts).values()), dim=1)
            torch.testing.assert_close(side_by_side, rows, rtol=0, atol=0)
            weights = torch.arange(1.0, 1 + rows.shape[1])
            (side_by_side.square() * weights).sum().backward()
            (rows.square() * weights).sum().backward()
        assert one.summary(digest=True)["state_digest"] == other.summary(digest=True)["state_digest"]


# ---- a state dict of a model whose rows are on servers has none of them: writing it warns, once a process ----

TRAIN = """
import copy, sys, torch
from torch import nn
from shardkeep import EmbeddingClient, TableSpec
from shardkeep.nn import EmbeddingBagCollection
with EmbeddingClient.local([TableSpec(name="item", dim=4)]) as client:
    model = nn.ModuleDict({"bags": EmbeddingBagCollection(client, {"item": "item"}), "top": nn.Linear(4, 1)})
    {lines}
    again = torch.load("model.pt", weights_only=True)
    assert all(torch.equal(again[name], weight) for name, weight in model.state_dict().items()) and len(again) == 2
    model.load_state_dict(again)
"""
WRITE = 'torch.save(model.state_dict(), "model.pt")'


@pytest.mark.waits_for_processes
@pytest.mark.parametrize(
    ("lines", "warnings"),
    [
        (f"torch.save([dict(a=1), model.state_dict()], 'other.pt'); {WRITE}; {WRITE}", 1),
        (f"client.save('rows', {{'model': copy.deepcopy(model.state_dict())}}); {WRITE}", 0),
    ],
    ids=["without rows", "rows saved"],
)
def test_a_state_dict_that_is_written_without_the_rows_warns_once(
    cluster: Cluster, tmp_path: Path, lines: str, warnings: int
) -> None:
    (tmp_path / "train.py").write_text(TRAIN.replace("{lines}", lines))
    ended = cluster.command("train.py", main=SCRIPT, cwd=tmp_path).end()
    assert ended.code == 0, ended.err
    assert len(ended.err.splitlines()) == warnings, ended.err
    for name in ("client.checkpoint", "client.save", "shardkeep.torchrec.save(model, FILE)"):
        assert ended.err.count(name) == warnings
