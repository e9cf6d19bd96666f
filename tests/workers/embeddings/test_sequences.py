"""Unpooled rows against torch.nn.functional.embedding, bit for bit, and the Sequence that a model gets of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shardkeep.base.errors import DataError, ProtocolError
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import JaggedRows
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from shardkeep.workers.embeddings.inputs import leaves_of, padded, shapes_of, spare_samples, zeros
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.embeddings.plan import Plan
from shardkeep.workers.embeddings.sequence import Sequence
from shardkeep.workers.embeddings.unseen import Unseen
from tests.support.cases import every

LONGEST = 17
SEEN = SequenceColumns(
    "seen", (Feature("seen_item", "item", "none"), Feature("seen_kind", "kind", "none")), ("age", "price"), LONGEST
)
CART = SequenceColumns("cart", (Feature("in_cart", "item", "none"),), (), 3)
SCHEMA = Schema((), (Feature("item", "item"), Feature("tags", "kind", "mean")), ("label",), (SEEN, CART))
TABLES = {"item": TableSpec(name="item", dim=5), "kind": TableSpec(name="kind", dim=3)}
EMBEDDINGS = Embeddings(SCHEMA, TABLES)


def batch_of(lengths: list[int], *, seed: int = 0, cart: list[int] | None = None) -> Batch:
    """Few distinct items, so that one is a target and stands in several histories."""
    random, count = np.random.default_rng(seed), len(lengths)
    lengths_B = np.array(lengths, np.int32)
    cart_B = np.array(cart if cart is not None else [min(length, 3) for length in lengths], np.int32)
    num = int(lengths_B.sum())
    ids = {
        "item": Ragged(random.integers(0, 6, count)),
        "tags": Ragged(random.integers(0, 4, 2 * count), np.full(count, 2, np.int32)),
        "seen_item": Ragged(random.integers(0, 6, num), lengths_B),
        "seen_kind": Ragged(random.integers(0, 4, num), lengths_B),
        "in_cart": Ragged(random.integers(0, 6, int(cart_B.sum())), cart_B),
    }
    numbers = {"seen": random.normal(size=(num, 2)).astype(np.float32)}
    return Batch(np.zeros((count, 0), np.float32), ids, np.zeros((count, 1), np.float32), numbers=numbers)


def rows_of(plan: Plan) -> JaggedRows:
    rows = JaggedRows.zeros(plan.unique)
    rows.flat[:] = np.random.default_rng(3).normal(size=rows.flat.size)
    return rows


LENGTHS = {"mixed": [0, 1, 15, 16, 17, 4], "all empty": [0, 0, 0], "all of length 1": [1] * 4, "no sample": []}


@every("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_rows_and_their_gradients_have_the_bits_of_torchs_embedding(lengths: list[int]) -> None:
    batch = batch_of(lengths)
    plan = EMBEDDINGS.plan(batch)
    rows = rows_of(plan)
    leaves = EMBEDDINGS.lookup(plan, rows)
    grads = JaggedRows.zeros(plan.unique)
    for table, columns in {"item": ("item", "seen_item", "in_cart"), "kind": ("seen_kind",)}.items():
        weight_UD = torch.from_numpy(rows[table].copy()).requires_grad_()
        ids_N = np.concatenate([batch.ids[column].values_N for column in columns])
        expected_ND = F.embedding(torch.from_numpy(np.searchsorted(plan.unique[table], ids_N)), weight_UD)
        found_ND = torch.cat([leaves[column] for column in columns])
        assert torch.equal(found_ND, expected_ND)
        factors_ND = torch.randn(expected_ND.shape, generator=torch.Generator().manual_seed(1))
        (found_ND * factors_ND).sum().backward()
        (expected_ND * factors_ND).sum().backward()
        EMBEDDINGS.collect(plan, {**dict.fromkeys(leaves, torch.empty(0)), **{c: leaves[c] for c in columns}}, grads)
        assert weight_UD.grad is not None and torch.equal(torch.from_numpy(grads[table]), weight_UD.grad)


@every("cuts", [[0, 2, 6], [0, 1, 1, 5, 6]], ids=str)
def test_micro_batches_have_the_rows_and_numbers_of_the_batch_and_their_gradients_add_up(cuts: list[int]) -> None:
    batch = batch_of(LENGTHS["mixed"])
    plan = EMBEDDINGS.plan(batch)
    rows, grads, expected = rows_of(plan), JaggedRows.zeros(plan.unique), JaggedRows.zeros(plan.unique)

    def train(part: slice | None, sums: JaggedRows) -> Sequence:
        leaves = EMBEDDINGS.lookup(plan, rows, part)
        torch.stack([leaf.square().sum() for leaf in leaves.values()]).sum().backward()
        EMBEDDINGS.collect(plan, leaves, sums, part)
        return EMBEDDINGS.inputs(plan, leaves, part)["seen"]

    whole = train(None, expected)
    parts = [train(slice(*cut), grads) for cut in itertools.pairwise(cuts)]
    np.testing.assert_allclose(grads.flat, expected.flat, rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.cat([part.ids["seen_kind"] for part in parts]), whole.ids["seen_kind"])
    assert torch.equal(torch.cat([part.numbers for part in parts]), torch.from_numpy(batch.numbers["seen"]))
    assert torch.cat([part.lengths for part in parts]).tolist() == LENGTHS["mixed"]


def test_a_model_gets_a_sequence_for_each_group_and_features_as_ever_and_zeros_have_their_form() -> None:
    plan = EMBEDDINGS.plan(batch_of([2, 0, 1]))
    leaves = EMBEDDINGS.lookup(plan, rows_of(plan))
    inputs = EMBEDDINGS.inputs(plan, leaves)
    assert list(inputs) == ["item", "tags", "seen", "cart"] and inputs["item"] is leaves["item"]
    seen, cart = inputs["seen"], inputs["cart"]
    assert list(seen.ids) == ["seen_item", "seen_kind"] and seen.ids["seen_item"] is leaves["seen_item"]
    assert seen.lengths.dtype == torch.int64 and seen.lengths.tolist() == [2, 0, 1] and seen.max_length == LONGEST
    assert cart.numbers.shape == (3, 0) and cart.numbers.dtype == torch.float32
    assert EMBEDDINGS.feature_dims == {"item": 5, "tags": 3}
    shape = EMBEDDINGS.sequences["seen"]
    assert shape.ids == {"seen_item": 5, "seen_kind": 3} and (shape.numbers, shape.max_length) == (2, LONGEST)
    found = zeros(*shapes_of(inputs), 7, torch.device("cpu"))
    assert shapes_of(found) == shapes_of(inputs) == (EMBEDDINGS.feature_dims, EMBEDDINGS.sequences)
    assert list(map(len, leaves_of(found))) == [7, 7, 6, 6, 5]
    for name in ("seen", "cart"):
        assert found[name].lengths.sum() == len(found[name].numbers) and len(found[name].lengths) == 7


def test_rows_of_frozen_tables_take_no_gradient_and_other_numbers_of_entries_are_refused() -> None:
    embeddings = Embeddings(SCHEMA, TABLES | {"kind": TableSpec(name="kind", dim=3, freeze=True)})
    plan = embeddings.plan(batch_of([2, 1]))
    leaves = embeddings.lookup(plan, rows_of(plan))
    trained = {"item": True, "tags": False, "seen_item": True, "seen_kind": False, "in_cart": True}
    assert {name: leaf.requires_grad for name, leaf in leaves.items()} == trained
    leaves["seen_item"].square().sum().backward()
    with pytest.raises(ProtocolError, match=r"seen_item: .* \(3, 5\); the part is torch.float32 \(2, 5\)"):
        embeddings.collect(plan, leaves, JaggedRows.zeros(plan.unique), slice(0, 1))


def test_unseen_ids_of_sequences_are_counted_up_to_a_sample() -> None:
    batch = batch_of([2, 3, 1])
    plan, unseen = EMBEDDINGS.plan(batch), Unseen(SCHEMA)
    unseen.add(plan, np.zeros(plan.unique.layout.num_rows, np.bool_), 2)
    lists = {name: [5, 5] for name in ("seen_item", "seen_kind", "in_cart")}
    assert unseen.counts() == {"item": [2, 2], "tags": [4, 4], **lists}


GOOD = batch_of([2, 1])


@every(
    ("wrong", "numbers", "told"),
    [
        ({"seen_kind": Ragged(np.zeros(3, np.int64), np.array([1, 2], np.int32))}, GOOD.numbers,
         "sequence seen: sample 0 has 2 entries of seen_item and 1 of seen_kind"),
        ({"seen_item": Ragged(np.zeros(2, np.int64)), "seen_kind": Ragged(np.zeros(2, np.int64))}, GOOD.numbers,
         "sequence seen: seen_item has ids without lengths"),
        ({"in_cart": Ragged(np.zeros(5, np.int64), np.array([4, 1], np.int32))}, GOOD.numbers,
         "sequence cart: a sample has 4 entries; max_length: 3"),
        ({"seen_kind": Ragged(np.zeros(3, np.int64), np.array([2, 1], np.int32), np.ones(3, np.float32))}, GOOD.numbers,
         "feature seen_kind: pooling: none with weights"),
        ({}, {}, r"sequence seen: its numbers are .*; expected float32 \(3, 2\)"),
        ({}, {"seen": np.zeros((2, 2), np.float32)}, r"sequence seen: its numbers are .*; expected float32 \(3, 2\)"),
        ({}, {"seen": np.zeros((3, 2), np.float64)}, r"sequence seen: its numbers are .*; expected float32 \(3, 2\)"),
    ],
)  # fmt: skip
def test_lists_and_numbers_that_do_not_fit_each_other_are_refused_by_name(
    wrong: dict[str, Ragged], numbers: dict[str, np.ndarray], told: str
) -> None:
    EMBEDDINGS.plan(GOOD)
    with pytest.raises(DataError, match=told):
        EMBEDDINGS.plan(replace(GOOD, ids={**GOOD.ids, **wrong}, numbers=numbers))


@every("lengths", [[2, 0, 1], [17] * 4, [0, 0], [16, 16]], ids=str)
def test_padding_adds_samples_and_makes_the_entries_a_multiple(lengths: list[int]) -> None:
    plan = EMBEDDINGS.plan(batch_of(lengths))
    inputs = EMBEDDINGS.inputs(plan, EMBEDDINGS.lookup(plan, rows_of(plan)))
    added = spare_samples(EMBEDDINGS.sequences.values())
    found = padded(inputs, added)
    assert found["item"].shape == (len(lengths) + added, 5) and not found["item"][len(lengths) :].any()
    for name in ("seen", "cart"):
        before, after = inputs[name], found[name]
        assert int(after.lengths.sum()) == len(after.numbers) and len(after.numbers) % 32 == 0
        assert len(after.lengths) == len(lengths) + added and int(after.lengths.max()) <= after.max_length
        assert torch.equal(after.lengths[: len(lengths)], before.lengths)
        for column, rows_ND in after.ids.items():
            count = len(before.numbers)
            assert torch.equal(rows_ND[:count], before.ids[column]) and not rows_ND[count:].any()
            assert rows_ND.shape == (len(after.numbers), before.ids[column].shape[1]) and not rows_ND.requires_grad


def test_batches_that_are_planned_together_have_the_rows_and_gradients_of_each_alone() -> None:
    other = Embeddings(Schema((), (Feature("tags", "kind", "mean"), Feature("item", "item")), ()), TABLES)
    batches = batch_of([0, 4, 17]), batch_of([2, 3], seed=1)
    blocks = list(zip((EMBEDDINGS, other), batches, strict=True))
    plans = Embeddings.plan_together(blocks)
    assert plans[0].unique is plans[1].unique
    rows = rows_of(plans[0])
    grads = JaggedRows.zeros(plans[0].unique)
    expected = JaggedRows.zeros(plans[0].unique)
    for (embeddings, batch), plan in zip(blocks, plans, strict=True):
        alone = embeddings.plan(batch)
        at = {table: np.searchsorted(plan.unique[table], alone.unique[table]) for table in TABLES}
        leaves = embeddings.lookup(plan, rows, slice(1, None))
        own = embeddings.lookup(alone, {table: rows[table][at[table]] for table in TABLES}, slice(1, None))
        sums = JaggedRows.zeros(alone.unique)
        for name, leaf in leaves.items():
            assert torch.equal(leaf, own[name]), name
            leaf.grad = own[name].grad = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(len(name)))
        embeddings.collect(plan, leaves, grads, slice(1, None))
        embeddings.collect(alone, own, sums, slice(1, None))
        for table in TABLES:
            expected[table][at[table]] += sums[table]
    np.testing.assert_allclose(grads.flat, expected.flat, rtol=1e-6, atol=1e-6)
    assert np.abs(grads.flat).max() > 1


# The operations of a Sequence beside loops over samples, with gradients


WIDTH = 3
OF_SAMPLES = {
    "mixed": (0, 1, 15, 16, 17, 3),
    "all empty": (0, 0, 0),
    "all of length 1": (1, 1, 1),
    "all of the longest": (17, 17),
    "empty at both ends": (0, 2, 0),
    "one sample": (5,),
}


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def sequence_of(lengths: tuple[int, ...]) -> tuple[Sequence, torch.Tensor, list[torch.Tensor]]:
    x_NC = drawn(sum(lengths), WIDTH)
    sequence = Sequence({}, torch.zeros(len(x_NC), 0), torch.tensor(lengths), LONGEST)
    return sequence, x_NC, list(torch.split(x_NC, list(lengths)))


def agrees(found: torch.Tensor, expected: torch.Tensor, *inputs: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    pairs = zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum() + 0.0 * inputs[0].sum(), inputs),
        strict=True,
    )
    for grad, other in pairs:
        torch.testing.assert_close(grad, other)


def place(entries_LC: torch.Tensor, last: bool) -> torch.Tensor:
    zeros = entries_LC.new_zeros(LONGEST - len(entries_LC), WIDTH)
    return torch.cat([zeros, entries_LC] if last else [entries_LC, zeros])


@every("lengths", OF_SAMPLES.values(), ids=OF_SAMPLES)
@every("last", [False, True])
def test_padded_has_the_entries_of_each_sample_in_order_and_flat_undoes_it(
    lengths: tuple[int, ...], last: bool
) -> None:
    sequence, x_NC, parts = sequence_of(lengths)
    padded = sequence.padded(x_NC, last=last)
    agrees(padded, torch.stack([place(part, last) for part in parts]), x_NC)
    assert torch.equal(
        sequence.mask(last=last), torch.stack([place(torch.ones_like(p), last)[:, 0] > 0 for p in parts])
    )
    x_BLC = drawn(len(lengths), LONGEST, WIDTH)
    expected = x_BLC[sequence.mask(last=last)]
    agrees(sequence.flat(x_BLC, last=last), expected, x_BLC)


@every("lengths", OF_SAMPLES.values(), ids=OF_SAMPLES)
def test_samples_are_summed_averaged_and_spread_in_the_order_of_their_entries(lengths: tuple[int, ...]) -> None:
    sequence, x_NC, parts = sequence_of(lengths)
    agrees(sequence.summed(x_NC), torch.stack([part.sum(0) for part in parts]), x_NC)
    agrees(sequence.mean(x_NC), torch.stack([part.sum(0) / max(len(part), 1) for part in parts]), x_NC)
    of_samples = drawn(len(lengths), WIDTH)
    expected = torch.cat([row.expand(length, -1) for row, length in zip(of_samples, lengths, strict=True)])
    agrees(sequence.spread(of_samples), expected, of_samples)
    for scoring in (False, True):
        with torch.inference_mode(scoring):
            assert sequence.mean(sequence.numbers).shape == (len(lengths), 0), "a group without numbers"


@every("lengths", OF_SAMPLES.values(), ids=OF_SAMPLES)
def test_the_newest_entry_is_each_samples_last_and_one_more_may_follow(lengths: tuple[int, ...]) -> None:
    sequence, x_NC, parts = sequence_of(lengths)
    agrees(sequence.newest(x_NC), torch.stack([p[-1] if len(p) else x_NC.new_zeros(WIDTH) for p in parts]), x_NC)
    after = drawn(len(lengths), WIDTH)
    longer, joined = sequence.followed(x_NC, after)
    pairs = zip(parts, after, strict=True)
    expected = torch.cat([torch.cat([part, row[None]]) for part, row in pairs])
    agrees(joined, expected, x_NC, after)
    assert longer.max_length == LONGEST + 1 and torch.equal(longer.lengths, sequence.lengths + 1)
    assert torch.equal(longer.newest(joined), after)
    assert sequence.distances().tolist() == [n for length in lengths for n in reversed(range(length))]
