"""What a KeyedJaggedTensor may have, beside TorchRec's own collections. Needs torchrec (as CONTRIBUTING.md says)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shardkeep import EmbeddingClient, SgdConfig, UserError
from shardkeep.nn import EmbeddingBagCollection
from shardkeep.torchrec import load, shard, tables_of, unshard
from tests.support.cases import every
from tests.support.late_import import late_import

torchrec = late_import("torchrec")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROWS, LR = 20, 0.1
FEATURES = {"t0": ["f0", "shared"], "t1": ["f1"], "t2": ["shared"]}
KEYS = ["f1", "shared", "f0"]  # in another order than the model's


def bags(pooling: str = "SUM", *, weighted: bool = False) -> Any:
    torch.manual_seed(3)
    configs = [
        torchrec.EmbeddingBagConfig(
            name=name,
            embedding_dim=4,
            num_embeddings=ROWS,
            feature_names=features,
            pooling=torchrec.PoolingType[pooling],
        )
        for name, features in FEATURES.items()
    ]
    return torchrec.EmbeddingBagCollection(configs, is_weighted=weighted)


def rows(*, need_indices: bool = False) -> Any:
    torch.manual_seed(3)
    configs = [
        torchrec.EmbeddingConfig(name=name, embedding_dim=4, num_embeddings=ROWS, feature_names=features)
        for name, features in FEATURES.items()
    ]
    return torchrec.EmbeddingCollection(tables=configs, need_indices=need_indices)


def kjt(
    strides: list[int],
    inverse: list[list[int]] | None = None,
    *,
    weighted: bool = False,
    names: list[str] = KEYS,
    other: bool = False,
    seed: int = 5,
) -> Any:
    """Of each key `strides` samples, some of them empty. `other`: there is a key first that no model has."""
    random = torch.Generator().manual_seed(seed)
    keys, strides = (["other", *KEYS], [strides[0], *strides]) if other else (KEYS, strides)
    lengths = torch.randint(0, 4, (sum(strides),), generator=random)
    count = int(lengths.sum())
    return torchrec.KeyedJaggedTensor(
        keys=keys,
        values=torch.randint(0, ROWS, (count,), generator=random),
        weights=torch.rand(count, generator=random) if weighted else None,
        lengths=lengths,
        stride_per_key_per_rank=None if len({*strides}) == 1 else [[each] for each in strides],
        inverse_indices=None if inverse is None else (names, torch.tensor(inverse)),
    )


@pytest.fixture
def both() -> Iterator[Callable[..., tuple[Any, Any]]]:
    clients = []

    def made(make: Callable[..., Any], *given: Any, **options: Any) -> tuple[Any, Any]:
        plain = make(*given, **options)
        client = EmbeddingClient.local(tables_of(plain, optimizer=SgdConfig(lr=LR)), consistency="sync")
        clients.append(client)
        load(plain, client)
        return plain, shard(make(*given, **options), client)

    yield made
    for client in clients:
        client.close()


INVERSE = [[0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 1]]
SAMPLES: dict[str, tuple[list[int], list[list[int]] | None]] = {
    "no repeats": ([4, 4, 4], None),
    "each sample twice": ([2, 2, 2], INVERSE),
    "strides that differ": ([2, 3, 5], [[0, 1, 1, 0], [2, 1, 0, 0], [4, 0, 3, 1]]),
    "one key without repeats": ([4, 2, 2], [[0, 1, 2, 3], [1, 1, 0, 0], [0, 0, 0, 1]]),
}


@every(("strides", "inverse"), SAMPLES.values(), ids=SAMPLES)
@every(("pooling", "weighted"), [("SUM", False), ("MEAN", False), ("SUM", True)])
def test_bags_train_as_torchrecs_own_and_samples_that_repeat_are_pooled_once(
    both: Any, strides: list[int], inverse: list[list[int]] | None, pooling: str, weighted: bool
) -> None:
    plain, ours = both(bags, pooling, weighted=weighted)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    factors = torch.arange(1, 17)
    for step in range(3):
        features = kjt(strides, inverse, weighted=weighted, other=inverse is None, seed=step)
        expected, found = plain(features), ours(features).wait()
        assert list(found.keys()) == list(expected.keys()) == ["f0", "shared@t0", "f1", "shared@t2"]
        torch.testing.assert_close(found.values(), expected.values())
        for each in (expected, found):
            (each.values() * factors).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    back = unshard(ours)
    assert type(back) is torchrec.EmbeddingBagCollection
    for name, table in plain.embedding_bags.items():
        torch.testing.assert_close(back.embedding_bags[name].weight, table.weight)


@every(("need_indices", "weighted"), [(False, True), (True, False)])
def test_sequences_train_as_torchrecs_own_with_the_samples_of_each_key(
    both: Any, need_indices: bool, weighted: bool
) -> None:
    plain, ours = both(rows, need_indices=need_indices)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    for strides, inverse in SAMPLES.values():
        features = kjt(strides, inverse, weighted=weighted, other=inverse is None)
        expected, found = plain(features), ours(features).wait()
        assert list(found) == list(expected)
        for name, each in expected.items():
            torch.testing.assert_close(found[name].values(), each.values())
            torch.testing.assert_close(found[name].lengths(), each.lengths())
            ids, own = each.weights_or_none(), found[name].weights_or_none()
            assert (ids is None) == (own is None) and (ids is None or torch.equal(ids, own))
        for out in (expected, found):
            losses = [number * each.values().square().mean() for number, each in enumerate(out.values(), 1)]
            torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert unshard(ours).need_indices() is need_indices


REFUSED = {
    "strides without inverse": (lambda: kjt([2, 3, 2]), "different numbers of bags: .*allowed: the same of all"),
    "inverse of other keys": (
        lambda: kjt([2, 2, 2], INVERSE, names=["f1", "shared", "f2"]),
        "feature f0: inverse_indices has no such key; allowed: 0 to 1",
    ),
    "inverse beyond": (
        lambda: kjt([2, 2, 2], [[0, 2], [0, 1], [0, 1]]),
        "feature f1: inverse_indices has 0 to 2; allowed: 0 to 1",
    ),
    "values too few": (
        lambda: torchrec.KeyedJaggedTensor(keys=KEYS, values=torch.arange(5), lengths=torch.ones(6, dtype=torch.int64)),
        "their lengths are those of 6 ids, and values has 5",
    ),
}


def test_what_no_model_can_take_is_refused_in_one_line(both: Any) -> None:
    _, ours = both(bags)
    _, weighing = both(bags, weighted=True)
    refused = [(ours, make, text) for make, text in REFUSED.values()]
    none = "feature f0: has no weights, and the collection is weighted"
    for model, make, text in (*refused, (weighing, lambda: kjt([2, 2, 2]), none)):
        with pytest.raises(UserError, match=text) as told:
            model(make()).wait()
        assert "\n" not in str(told.value)


def test_our_own_modules_apply_inverse_indices(both: Any) -> None:
    with EmbeddingClient.local(tables_of(bags(), optimizer=SgdConfig(lr=LR)), consistency="sync") as client:
        plain = bags()
        load(plain, client)
        own = EmbeddingBagCollection(client, {"f0": "t0", "f1": "t1"})
        features = kjt(*SAMPLES["strides that differ"])
        found, expected = own(features), plain(features)
        torch.testing.assert_close(found["f0"], expected["f0"])
        torch.testing.assert_close(found["f1"], expected["f1"])
