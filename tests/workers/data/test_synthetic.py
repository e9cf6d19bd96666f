"""The synthetic streams: determinism, popularity, what can be learned from them, and walks of retrieval."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardkeep.base.arrays import Ints
from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data.sources.synthetic.source import SyntheticDataset
from shardkeep.workers.data_config import DataConfig, SyntheticConfig
from shardkeep.workers.metrics.quality import auc
from shardkeep.workers.model_config import SasRecConfig
from tests.support.cases import every


def _stream(seed: int = 7, **settings: object) -> Data:
    return open_data(DataConfig(synthetic=SyntheticConfig.model_validate(settings)), seed=seed)


def test_a_row_is_the_same_in_any_batch_and_any_run_and_parts_and_seeds_give_others() -> None:
    whole = _stream().train.gather(np.arange(100))
    part = _stream().train.gather(np.array([70, 3]))
    assert np.array_equal(part.dense_BI, whole.dense_BI[[70, 3]])
    assert np.array_equal(part.label_BT, whole.label_BT[[70, 3]])
    for name, ragged in part.ids.items():
        assert np.array_equal(ragged.values_N, whole.ids[name].values_N[[70, 3]])
    data, other = _stream(), _stream(seed=8)
    assert data.eval is not None
    batches = [d.gather(np.arange(50)) for d in (data.train, data.eval, other.train)]
    assert len({b.dense_BI.tobytes() for b in batches}) == 3
    assert {b.dense_BI.shape for b in batches} == {(50, 13)}
    assert data.train.schema == data.eval.schema == other.train.schema
    with pytest.raises(IndexError):
        _stream(train_samples=10).train.gather(np.array([10]))


def test_ids_follow_the_zipf_law_and_do_not_show_their_rank() -> None:
    data = _stream(table_sizes=[1000], zipf=1.2)
    ids, counts = np.unique(data.train.gather(np.arange(100_000)).ids["C1"].values_N, return_counts=True)
    order = np.argsort(-counts)
    edges = np.arange(1, 1002, dtype=np.float64) ** -0.2
    share = (edges[:-1] - edges[1:]) / (edges[0] - edges[-1])
    assert np.allclose(counts[order][:20] / 100_000, share[:20], rtol=0.12)
    assert ids.min() < 0 < ids.max()
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.1


def probability(dataset: SyntheticDataset, rows: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-dataset.teacher_logits(rows)))


def test_labels_are_drawn_with_the_teachers_probability() -> None:
    train = _stream().train
    assert isinstance(train, SyntheticDataset)
    rows = np.arange(20_000)
    chance, label = probability(train, rows), train.gather(rows).label_BT[:, 0]
    for low in np.arange(0.0, 1.0, 0.1):
        inside = (chance >= low) & (chance < low + 0.1)
        if inside.sum() > 500:
            assert abs(float(label[inside].mean() - chance[inside].mean())) < 0.05


def test_a_seed_has_the_same_teacher_and_fingerprint_in_every_version() -> None:
    train = _stream().train
    assert isinstance(train, SyntheticDataset)
    expected = [0.2537839052925829, 0.3945076998706604, 0.006677560057740297, 0.03440954690375432]
    assert probability(train, np.arange(4)) == pytest.approx(expected, rel=1e-5)
    assert _stream().fingerprint == "3b80e37933ff4aeb-5d2c90168f2e0315"  # before there were tasks


def test_the_best_auc_is_that_of_the_teachers_probabilities() -> None:
    data = _stream(eval_samples=5000)
    assert isinstance(data.eval, SyntheticDataset) and data.best_auc is not None
    rows = np.arange(3000)
    expected = auc(probability(data.eval, rows), data.eval.gather(rows).label_BT[:, 0])
    assert data.best_auc(3000) == pytest.approx((expected,), abs=1e-6)
    assert 0.75 < data.best_auc(5000)[0] < 0.9


def test_a_label_tells_whether_the_category_occurs_in_the_history() -> None:
    data = _stream(task="sequences", table_sizes=[200], ids="numbered")
    batch, lengths = data.train.gather(np.arange(50_000)), np.full(50_000, 30)
    seen, target_B = batch.ids["seen_category"], batch.ids["category"].values_N
    assert np.array_equal(seen.lengths_B, lengths) and data.train.schema.sequences[0].max_length == 30
    entries_BL = seen.values_N.reshape(-1, 30)
    occurs_B = (entries_BL == target_B[:, None]).any(axis=1)
    assert abs(occurs_B.mean() - (0.5 + 0.5 * (1 - (199 / 200) ** 30))) < 0.01
    assert [round(float(batch.label_BT[occurs_B == known].mean()), 1) for known in (True, False)] == [0.9, 0.1]
    counts = np.bincount(entries_BL.reshape(-1), minlength=200)
    assert len(counts) == 200 and counts.min() > 0.9 * counts.mean()
    place_B = (entries_BL == target_B[:, None]).argmax(axis=1)[occurs_B]
    assert np.bincount(place_B).min() > 0.8 * len(place_B) / 30


def test_the_best_auc_of_histories_is_that_of_the_two_chances() -> None:
    data = _stream(task="sequences", eval_samples=20_000)
    assert data.best_auc is not None
    chance = 1 / (1 + np.exp(-2.0))
    assert abs(data.best_auc(20_000)[0] - chance) < 0.01  # 0.88, were both kinds as frequent
    assert data.fingerprint != _stream(task="sequences", table_sizes=[501], eval_samples=20_000).fingerprint


def test_each_label_of_a_chain_happens_after_the_one_before_it_with_the_chances_of_its_logits() -> None:
    train = _stream(task="tasks", table_sizes=[50] * 8, num_dense=2).train
    assert train.schema.labels == ("clicked", "bought", "returned")
    assert [task.after for task in train.schema.tasks] == [None, "clicked", "bought"]
    rows = np.arange(40_000)
    label_BT = train.gather(rows).label_BT
    clicked, bought, returned = label_BT.T
    assert not bought[clicked == 0].any() and not np.nansum(returned[bought == 0])
    assert abs(float(np.isnan(returned).mean()) - 0.2) < 0.01 and not np.isnan(label_BT[:, :2]).any()
    rates = [clicked.mean(), bought[clicked == 1].mean(), np.nanmean(returned[bought == 1])]
    assert all(0.25 < rate < 0.75 for rate in rates)
    assert isinstance(train, SyntheticDataset)
    for chance, label in zip(probability(train, rows).T, label_BT.T, strict=True):
        for low in (0.0, 0.1, 0.3, 0.6):
            inside = (chance >= low) & (chance < low + 0.3) & ~np.isnan(label)
            assert abs(float(label[inside].mean() - chance[inside].mean())) < 0.02


def test_labels_of_a_chain_share_half_of_what_decides_them_and_the_best_auc_of_each_is_told_where_it_is_known() -> None:
    labels: list[Any] = ["clicked", {"column": "bought", "given": "clicked"}, {"column": "returned", "missing": "mask"}]
    made = {"task": "tasks", "table_sizes": [50] * 8, "eval_samples": 20_000}
    given, chain = (
        open_data(DataConfig.model_validate({"synthetic": made, "labels": each}), seed=7) for each in (labels, [])
    )
    assert given.best_auc is not None and chain.best_auc is not None and given.fingerprint != chain.fingerprint
    found, joint = given.best_auc(20_000), chain.best_auc(20_000)
    assert found[0] == joint[0] and found[2] == joint[2] and found[1] < joint[1] - 0.01
    assert all(0.7 < best < 0.95 for best in (*found, *joint))
    label_BT = given.train.gather(np.arange(1000)).label_BT
    assert (np.isnan(label_BT[:, 1]) == (label_BT[:, 0] == 0)).all()
    labels[2] |= {"given": "bought"}
    own = open_data(DataConfig.model_validate({"synthetic": made, "labels": labels}), seed=7).train
    assert isinstance(own, SyntheticDataset)
    alike = np.corrcoef(own.teacher_logits(np.arange(20_000)), rowvar=False)[np.triu_indices(3, 1)]
    assert alike.min() > 0.25 and alike.max() < 0.85


@every(
    ("settings", "says"),
    [
        ({"task": "sequences", "num_dense": 5}, "num_dense: has no effect with task: sequences"),
        ({"task": "sequences", "zipf": 2.0}, "zipf: has no effect with task: sequences"),
        *(({"task": "sequences", "table_sizes": sizes}, "table_sizes: with task: sequences, allowed: one")
          for sizes in ([500, 500], [99])),
        ({"task": "retrieval", "num_dense": 3}, "num_dense: has no effect with task: retrieval"),
    ],
)  # fmt: skip
def test_settings_that_a_stream_could_only_ignore_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SyntheticConfig.model_validate(settings)


@every(
    ("settings", "says"),
    [
        ({"labels": ["clicked", "seen"]}, "seen is no label of task: tasks; allowed: clicked, bought, returned"),
        ({"labels": ["clicked", {"column": "bought", "loss": "mse"}]}, "bought is 0 or 1; allowed: loss: bce"),
        ({"labels": ["clicked", {"column": "bought", "positive": ["1"]}]}, "bought is 0 or 1; allowed: loss: bce"),
        ({"labels": ["bought", {"column": "clicked", "given": "bought"}]}, "clicked: happens before bought; allowed"),
        ({"labels": ["clicked", "returned"]}, "a part of the samples does not have it; allowed: missing: mask"),
        *(({"source": "synthetic", "synthetic": {}, setting: value}, rf"data.{setting}: has no effect")
          for setting, value in (("train", ["x"]), ("scale", "log"), ("label", "y"), ("labels", ["clicked", "bought"]),
                                 ("delimiter", ";"), ("split", "random"), ("cache", "c"))),
        ({"synthetic": {"task": "retrieval"}}, r"has no labels; allowed with model\.name: two_tower, sasrec, hstu"),
    ],
)  # fmt: skip
def test_data_settings_that_a_stream_does_not_have_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_data(DataConfig.model_validate({"synthetic": {"task": "tasks"}} | settings), seed=0)


def test_numbered_ids_are_the_hashed_ones_under_other_names() -> None:
    sizes = [1, 7, 5000]
    hashed, numbered = (
        _stream(table_sizes=sizes, ids=ids).train.gather(np.arange(4000)) for ids in ("hashed", "numbered")
    )
    assert (hashed.label_BT == numbered.label_BT).all()
    for f, size in enumerate(sizes):
        a, b = hashed.ids[f"C{f + 1}"].values_N, numbered.ids[f"C{f + 1}"].values_N
        assert 0 <= b.min() <= b.max() < size
        assert len(set(zip(a.tolist(), b.tolist(), strict=True))) == np.unique(a).size == np.unique(b).size


# Walks of retrieval


def _walking(seed: int = 7, **settings: Any) -> Data:
    sizes = {"task": "retrieval", "train_samples": 4_000, "eval_samples": 2_000}
    config = DataConfig(synthetic=SyntheticConfig.model_validate(sizes | settings))
    return open_data(config, seed=seed, items=SasRecConfig())


def _walks(data: Data) -> Ints:
    """Histories and items (B, L + 1) of the training samples."""
    batch = data.train.gather(np.arange(len(data.train)))
    item_B, seen_N = batch.ids["item"].values_N, batch.ids["seen_item"].values_N
    return np.concatenate([seen_N.reshape(len(batch), -1), item_B[:, None]], axis=1)


def test_a_walk_is_the_same_in_any_batch_and_parts_and_seeds_differ() -> None:
    data = _walking()
    assert data.eval is not None
    whole, part = data.train.gather(np.arange(100)), data.train.gather(np.array([70, 3]))
    others = [each.gather(np.arange(100)) for each in (data.eval, _walking(seed=8).train)]
    assert part.ids["item"].values_N.tolist() == whole.ids["item"].values_N[[70, 3]].tolist()
    assert all((other.ids["item"].values_N != whole.ids["item"].values_N).any() for other in others)
    assert whole.label_BT.tolist() == [[1.0]] * 100 and data.train.schema.labels == ("label",)


def test_the_best_ranks_are_those_by_the_frequencies_of_many_walks() -> None:
    data = _walking(table_sizes=[100], train_samples=20_000)
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
    assert np.abs(ranks_B - best(2_000)).mean() < 0.2  # the order of rare pairs is one of chance
    assert 0.5 < (best(2_000) == 1).mean() < 0.62 and best(50).tolist() == best(2_000)[:50].tolist()


def test_popular_items_are_drawn_most_and_the_catalogue_has_their_counts() -> None:
    data = _walking(zipf=1.2)
    walks, catalogue = _walks(data), data.catalogue
    names, counts = np.unique(walks[:, 1:], return_counts=True)
    assert catalogue is not None and catalogue.counts_M.sum() == counts.sum() == 4_000 * 20
    found = dict(zip(catalogue.ids_M.tolist(), catalogue.counts_M.tolist(), strict=True))
    assert all(found[name] == count for name, count in zip(names.tolist(), counts.tolist(), strict=True))
    assert catalogue.values.to_pylist() == catalogue.ids_M.tolist() and set(found) == set(walks.reshape(-1).tolist())
    assert catalogue.counts_M[:100].sum() > 0.4 * counts.sum()
    walks = _walks(_walking(ids="numbered", table_sizes=[500]))
    assert 0 <= walks.min() < walks.max() < 500


def test_the_streams_of_labels_can_be_retrieved_too() -> None:
    data = _walking(task="sequences")
    assert data.catalogue is not None and data.best_ranks is None and data.best_auc is not None
    batch = data.train.gather(np.arange(4_000))
    positive_B = batch.label_BT[:, 0] == 1.0
    assert data.catalogue.counts_M.sum() == positive_B.sum() * 30  # 29 later entries of each list, and the category
