"""The embedding layer against numpy.unique and torch.nn.functional.embedding_bag."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from shardkeep.base.errors import ConfigError, DataError, ProtocolError
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import Catalog, JaggedLayout, JaggedRows
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature, Schema
from shardkeep.workers.embeddings.layer import Embeddings, non_finite_rows, scale_rows
from shardkeep.workers.embeddings.plan import Plan, dedupe
from shardkeep.workers.embeddings.transfers import to_host
from tests.support.cases import every
from tests.support.examples import examples

EXTREMES = [0, -1, 1, np.iinfo(np.int64).min, np.iinfo(np.int64).max]
DIM = 3
SCHEMA = Schema(
    dense=(),
    features=(
        Feature("single", "users"),
        Feature("bag", "items", "sum"),
        Feature("average", "items", "mean"),
        Feature("scored", "users", "weighted"),
    ),
)
TABLES = {"users": TableSpec(name="users", dim=DIM), "items": TableSpec(name="items", dim=5)}
EMBEDDINGS = Embeddings(SCHEMA, TABLES)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def batch_of(features: Mapping[str, Ragged], num_samples: int) -> Batch:
    return Batch(np.zeros((num_samples, 0), np.float32), dict(features), np.zeros((num_samples, 1), np.float32))


def random_batch(num_samples: int, *, seed: int, num_ids: int = 20, longest: int = 4) -> Batch:
    """Few distinct ids, so that bags hold duplicates, share ids and are often empty."""
    rng = np.random.default_rng(seed)

    def values(count: int) -> np.ndarray:
        return rng.integers(-num_ids // 2, num_ids // 2, count)

    features = {"single": Ragged(values(num_samples))}
    for name in ("bag", "average", "scored"):
        lengths_B = rng.integers(0, longest + 1, num_samples).astype(np.int32)
        count = int(lengths_B.sum())
        weights_N = rng.normal(size=count).astype(np.float32) if name == "scored" else None
        features[name] = Ragged(values(count), lengths_B, weights_N)
    return batch_of(features, num_samples)


def random_rows(plan: Plan, *, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        table: rng.normal(size=(plan.unique[table].size, spec.dim)).astype(np.float32) for table, spec in TABLES.items()
    }


def reference(
    batch: Batch, plan: Plan, rows: Mapping[str, np.ndarray]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Pooled rows by embedding_bag in autograd, and the weights whose gradients it fills. In float64."""
    weights = {t: torch.tensor(r, dtype=torch.float64, requires_grad=True) for t, r in rows.items()}
    pooled = {}
    for feature in SCHEMA.features:
        ragged = batch.ids[feature.name]
        lengths_B = np.ones(len(batch), np.int64) if ragged.lengths_B is None else ragged.lengths_B
        positions = np.searchsorted(plan.unique[feature.table], ragged.values_N)
        scores = None if ragged.weights_N is None else torch.tensor(ragged.weights_N, dtype=torch.float64)
        pooled[feature.name] = F.embedding_bag(
            torch.tensor(positions, dtype=torch.int64),
            weights[feature.table],
            torch.tensor(np.concatenate([[0], np.cumsum(lengths_B)]), dtype=torch.int64),
            mode="mean" if feature.pooling == "mean" else "sum",
            per_sample_weights=scores,
            include_last_offset=True,
        )
    return pooled, weights


def backward(pooled: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    loss = sum((pooled[name].double() * targets[name]).sum() for name in pooled)
    assert isinstance(loss, torch.Tensor)
    loss.backward()


def random_targets(num_samples: int, *, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(num_samples, dim, generator=generator, dtype=torch.float64)
        for name, dim in EMBEDDINGS.feature_dims.items()
    }


def check_dedupe(ids_N):
    expected_U, expected_N = np.unique(ids_N, return_inverse=True)
    _, ids_U, inverse_N = dedupe(ids_N, np.array([0, ids_N.size]))
    assert ids_U.dtype == np.int64 and inverse_N.dtype == np.int32
    assert np.array_equal(ids_U, expected_U) and np.array_equal(inverse_N, expected_N)


@examples(200)
@given(
    ids_N=arrays(
        np.int64,
        st.integers(0, 200),
        elements=st.one_of(st.sampled_from(EXTREMES), st.integers(-8, 8), st.integers(-(2**63), 2**63 - 1)),
    )
)
def test_dedupe_equals_numpy_unique_for_any_ids(ids_N: np.ndarray) -> None:
    check_dedupe(ids_N)


@every("count", [15, 16, 17, 4096, 50_000])
def test_dedupe_of_distinct_and_of_hashed_ids_at_every_table_size(count: int) -> None:
    random = np.random.default_rng(count)
    check_dedupe(random.permutation(count).astype(np.int64) * 2**40)
    check_dedupe(random.integers(-(2**63), 2**63 - 1, count))
    check_dedupe(np.zeros(count, np.int64))


def test_a_plan_lists_each_tables_ids_once_over_all_its_features() -> None:
    batch = batch_of(
        {
            "single": Ragged(ids(5, -7)),
            "bag": Ragged(ids(1, 1), np.array([2, 0], np.int32)),
            "average": Ragged(ids(3), np.array([0, 1], np.int32)),
            "scored": Ragged(ids(9, 5), np.array([1, 1], np.int32), np.array([2, 3], np.float32)),
        },
        2,
    )
    plan = EMBEDDINGS.plan(batch)
    assert {table: u.tolist() for table, u in plan.unique.items()} == {"users": [-7, 5, 9], "items": [1, 3]}
    assert plan.num_samples == 2
    assert plan.feature("single").inverse_N.tolist() == [1, 0]
    assert plan.feature("scored").inverse_N.tolist() == [2, 1]


@examples(60)
@given(num_samples=st.integers(0, 12), seed=st.integers(0, 10_000), num_ids=st.integers(2, 30), cut=st.integers(0, 12))
def test_pooling_and_its_gradient_equal_embedding_bag_also_in_micro_batches(
    num_samples: int, seed: int, num_ids: int, cut: int
) -> None:
    batch = random_batch(num_samples, seed=seed, num_ids=num_ids)
    plan = EMBEDDINGS.plan(batch)
    rows = random_rows(plan, seed=seed)
    expected, weights = reference(batch, plan, rows)
    targets = random_targets(num_samples, seed=seed)
    backward(expected, targets)
    for parts in ([None], [slice(0, cut), slice(cut, num_samples)]):
        grads = JaggedRows.zeros(plan.unique)
        for part in parts:
            leaves, own = EMBEDDINGS.lookup(plan, rows, part), part or slice(None)
            assert list(leaves) == [feature.name for feature in SCHEMA.features]
            for name, leaf in leaves.items():
                assert leaf.is_leaf and leaf.requires_grad and leaf.dtype == torch.float32
                torch.testing.assert_close(leaf.double(), expected[name][own], rtol=1e-6, atol=1e-5)
            backward(leaves, {name: target[own] for name, target in targets.items()})
            EMBEDDINGS.collect(plan, leaves, grads, part)
        for table, grad_UD in grads.items():
            torch.testing.assert_close(torch.from_numpy(grad_UD).double(), weights[table].grad, rtol=1e-5, atol=1e-5)


def test_a_single_weighted_id_needs_no_lengths() -> None:
    embeddings = Embeddings(Schema((), (Feature("scored", "users", "weighted"),)), TABLES)
    weights_N = np.array([2.0, -0.5], np.float32)
    plan = embeddings.plan(batch_of({"scored": Ragged(ids(7, 7), None, weights_N)}, 2))
    rows = {"users": np.array([[1, 2, 3]], np.float32)}
    leaves = embeddings.lookup(plan, rows)
    assert leaves["scored"].tolist() == [[2, 4, 6], [-0.5, -1, -1.5]]
    leaves["scored"].sum().backward()
    grads = JaggedRows.zeros(plan.unique)
    embeddings.collect(plan, leaves, grads)
    assert grads["users"].tolist() == [[1.5, 1.5, 1.5]]


PEAKS = Embeddings(Schema((), (Feature("peak", "items", "max"), Feature("bag", "items"))), TABLES)


def peaks_batch(num_samples: int, *, seed: int, longest: int) -> Batch:
    """Bags of few distinct ids, some of them empty; with `longest` 1, one id each."""
    rng = np.random.default_rng(seed)
    features = {}
    for name in ("peak", "bag"):
        lengths_B = rng.integers(0, longest + 1, num_samples).astype(np.int32) if longest > 1 else None
        count = num_samples if lengths_B is None else int(lengths_B.sum())
        features[name] = Ragged(rng.integers(-5, 5, count), lengths_B)
    return batch_of(features, num_samples)


@examples(60)
@given(num_samples=st.integers(1, 12), seed=st.integers(0, 10_000), longest=st.integers(1, 6), cut=st.integers(0, 12))
def test_the_largest_values_and_their_gradients_equal_embedding_bag(
    num_samples: int, seed: int, longest: int, cut: int
) -> None:
    batch = peaks_batch(num_samples, seed=seed, longest=longest)
    plan = PEAKS.plan(batch)
    rng = np.random.default_rng(seed)
    rows_UD = rng.integers(-2, 3, (plan.unique["items"].size, 5)).astype(np.float32)  # many ties
    rows = JaggedRows.of_arrays(plan.unique, {"items": rows_UD, "users": np.empty((0, DIM), np.float32)})
    bags = [
        torch.nn.EmbeddingBag.from_pretrained(torch.from_numpy(rows_UD), freeze=False, mode=m) for m in ("max", "sum")
    ]
    expected, targets = {}, {}
    for bag, name in zip(bags, ("peak", "bag"), strict=True):
        ragged = batch.ids[name]
        lengths_B = np.ones(num_samples, np.int64) if ragged.lengths_B is None else ragged.lengths_B
        at_N = np.searchsorted(plan.unique["items"], ragged.values_N)
        expected[name] = bag(torch.from_numpy(at_N), torch.from_numpy(np.cumsum(lengths_B) - lengths_B))
        targets[name] = torch.from_numpy(rng.integers(-9, 10, (num_samples, 5)).astype(np.float32))  # sums are exact
    sum((expected[name] * targets[name]).sum() for name in expected).backward()
    grads = JaggedRows.zeros(plan.unique)
    for part in (slice(0, cut), slice(cut, num_samples)):
        leaves = PEAKS.lookup(plan, rows, part)
        backward(leaves, {name: target[part] for name, target in targets.items()})
        PEAKS.collect(plan, leaves, grads, part, rows)
        assert all(torch.equal(leaf, expected[name][part]) for name, leaf in leaves.items())
    wanted_UD = sum(bag.weight.grad for bag in bags).numpy()
    assert np.array_equal(grads["items"], wanted_UD)


def test_a_largest_value_that_is_not_a_number_is_passed_on() -> None:
    plan = PEAKS.plan(batch_of({name: Ragged(ids(1, 2), np.array([2], np.int32)) for name in ("peak", "bag")}, 1))
    for values in ([[np.nan, 1.0], [1.0, np.nan]], [[1.0, np.nan], [np.nan, 1.0]]):
        rows_UD = np.repeat(np.array(values, np.float32), [1, 4], axis=1)
        rows = JaggedRows.of_arrays(plan.unique, {"items": rows_UD, "users": np.empty((0, DIM), np.float32)})
        assert torch.isnan(PEAKS.lookup(plan, rows)["peak"]).all()


def test_tensors_come_to_the_host_in_one_transfer_and_in_their_shapes() -> None:
    drawn = torch.Generator().manual_seed(0)
    tensors = [torch.randn(4, 3, generator=drawn).T, torch.empty(0, 5), torch.randn(2, 2, generator=drawn)]
    found = to_host(tensors)
    assert all(map(torch.equal, found, tensors))
    assert all(tensor.is_contiguous() for tensor in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_device_gives_the_bits_of_the_host() -> None:
    batch = random_batch(3000, seed=1, num_ids=50)
    plan = EMBEDDINGS.plan(batch)
    rows, targets = random_rows(plan), random_targets(3000)
    results = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        results.append(JaggedRows.zeros(plan.unique))
        for part in (slice(0, 1000), slice(1000, 3000)):
            leaves = EMBEDDINGS.lookup(plan, rows, part, device)
            assert all(leaf.device.type == device.type for leaf in leaves.values())
            backward(leaves, {name: target[part].to(device) for name, target in targets.items()})
            EMBEDDINGS.collect(plan, leaves, results[-1], part)
    assert all(np.array_equal(results[1][table], results[0][table]) for table in TABLES)


def test_a_leaf_that_is_not_used_adds_nothing() -> None:
    plan = EMBEDDINGS.plan(random_batch(500, seed=2))
    leaves, grads = EMBEDDINGS.lookup(plan, random_rows(plan)), JaggedRows.zeros(plan.unique)
    leaves["single"].sum().backward()
    EMBEDDINGS.collect(plan, leaves, grads)
    assert grads["users"].any() and not grads["items"].any()


def test_lookup_copies_read_only_rows_and_serves_evaluation_without_gradients() -> None:
    plan = EMBEDDINGS.plan(random_batch(6, seed=3))
    rows = random_rows(plan)
    for rows_UD in rows.values():
        rows_UD.flags.writeable = False
    expected = {name: leaf.detach() for name, leaf in EMBEDDINGS.lookup(plan, rows).items()}
    assert not any(np.shares_memory(leaf.numpy(), r) for leaf in expected.values() for r in rows.values())
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            leaves = EMBEDDINGS.lookup(plan, rows)
            assert all(torch.equal(leaves[name], expected[name]) for name in expected)


def test_non_finite_rows_are_found_wherever_the_value_is_and_rows_are_scaled_in_place() -> None:
    grad_UD = np.zeros((6, 4), np.float32)
    grad_UD[1, 0], grad_UD[2, 3], grad_UD[4, 2] = np.nan, -np.inf, np.inf
    grad_UD[3], grad_UD[5, 1] = 3.4e38, -np.nan
    assert non_finite_rows(grad_UD).tolist() == [False, True, True, False, True, True]
    assert non_finite_rows(np.empty((0, 4), np.float32)).tolist() == []
    layout = JaggedLayout.of_counts(Catalog([TableSpec(name="users", dim=2)]), np.array([1]))
    grads = JaggedRows(layout, np.array([2.0, -4.0], np.float32))
    same = grads["users"]
    scale_rows(grads, 1.0)
    scale_rows(grads, 0.25)
    assert same.tolist() == [[0.5, -1.0]] and same.dtype == np.float32


@every(
    ("name", "ragged", "told"),
    [
        ("single", Ragged(ids(1)), "1 ids without lengths, for a batch of 2 samples"),
        ("single", Ragged(np.array([1.5, 2.5])), "ids of float64; allowed: int64"),
        ("bag", Ragged(ids(1, 2, 3), np.array([1, 1], np.int32)), "3 ids with 2 lengths that sum to 2"),
        ("bag", Ragged(ids(1, 2), np.array([3, -1], np.int32)), "2 ids with 2 lengths that sum to 2"),
        ("bag", Ragged(ids(1, 2), np.array([1, 1, 0], np.int32)), "2 ids with 3 lengths"),
        ("bag", Ragged(ids(1, 2), None, np.ones(2, np.float32)), "pooling: sum with weights"),
        ("scored", Ragged(ids(1, 2)), "pooling: weighted without weights"),
        ("scored", Ragged(ids(1, 2), None, np.ones(3, np.float32)), "3 weights for 2 ids"),
    ],
)
def test_a_batch_that_does_not_fit_itself_is_refused_by_name(name: str, ragged: Ragged, told: str) -> None:
    good = {
        "single": Ragged(ids(1, 2)),
        "bag": Ragged(ids(1, 2)),
        "average": Ragged(ids(1, 2)),
        "scored": Ragged(ids(1, 2), None, np.ones(2, np.float32)),
    }
    EMBEDDINGS.plan(batch_of(good, 2))
    with pytest.raises(DataError, match=f"feature {name}: .*{told}"):
        EMBEDDINGS.plan(batch_of(good | {name: ragged}, 2))
    del good[name]
    with pytest.raises(DataError, match=f"no ids for feature {name}"):
        EMBEDDINGS.plan(batch_of(good, 2))


def test_unknown_tables_and_rows_and_gradients_of_another_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match="feature colour names table paint; known: items, users"):
        Embeddings(Schema((), (Feature("colour", "paint"),)), TABLES)
    plan = EMBEDDINGS.plan(random_batch(4, seed=0))
    rows = random_rows(plan)
    with pytest.raises(ProtocolError, match="table items: float32 rows"):
        EMBEDDINGS.lookup(plan, rows | {"items": rows["items"][1:]})
    with pytest.raises(ProtocolError, match="table users: no rows"):
        EMBEDDINGS.lookup(plan, {"items": rows["items"]})
    leaves = EMBEDDINGS.lookup(plan, rows)
    backward(leaves, random_targets(4))
    with pytest.raises(
        ProtocolError, match=r"feature single: torch.float32 gradient \(4, 3\); the part is torch.float32 \(2, 3\)"
    ):
        EMBEDDINGS.collect(plan, leaves, JaggedRows.zeros(plan.unique), slice(0, 2))


KEYED = Schema(dense=(), features=tuple(Feature(*each) for each in (("a", "users"), ("b", "items"), ("c", "users"))))


@every("longest", [1, 3], ids=["one id each", "bags"])
def test_ids_in_one_array_have_the_plan_of_their_features(longest: int) -> None:
    rng = np.random.default_rng(longest)
    lengths_FB = rng.integers(longest == 1, longest + 1, (3, 5)).astype(np.int32)
    lists = [rng.integers(0, 9, int(lengths_B.sum())) for lengths_B in lengths_FB]
    embeddings = Embeddings(KEYED, TABLES)
    ragged = {name: Ragged(*part) for name, *part in zip("abc", lists, lengths_FB, strict=True)}
    expected, keyed = embeddings.plan(batch_of(ragged, 5)), embeddings.plan_keyed(np.concatenate(lists), lengths_FB)
    for name in ("features_FK", "inverse_N", "offsets"):
        np.testing.assert_array_equal(getattr(keyed, name), getattr(expected, name))
    np.testing.assert_array_equal(keyed.unique.ids_V, expected.unique.ids_V)
    np.testing.assert_array_equal(keyed.unique.layout.starts_T1, expected.unique.layout.starts_T1)
    for lengths in ([[1, 1], [1, 1], [1, 2]], [[2, 1], [2, 1], [1, -1]]):  # another sum, another sign
        with pytest.raises(DataError, match="6 ids with lengths of"):
            embeddings.plan_keyed(ids(1, 2, 3, 4, 5, 6), np.array(lengths, dtype=np.int32))
