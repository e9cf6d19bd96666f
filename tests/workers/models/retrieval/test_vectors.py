"""Models of users and items: their loss query by query in float64, what each of two towers sees, and refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardkeep.base.errors import ConfigError, UserError
from shardkeep.workers.models.retrieval.vectors import VectorModel, softmax_losses
from shardkeep.workers.retrieval.candidates import CANDIDATES, Candidates
from tests.support.cases import every
from tests.support.vector_models import (
    LENGTHS,
    candidates_of,
    rows_of,
    two_sided_schema,
    users_of,
    vector_model,
    with_candidates,
)

TARGETS = {
    "among the shared": (0, 2, 1, 0),
    "beyond the shared": (4, 3, 4, 4),
    "both": (1, 4, 3, 2),
    "some have none": (-1, 4, -1, 2),
    "all have none": (-1, -1, -1, -1),
}
WIDTH, COUNT = 3, 5


def expected_loss(query_E, items_CE, candidates, target):
    """-log(e^s_t / (e^s_t + sum of e^s over the shared others))."""
    score_C = (items_CE * query_E).sum(1) - candidates.log_q_C
    others = [c for c in range(candidates.shared) if c != target]
    return -torch.log(score_C[target].exp() / (score_C[target].exp() + score_C[others].exp().sum()))


@every("targets", TARGETS.values(), ids=TARGETS)
@every("shared", [0, 3, COUNT])
def test_a_query_is_compared_with_the_shared_items_and_its_own(targets, shared):
    torch.manual_seed(0)
    queries = torch.randn(len(targets), WIDTH, dtype=torch.float64).requires_grad_()
    items = torch.randn(COUNT, WIDTH, dtype=torch.float64).requires_grad_()
    log_q_C = -2.0 * torch.rand(COUNT, dtype=torch.float64)
    candidates = Candidates(torch.empty(COUNT, 0), {}, log_q_C, shared, torch.tensor(targets))
    found = softmax_losses(queries, items, candidates)
    expected = torch.stack([
        expected_loss(query, items, candidates, t) if t >= 0 else 0.0 * query.sum()
        for query, t in zip(queries, targets, strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    grads = [
        torch.autograd.grad((y * weight).sum(), [queries, items], allow_unused=True, materialize_grads=True)
        for y in (found, expected)
    ]
    for own, other in zip(*grads, strict=True):
        torch.testing.assert_close(own, other)


def test_without_any_item_or_any_query_there_is_no_loss_and_at_the_ends_gradients_are_finite():
    for queries, count in itertools.product((0, 2), (0, 1)):
        query, items = torch.randn(queries, WIDTH).requires_grad_(), torch.randn(count, WIDTH).requires_grad_()
        nothing = torch.full((queries,), -1)
        losses = softmax_losses(query, items, Candidates(torch.empty(count, 0), {}, torch.rand(count), count, nothing))
        losses.sum().backward()
        assert losses.shape == (queries,) and not any(x.any() for x in (losses, query.grad, items.grad))
    queries = torch.tensor([[1e4], [-1e4]]).requires_grad_()  # a certain item, and a hopeless one
    items = torch.tensor([[1.0], [-1.0], [0.0]]).requires_grad_()
    losses = softmax_losses(queries, items, Candidates(torch.empty(3, 0), {}, torch.zeros(3), 2, torch.tensor([0, 0])))
    losses.sum().backward()
    assert losses.tolist() == [0.0, 2e4] and queries.grad.isfinite().all() and items.grad.isfinite().all()


class Given(VectorModel):
    """Its vectors are its inputs, through a linear layer."""

    def __init__(self, *, cosine):
        super().__init__(cosine=cosine, temperature=0.1)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def users(self, dense_BI, inputs):
        return self.layer(dense_BI)

    def items(self, dense_CI, inputs):
        return dense_CI


@every("cosine", [True, False])
def test_similarities_are_divided_by_the_temperature_and_losses_are_their_number_times_the_mean(cosine):
    """The mean over the queries with a target; chances are not divided, and the softmax is float32 under autocast."""
    torch.manual_seed(3)
    dense, targets, model = torch.randn(5, WIDTH), (0, -1, 4, 2, -1), Given(cosine=cosine)
    candidates = Candidates(torch.randn(COUNT, WIDTH), {}, -torch.rand(COUNT), 3, torch.tensor(targets))
    for amp in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            losses, users, items = model(dense, {CANDIDATES: candidates}), model.layer(dense), candidates.dense_CI
        assert losses.shape == (5, 1) and losses.dtype == torch.float32
        users = users.float()
        if cosine:
            users, items = F.normalize(users), F.normalize(items)
        expected = [
            expected_loss(user / 0.1, items, candidates, t) * 5 / 3 if t >= 0 else torch.zeros(())
            for user, t in zip(users, targets, strict=True)
        ]
        torch.testing.assert_close(losses[:, 0], torch.stack(expected))


# Two towers

ITEM = ["item", "price", "category"]
SETTINGS = {"item": ITEM, "hidden": [8], "dim": 5}
OF_QUERIES = (0, 8, 3, -1, 8)


@every("settings", [{}, {"encoder": "mean"}, {"encoder": "transformer"}, {"norm": "batch", "dropout": 0.1}])
def test_gradients_reach_all_parameters_and_rows(settings):
    model, sides = vector_model("two_tower", two_sided_schema(), **SETTINGS, **settings)
    dense, inputs = users_of(sides)
    inputs = with_candidates(inputs, candidates_of(sides, OF_QUERIES))
    losses = model(dense, inputs)
    assert losses.shape == (len(LENGTHS), 1) and losses.isfinite().all() and losses[3] == 0.0
    losses.square().sum().backward()
    for value in [*model.parameters(), *rows_of(inputs)]:
        assert value.grad is not None and value.grad.abs().sum() > 0


def test_the_vectors_are_those_of_hidden_layers_over_each_sides_columns():
    model, sides = vector_model("two_tower", two_sided_schema(lists=False), **SETTINGS)
    (dense, inputs), candidates = users_of(sides), candidates_of(sides, OF_QUERIES)
    p = dict(model.named_parameters())
    of_item = [candidates.dense_CI, candidates.inputs["item"], candidates.inputs["category"]]
    for side, x, found in (
        ("user", [dense, inputs["user"]], model.users(dense, inputs)),
        ("item", of_item, model.items(candidates.dense_CI, candidates.inputs)),
    ):
        hidden = torch.cat(x, dim=1) @ p[f"{side}.top.blocks.0.0.weight"].T + p[f"{side}.top.blocks.0.0.bias"]
        expected = hidden.relu() @ p[f"{side}.logit.weight"].T + p[f"{side}.logit.bias"]
        torch.testing.assert_close(found, expected)
        assert found.shape[1] == 5


def test_every_column_changes_the_vector_of_its_side_and_none_of_the_other():
    model, sides = vector_model("two_tower", two_sided_schema(), **SETTINGS, encoder={"name": "hstu"})
    (dense, inputs), candidates = users_of(sides), candidates_of(sides, OF_QUERIES)
    users, seen = model.users(dense, inputs), inputs["seen"]
    others = {name: torch.full((len(LENGTHS), 6), 9.0) for name in ("item", "category", "price")}
    assert torch.equal(model.users(dense, with_candidates(inputs, candidates) | others), users)
    for changed in (
        inputs | {"user": inputs["user"] + 1.0},
        inputs | {"seen": replace(seen, ids={"seen_item": seen.ids["seen_item"] * 2.0})},
        inputs | {"seen": replace(seen, numbers=seen.numbers + 1.0)},
    ):
        assert not torch.equal(model.users(dense, changed), users)
    assert not torch.equal(model.users(dense + 1.0, inputs), users)
    items = model.items(candidates.dense_CI, candidates.inputs)
    assert torch.equal(model.items(candidates.dense_CI, {**candidates.inputs, **inputs}), items)
    assert not torch.equal(model.items(candidates.dense_CI + 1.0, candidates.inputs), items)
    for name, rows in candidates.inputs.items():
        assert not torch.equal(model.items(candidates.dense_CI, {**candidates.inputs, name: rows + 1.0}), items)


@every(
    ("similarity", "temperature", "expected"),
    [("cosine", None, 0.05), ("cosine", 0.2, 0.2), ("dot", None, 1.0), ("dot", 0.2, 0.2)],
)
def test_the_temperature_is_by_the_similarity_unless_it_is_set(similarity, temperature, expected):
    settings = SETTINGS | {"similarity": similarity, "temperature": temperature}
    model, _ = vector_model("two_tower", two_sided_schema(), **settings)
    assert model.temperature == expected and model.cosine == (similarity == "cosine")


@every(
    ("settings", "error", "said"),
    [
        ({"item": []}, ConfigError, "model.item: is missing; it lists the columns of an item, its id first; allowed: "),
        ({"item": ["itm"]}, ConfigError, "model.item: itm is no dense or sparse column; did you mean item?"),
        ({"item": ["price", "item"]}, ConfigError, "model.item: price is a dense column; the first must name the item"),
        ({"item": ["seen_item"]}, ConfigError, "model.item: seen_item is in data.sequences.seen"),
        ({"item": ITEM, "encoder": "din"}, ConfigError, "no feature has table item; encoders that need none: mean"),
        ({"item": [*ITEM, "user", "age"]}, UserError, "model.item: lists all columns of the data; allowed: fewer"),
        ({"item": ITEM, "hidden": [10**6, 10**6]}, UserError, "model.hidden: a layer from 1,000,000 to 1,000,000"),
    ],
)
def test_columns_that_do_not_fit_are_refused_in_one_line(settings, error, said):
    lists = "encoder" in settings or "seen_item" in settings["item"]
    with pytest.raises(error) as refused:
        vector_model("two_tower", two_sided_schema(lists=lists), **settings)
    assert said in str(refused.value) and "\n" not in str(refused.value)
