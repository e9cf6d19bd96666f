"""The embedding layer against numpy.unique and torch.nn.functional.embedding_bag."""

from __future__ import annotations

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
from shardkeep.workers.embeddings.plan import dedupe
from shardkeep.workers.embeddings.transfers import to_host
from tests.support.cases import every
from tests.support.examples import examples

EXTREMES = [0, -1, 1, np.iinfo(np.int64).min, np.iinfo(np.int64).max]
TABLES = {"users": TableSpec(name="users", dim=3), "items": TableSpec(name="items", dim=5)}
SCHEMA = Schema(
    dense=(),
    features=(
        Feature("single", "users"),
        Feature("bag", "items", "sum"),
        Feature("average", "items", "mean"),
        Feature("scored", "users", "weighted"),
    ),
)
EMBEDDINGS = Embeddings(SCHEMA, TABLES)
OF_ONE_WIDTH = Schema((), (Feature("peak", "items", "max"), Feature("bag", "items")))
PEAKS = Embeddings(OF_ONE_WIDTH, TABLES)


def ids(*values):
    return np.array(values, dtype=np.int64)


def batch_of(features, num_samples):
    return Batch(np.zeros((num_samples, 0), np.float32), dict(features), np.zeros((num_samples, 1), np.float32))


def random_batch(num_samples, *, seed, schema=SCHEMA, num_ids=20, longest=4):
    """Few distinct ids, so that bags hold duplicates, share ids and are often empty; with `longest` 1, one id each."""
    rng, features = np.random.default_rng(seed), {}
    for feature in schema.features:
        several = longest > 1 and feature.name != "single"
        lengths_B = rng.integers(0, longest + 1, num_samples).astype(np.int32) if several else None
        count = num_samples if lengths_B is None else int(lengths_B.sum())
        weights_N = rng.normal(size=count).astype(np.float32) if feature.pooling == "weighted" else None
        features[feature.name] = Ragged(rng.integers(-num_ids // 2, num_ids // 2, count), lengths_B, weights_N)
    return batch_of(features, num_samples)


def random_rows(plan, *, seed=0):
    """Of few values, so that there are many ties."""
    rng = np.random.default_rng(seed)
    return JaggedRows.of_arrays(
        plan.unique,
        {t: rng.integers(-2, 3, (plan.unique[t].size, spec.dim)).astype(np.float32) for t, spec in TABLES.items()},
    )


def reference(schema, batch, plan, rows):
    """Pooled rows by embedding_bag in autograd, and the weights whose gradients it fills. In float64."""
    weights = {t: torch.tensor(r, dtype=torch.float64, requires_grad=True) for t, r in rows.items()}
    pooled = {}
    for feature in schema.features:
        ragged = batch.ids[feature.name]
        lengths_B = np.ones(len(batch), np.int64) if ragged.lengths_B is None else ragged.lengths_B
        pooled[feature.name] = F.embedding_bag(
            torch.from_numpy(np.searchsorted(plan.unique[feature.table], ragged.values_N)),
            weights[feature.table],
            torch.tensor(np.concatenate([[0], np.cumsum(lengths_B)]), dtype=torch.int64),
            mode=feature.pooling if feature.pooling in ("mean", "max") else "sum",
            per_sample_weights=None if ragged.weights_N is None else torch.tensor(ragged.weights_N).double(),
            include_last_offset=True,
        )
    return pooled, weights


def backward(pooled, targets):
    sum((pooled[name].double() * targets[name]).sum() for name in pooled).backward()


def random_targets(num_samples, *, embeddings=EMBEDDINGS, seed=1):
    drawn = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(num_samples, dim, generator=drawn, dtype=torch.float64)
        for name, dim in embeddings.feature_dims.items()
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


@examples(60)
@given(
    num_samples=st.integers(0, 12),
    seed=st.integers(0, 10_000),
    num_ids=st.integers(2, 30),
    longest=st.integers(1, 6),
    cut=st.integers(0, 12),
)
@every(("schema", "embeddings"), [(SCHEMA, EMBEDDINGS), (OF_ONE_WIDTH, PEAKS)], ids=["several widths", "one width"])
def test_pooling_and_its_gradient_equal_embedding_bag_also_in_micro_batches(
    num_samples, seed, num_ids, longest, cut, schema, embeddings
):
    batch = random_batch(num_samples, seed=seed, schema=schema, num_ids=num_ids, longest=longest)
    plan = embeddings.plan(batch)
    rows = random_rows(plan, seed=seed)
    expected, weights = reference(schema, batch, plan, rows)
    targets = random_targets(num_samples, embeddings=embeddings, seed=seed)
    backward(expected, targets)
    for parts in ([None], [slice(0, cut), slice(cut, num_samples)]):
        grads = JaggedRows.zeros(plan.unique)
        for part in parts:
            leaves, own = embeddings.lookup(plan, rows, part), part or slice(None)
            assert list(leaves) == [feature.name for feature in schema.features]
            for name, leaf in leaves.items():
                assert leaf.is_leaf and leaf.requires_grad and leaf.dtype == torch.float32
                torch.testing.assert_close(leaf.double(), expected[name][own], rtol=1e-6, atol=1e-5)
            backward(leaves, {name: target[own] for name, target in targets.items()})
            embeddings.collect(plan, leaves, grads, part, rows)
        for feature in schema.features:
            found, exact = torch.from_numpy(grads[feature.table]).double(), weights[feature.table].grad
            torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


def test_a_largest_value_that_is_not_a_number_is_passed_on() -> None:
    plan = PEAKS.plan(batch_of({name: Ragged(ids(1, 2), np.array([2], np.int32)) for name in ("peak", "bag")}, 1))
    for values in ([[np.nan, 1.0], [1.0, np.nan]], [[1.0, np.nan], [np.nan, 1.0]]):
        rows = random_rows(plan)
        rows["items"][:] = np.repeat(np.array(values, np.float32), [1, 4], axis=1)
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


GOOD = {name: Ragged(ids(1, 2)) for name in ("single", "bag", "average")} | {
    "scored": Ragged(ids(1, 2), None, np.ones(2, np.float32))
}


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
    EMBEDDINGS.plan(batch_of(GOOD, 2))
    with pytest.raises(DataError, match=f"feature {name}: .*{told}"):
        EMBEDDINGS.plan(batch_of(GOOD | {name: ragged}, 2))
    with pytest.raises(DataError, match=f"no ids for feature {name}"):
        EMBEDDINGS.plan(batch_of({key: ragged for key, ragged in GOOD.items() if key != name}, 2))


def test_unknown_tables_and_rows_and_gradients_of_another_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match="feature colour names table paint; known: items, users"):
        Embeddings(Schema((), (Feature("colour", "paint"),)), TABLES)
    plan = EMBEDDINGS.plan(random_batch(4, seed=0))
    rows = dict(random_rows(plan))
    with pytest.raises(ProtocolError, match="table items: float32 rows"):
        EMBEDDINGS.lookup(plan, rows | {"items": rows["items"][1:]})
    with pytest.raises(ProtocolError, match="table users: no rows"):
        EMBEDDINGS.lookup(plan, {"items": rows["items"]})
    leaves = EMBEDDINGS.lookup(plan, rows)
    backward(leaves, random_targets(4))
    shapes = r"feature single: torch.float32 gradient \(4, 3\); the part is torch.float32 \(2, 3\)"
    with pytest.raises(ProtocolError, match=shapes):
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
