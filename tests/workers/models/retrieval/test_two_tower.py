"""Two towers: what each of them sees, and the columns without which they cannot be built."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardkeep.base.errors import ConfigError, UserError
from shardkeep.workers.embeddings.sequence import Sequence
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

ITEM = ["item", "price", "category"]
SETTINGS: dict[str, Any] = {"item": ITEM, "hidden": [8], "dim": 5}
TARGETS = (0, 8, 3, -1, 8)


@every("settings", [{}, {"encoder": "mean"}, {"encoder": "transformer"}, {"norm": "batch", "dropout": 0.1}])
def test_gradients_reach_all_parameters_and_rows(settings: dict[str, Any]) -> None:
    model, sides = vector_model("two_tower", two_sided_schema(), **SETTINGS, **settings)
    dense, inputs = users_of(sides)
    inputs = with_candidates(inputs, candidates_of(sides, TARGETS))
    losses = model(dense, inputs)
    assert losses.shape == (len(LENGTHS), 1) and losses.isfinite().all() and losses[3] == 0.0
    losses.square().sum().backward()
    for value in [*model.parameters(), *rows_of(inputs)]:
        assert value.grad is not None and value.grad.abs().sum() > 0


def test_the_vectors_are_those_of_hidden_layers_over_each_sides_columns() -> None:
    model, sides = vector_model("two_tower", two_sided_schema(lists=False), **SETTINGS)
    dense, inputs = users_of(sides)
    candidates = candidates_of(sides, TARGETS)
    p = dict(model.named_parameters())
    for side, x, found in (
        ("user", [dense, inputs["user"]], model.users(dense, inputs)),
        (
            "item",
            [candidates.dense_CI, candidates.inputs["item"], candidates.inputs["category"]],
            model.items(candidates.dense_CI, candidates.inputs),
        ),
    ):
        hidden = torch.cat(x, dim=1) @ p[f"{side}.top.blocks.0.0.weight"].T + p[f"{side}.top.blocks.0.0.bias"]  # type: ignore[list-item]
        expected = hidden.relu() @ p[f"{side}.logit.weight"].T + p[f"{side}.logit.bias"]
        torch.testing.assert_close(found, expected)
        assert found.shape[1] == 5


def test_a_user_depends_on_no_column_of_the_item_and_an_item_on_none_of_the_user() -> None:
    model, sides = vector_model("two_tower", two_sided_schema(), **SETTINGS, encoder={"name": "hstu"})
    assert [feature.name for feature in sides.users.features] == ["user"] and sides.users.dense == ("age",)
    dense, inputs = users_of(sides)
    whole = with_candidates(inputs, candidates_of(sides, TARGETS))
    others = {name: torch.full((len(LENGTHS), 6), 9.0) for name in ("item", "category", "price")}
    assert torch.equal(model.users(dense, whole | others), model.users(dense, inputs))
    (grad,) = torch.autograd.grad(
        model.users(dense, whole).sum(), [whole["candidates"].inputs["item"]], allow_unused=True
    )
    assert grad is None
    candidates = candidates_of(sides, TARGETS)
    items = model.items(candidates.dense_CI, candidates.inputs)
    assert torch.equal(model.items(candidates.dense_CI, {**candidates.inputs, **inputs}), items)


def test_every_column_changes_the_vector_of_its_side() -> None:
    model, sides = vector_model("two_tower", two_sided_schema(), **SETTINGS)
    dense, inputs = users_of(sides)
    before, seen = model.users(dense, inputs), inputs["seen"]
    for changed in (
        inputs | {"user": inputs["user"] + 1.0},
        inputs | {"seen": Sequence({"seen_item": seen.ids["seen_item"] + 1.0}, seen.numbers, seen.lengths, 17)},
        inputs | {"seen": Sequence(seen.ids, seen.numbers + 1.0, seen.lengths, 17)},
    ):
        assert not torch.equal(model.users(dense, changed), before)
    assert not torch.equal(model.users(dense + 1.0, inputs), before)
    candidates = candidates_of(sides, TARGETS)
    items = model.items(candidates.dense_CI, candidates.inputs)
    assert not torch.equal(model.items(candidates.dense_CI + 1.0, candidates.inputs), items)
    for name in ("item", "category"):
        other = {**candidates.inputs, name: candidates.inputs[name] + 1.0}  # type: ignore[operator]
        assert not torch.equal(model.items(candidates.dense_CI, other), items)


def test_the_temperature_is_by_the_similarity_unless_it_is_set() -> None:
    found = [
        vector_model("two_tower", two_sided_schema(), **SETTINGS, similarity=similarity, temperature=temperature)[0]
        for similarity in ("cosine", "dot")
        for temperature in (None, 0.2)
    ]
    assert [model.temperature for model in found] == [0.05, 0.2, 1.0, 0.2]
    assert [model.cosine for model in found] == [True, True, False, False]


@every(
    ("settings", "error", "said"),
    [
        (
            {"item": []},
            ConfigError,
            "model.item: is missing; it lists the columns of an item, its id first; allowed: user",
        ),
        (
            {"item": ["itm"]},
            ConfigError,
            "model.item: itm is no dense or sparse column; did you mean item?",
        ),
        ({"item": ["price", "item"]}, ConfigError, "model.item: price is a dense column; the first must name the item"),
        ({"item": ["seen_item"]}, ConfigError, "model.item: seen_item is in data.sequences.seen"),
        ({"item": ITEM, "encoder": "din"}, ConfigError, "no feature has table item; encoders that need none: mean"),
        ({"item": [*ITEM, "user", "age"]}, UserError, "model.item: lists all columns of the data; allowed: fewer"),
        ({"item": ITEM, "hidden": [10**6, 10**6]}, UserError, "model.hidden: a layer from 1,000,000 to 1,000,000"),
    ],
)
def test_columns_that_do_not_fit_are_refused_in_one_line(settings: Any, error: Any, said: str) -> None:
    with pytest.raises(error) as refused:
        vector_model(
            "two_tower", two_sided_schema(lists="encoder" in settings or "seen_item" in settings["item"]), **settings
        )
    assert said in str(refused.value) and "\n" not in str(refused.value)
