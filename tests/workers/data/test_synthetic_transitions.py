"""The synthetic stream of retrieval: walks whose best possible list is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardkeep.base.arrays import Ints
from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig, SyntheticConfig
from shardkeep.workers.model_config import SasRecConfig

SIZES = {"train_samples": 4_000, "eval_samples": 2_000}


def _stream(seed: int = 7, **settings: Any) -> Data:
    synthetic = SyntheticConfig.model_validate({"task": "retrieval"} | SIZES | settings)
    return open_data(DataConfig(synthetic=synthetic), seed=seed, items=SasRecConfig())


def _walks(data: Data) -> Ints:
    """Histories and items (B, L + 1) of the training samples."""
    batch = data.train.gather(np.arange(len(data.train)))
    item_B, seen_N = batch.ids["item"].values_N, batch.ids["seen_item"].values_N
    return np.concatenate([seen_N.reshape(len(batch), -1), item_B[:, None]], axis=1)


def test_a_row_is_the_same_in_any_batch_and_parts_and_seeds_differ() -> None:
    data = _stream()
    assert data.eval is not None
    whole, part = data.train.gather(np.arange(100)), data.train.gather(np.array([70, 3]))
    others = [each.gather(np.arange(100)) for each in (data.eval, _stream(seed=8).train)]
    assert part.ids["item"].values_N.tolist() == whole.ids["item"].values_N[[70, 3]].tolist()
    assert all((other.ids["item"].values_N != whole.ids["item"].values_N).any() for other in others)
    assert whole.label_BT.tolist() == [[1.0]] * 100 and data.train.schema.labels == ("label",)


def test_the_best_ranks_are_those_by_the_frequencies_of_many_walks() -> None:
    data = _stream(table_sizes=[100], train_samples=30_000)
    walks, best = _walks(data), data.best_ranks
    before_N, after_N = walks[:, :-1].reshape(-1), walks[:, 1:].reshape(-1)
    names, index_N = np.unique(np.concatenate([before_N, after_N]), return_inverse=True)
    counts = np.zeros((len(names), len(names)))
    np.add.at(counts, (index_N[: len(before_N)], index_N[len(before_N) :]), 1.0)
    assert len(names) == 100 and (counts > 0).sum() == 2000  # five topics of twenty items
    assert best is not None and data.eval is not None
    batch = data.eval.gather(np.arange(2_000))
    last_B = np.searchsorted(names, batch.ids["seen_item"].values_N.reshape(2_000, -1)[:, -1])
    item_B = np.searchsorted(names, batch.ids["item"].values_N)
    ranks_B = 1 + (counts[last_B] > counts[last_B, item_B][:, None]).sum(axis=1)
    assert np.abs(ranks_B - best(2_000)).mean() < 0.15  # the order of rare pairs is one of chance
    assert 0.5 < (best(2_000) == 1).mean() < 0.62 and best(50).tolist() == best(2_000)[:50].tolist()


def test_popular_items_are_drawn_most_and_the_catalogue_has_their_counts() -> None:
    data = _stream(zipf=1.2)
    walks, catalogue = _walks(data), data.catalogue
    names, counts = np.unique(walks[:, 1:], return_counts=True)
    assert catalogue is not None and catalogue.counts_M.sum() == counts.sum() == 4_000 * 20
    found = dict(zip(catalogue.ids_M.tolist(), catalogue.counts_M.tolist(), strict=True))
    assert all(found[name] == count for name, count in zip(names.tolist(), counts.tolist(), strict=True))
    assert catalogue.values.to_pylist() == catalogue.ids_M.tolist() and set(found) == set(walks.reshape(-1).tolist())
    assert catalogue.counts_M[:100].sum() > 0.4 * counts.sum()


def test_numbered_items_are_below_the_number_of_items() -> None:
    walks = _walks(_stream(ids="numbered", table_sizes=[500]))
    assert 0 <= walks.min() < walks.max() < 500


def test_a_model_that_predicts_labels_is_refused() -> None:
    synthetic = SyntheticConfig.model_validate({"task": "retrieval"} | SIZES)
    with pytest.raises(ConfigError, match=r"has no labels; allowed with model\.name: two_tower, sasrec, hstu"):
        open_data(DataConfig(synthetic=synthetic), seed=0)
    with pytest.raises(ValueError, match="num_dense: has no effect with task: retrieval"):
        SyntheticConfig.model_validate({"task": "retrieval", "num_dense": 3})


def test_the_streams_of_labels_can_be_retrieved_too() -> None:
    synthetic = SyntheticConfig.model_validate({"task": "sequences"} | SIZES)
    data = open_data(DataConfig(synthetic=synthetic), seed=7, items=SasRecConfig())
    assert data.catalogue is not None and data.best_ranks is None and data.best_auc is not None
    batch = data.train.gather(np.arange(4_000))
    positive_B = batch.label_BT[:, 0] == 1.0
    assert data.catalogue.counts_M.sum() == positive_B.sum() * 30  # 29 later entries of each list, and the category
