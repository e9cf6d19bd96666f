"""A retrieval model finds the items whose vectors are nearest, by their names, from the users' columns alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import UserError
from shardkeep.inference.predictor import Predictor
from shardkeep.inference.trained import Trained
from shardkeep.workers.data.schema import Schema
from tests.support.retrieval_models import NEXT, TOWERS, Takes, frame_of, untrained

BOTH = pytest.mark.parametrize("schema", [TOWERS, NEXT], ids=["two_tower", "sasrec"])
MODELS: dict[str, tuple[Schema, dict[str, Any]]] = {
    "two_tower": (TOWERS, {}),
    "sasrec": (NEXT, {}),
    "hstu": (NEXT, {"model": {"name": "hstu", "layers": 1, "heads": 2}}),
}


def scores_of(trained: Trained, samples: Takes, count: int) -> np.ndarray:
    """Of all items, by the vectors."""
    assert trained.sides is not None
    users = np.concatenate(
        [trained.logits(trained.sides.users_of(samples.gather(np.array([n])))) for n in range(count)]
    )
    return users @ trained.finder.index.vectors_ME.T


@BOTH
def test_the_best_items_of_users_are_those_of_all_scores(schema: Schema) -> None:
    samples = Takes(schema, 300)
    trained = untrained(schema, samples=samples)
    found = Predictor(trained).top(frame_of(samples, schema, 40), 7)
    scores, values = scores_of(trained, samples, 40), trained.finder.ranking.catalogue.values.to_pylist()
    order = np.argsort(-scores, axis=1, kind="stable")[:, :7]
    assert found["items"] == [[values[place] for place in row] for row in order]
    assert np.allclose(found["scores"], np.take_along_axis(scores, order, axis=1), atol=1e-6)


@BOTH
def test_an_index_of_ones_own_gets_the_vectors_of_users(schema: Schema) -> None:
    samples = Takes(schema, 300)
    predictor = Predictor(trained := untrained(schema, samples=samples))
    users_BE = predictor.vectors(frame_of(samples, schema, 40))
    scores = np.sort(users_BE @ trained.finder.index.vectors_ME.T, axis=1)[:, ::-1]
    assert users_BE.dtype == np.float32
    assert np.allclose(scores[:, :7], predictor.top(frame_of(samples, schema, 40), 7)["scores"], atol=1e-6)


@BOTH
def test_the_columns_of_users_are_all_that_is_read(schema: Schema) -> None:
    predictor = Predictor(untrained(schema))
    assert predictor.columns == (["age", "user"] if schema is TOWERS else ["seen_item"])
    assert predictor.outputs == ("items", "scores")


@pytest.mark.parametrize("name", MODELS)
def test_the_place_of_a_sample_changes_none_of_its_bits(name: str) -> None:
    schema, settings = MODELS[name]
    for seed in range(4):  # the first one alone has equal bits by chance
        samples = Takes(schema, 300, seed=seed)
        trained = untrained(schema, samples=samples, **settings)
        order = np.random.default_rng(seed).permutation(100)
        tops = []
        for rows in (np.arange(100), order):
            batch = trained.sides.users_of(samples.gather(rows))
            tops.append(trained.finder.top(trained.logits(batch), batch, 9))
        assert tops[0].scores_BK[order].tobytes() == tops[1].scores_BK.tobytes()
        assert tops[0].places_BK[order].tolist() == tops[1].places_BK.tolist()


def test_what_a_sample_has_seen_is_not_found_where_the_evaluation_excludes_it() -> None:
    samples = Takes(NEXT, 300)
    trained = untrained(NEXT, samples=samples, eval={"exclude_seen": True})
    items = len(trained.finder.index)
    found = Predictor(trained).top(frame_of(samples, NEXT, 40), items)["items"]
    seen = frame_of(samples, NEXT, 40)["seen_item"].to_pylist()
    assert all(not {*row} & {*known} for row, known in zip(found, seen, strict=True))
    assert [len(row) for row in found] == [items - len({*known}) for known in seen]


@pytest.mark.parametrize("k", [0, 41], ids=["none", "more than there are"])
def test_a_number_of_items_that_there_are_not_is_refused(k: int) -> None:
    with pytest.raises(UserError, match=rf"k: {k}: the catalogue has 40 items; allowed: 1 to 40"):
        Predictor(untrained()).top(frame_of(Takes(TOWERS, 9), TOWERS, 3), k)


def test_a_model_that_finds_items_scores_no_rows() -> None:
    with pytest.raises(UserError, match=r"two_tower finds items; allowed: top\(data, k\)"):
        Predictor(untrained()).predict(frame_of(Takes(TOWERS, 9), TOWERS, 3))
