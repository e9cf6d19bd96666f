"""The sources of examples/synthetic: histories, walks and a chain of labels, beside what is known of each."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardkeep.examples.synthetic.retrieval import samples
from shardkeep.examples.synthetic.tasks import best_auc
from shardkeep.workers.data.samples import Data, Dataset
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from shardkeep.workers.model_config import RetrievalSettings, SasRecConfig
from tests.support.cases import every

CHAIN = [
    "clicked",
    {"column": "bought", "after": "clicked"},
    {"column": "returned", "after": "bought", "missing": "mask"},
]


def _opened(name: str, model: RetrievalSettings | None = None, *, labels: Any = (), **options: Any) -> Data:
    config = {"source": f"shardkeep.examples.synthetic.{name}:samples", "labels": list(labels), "options": options}
    return open_data(DataConfig.model_validate(config), seed=0, items=model)


@every(("name", "model"), [("sequences", None), ("retrieval", SasRecConfig())])
def test_a_row_is_the_same_in_any_batch_and_parts_and_seeds_give_others(
    name: str, model: RetrievalSettings | None
) -> None:
    data, again, other = (_opened(name, model, rows=300, eval_rows=200, seed=seed) for seed in (7, 7, 8))
    assert data.eval is not None and (len(data.train), len(data.eval)) == (300, 200)
    assert data.fingerprint == again.fingerprint != other.fingerprint
    whole, part = data.train.gather(np.arange(100)), again.train.gather(np.array([70, 3]))
    for column, ragged in part.ids.items():
        ids_BL = whole.ids[column].values_N.reshape(100, -1)
        assert np.array_equal(ragged.values_N.reshape(2, -1), ids_BL[[70, 3]])
        others = [each.gather(np.arange(100)).ids[column].values_N for each in (data.eval, other.train)]
        assert all((ids_N != ids_BL.reshape(-1)).any() for ids_N in others)


def test_a_label_tells_whether_the_category_occurs_in_the_history() -> None:
    data = _opened("sequences", rows=50_000, eval_rows=20_000, categories=200)
    batch = data.train.gather(np.arange(50_000))
    target_B, entries_BL = batch.ids["category"].values_N, batch.ids["seen_category"].values_N.reshape(-1, 30)
    occurs_B = (entries_BL == target_B[:, None]).any(axis=1)
    assert abs(occurs_B.mean() - (0.5 + 0.5 * (1 - (199 / 200) ** 30))) < 0.01
    assert [round(float(batch.label_BT[occurs_B == known].mean()), 1) for known in (True, False)] == [0.9, 0.1]
    counts = np.unique(entries_BL, return_counts=True)[1]
    assert len(counts) == 200 and counts.min() > 0.9 * counts.mean()
    place_B = (entries_BL == target_B[:, None]).argmax(axis=1)[occurs_B]
    assert np.bincount(place_B).min() > 0.8 * len(place_B) / 30
    chance = 1 / (1 + np.exp(-2.0))
    assert abs(data.eval.best_auc(20_000)[0] - chance) < 0.01  # type: ignore[union-attr]


def test_each_label_of_a_chain_happens_after_the_one_before_it_and_the_best_auc_of_each_is_known() -> None:
    options: dict[str, Any] = {"table_sizes": [50] * 8, "eval_rows": 20_000}
    data = _opened("tasks", labels=CHAIN, rows=2000, **options)
    assert data.eval is not None
    label_BT = data.eval.gather(np.arange(20_000)).label_BT
    clicked, bought, returned = label_BT.T
    assert not bought[clicked == 0].any() and not np.nansum(returned[bought == 0])
    assert abs(float(np.isnan(returned).mean()) - 0.2) < 0.01 and not np.isnan(label_BT[:, :2]).any()
    rates = [clicked.mean(), bought[clicked == 1].mean(), np.nanmean(returned[bought == 1])]
    assert all(0.25 < rate < 0.75 for rate in rates)
    found, given = best_auc(**options), best_auc(given=True, **options)
    assert found["clicked"] == given["clicked"] and found["bought"] > given["bought"] + 0.01
    assert all(0.7 < best < 0.95 for best in (*found.values(), *given.values()))


def _walks(dataset: Dataset) -> Any:
    """Histories and items (B, L + 1) of all samples."""
    batch = dataset.gather(np.arange(len(dataset)))
    item_B, seen_N = batch.ids["item"].values_N, batch.ids["seen_item"].values_N
    return np.concatenate([seen_N.reshape(len(batch), -1), item_B[:, None]], axis=1)


def test_the_best_ranks_are_those_by_the_frequencies_of_many_walks() -> None:
    train, held = (samples(split, rows=20_000, eval_rows=2_000, items=100) for split in ("train", "eval"))
    walks, best_N = _walks(train), held.best_ranks(2_000)
    before_N, after_N = walks[:, :-1].reshape(-1), walks[:, 1:].reshape(-1)
    names, index_N = np.unique(np.concatenate([before_N, after_N]), return_inverse=True)
    counts = np.zeros((len(names), len(names)))
    np.add.at(counts, (index_N[: len(before_N)], index_N[len(before_N) :]), 1.0)
    assert len(names) == 100 and (counts > 0).sum() == 2000  # five topics of twenty items
    batch = held.gather(np.arange(2_000))
    last_B = np.searchsorted(names, batch.ids["seen_item"].values_N.reshape(2_000, -1)[:, -1])
    item_B = np.searchsorted(names, batch.ids["item"].values_N)
    ranks_B = 1 + (counts[last_B] > counts[last_B, item_B][:, None]).sum(axis=1)
    assert np.abs(ranks_B - best_N).mean() < 0.2  # the order of rare pairs is one of chance
    assert 0.5 < (best_N == 1).mean() < 0.62


def test_popular_items_are_drawn_most_and_the_catalogue_has_their_counts() -> None:
    data = _opened("retrieval", SasRecConfig(), rows=4000, eval_rows=500, zipf=1.2)
    walks, catalogue = _walks(data.train), data.catalogue
    names, counts = np.unique(walks[:, 1:], return_counts=True)
    assert catalogue is not None and catalogue.counts_M.sum() == counts.sum() == 4_000 * 20
    found = dict(zip(catalogue.ids_M.tolist(), catalogue.counts_M.tolist(), strict=True))
    assert all(found[name] == count for name, count in zip(names.tolist(), counts.tolist(), strict=True))
    assert catalogue.values.to_pylist() == catalogue.ids_M.tolist() and set(found) == set(walks.reshape(-1).tolist())
    assert catalogue.counts_M[:100].sum() > 0.4 * counts.sum()
