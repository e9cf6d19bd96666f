"""The synthetic stream: determinism, popularity and what can be learned from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data.sources.synthetic.source import SyntheticDataset
from shardkeep.workers.data_config import DataConfig, SyntheticConfig
from shardkeep.workers.metrics.quality import auc
from shardkeep.workers.model_config import TwoTowerConfig
from tests.support.cases import every


def _stream(seed: int = 7, items: TwoTowerConfig | None = None, **settings: object) -> Data:
    return open_data(DataConfig(synthetic=SyntheticConfig.model_validate(settings)), seed=seed, items=items)


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
    return 1.0 / (1.0 + np.exp(-dataset.drawn(rows)[1]))


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
    assert _stream().fingerprint == "3b80e37933ff4aeb-5d2c90168f2e0315"


def test_the_best_auc_is_that_of_the_teachers_probabilities() -> None:
    data = _stream(eval_samples=5000)
    assert isinstance(data.eval, SyntheticDataset)
    rows = np.arange(3000)
    expected = auc(probability(data.eval, rows), data.eval.gather(rows).label_BT[:, 0])
    assert data.eval.best_auc(3000) == pytest.approx((expected,), abs=1e-6)
    assert 0.75 < data.eval.best_auc(5000)[0] < 0.9


@every(
    ("setting", "value"),
    [("train", ["x"]), ("scale", "log"), ("label", "y"), ("labels", ["clicked", "bought"]), ("delimiter", ";"),
     ("split", "random"), ("cache", "c"), ("time", "t"), ("weight", "w"), ("quote", "'")],
)  # fmt: skip
def test_data_settings_that_the_stream_does_not_have_are_refused(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"data.{setting}: has no effect with source: synthetic; allowed: data.syn"):
        open_data(DataConfig.model_validate({"source": "synthetic", "synthetic": {}, setting: value}), seed=0)


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


def test_the_stream_can_be_retrieved_too() -> None:
    data = _stream(table_sizes=[100, 50], num_dense=0, train_samples=2000, items=TwoTowerConfig(item=["C1"]))
    batch, catalogue = data.train.gather(np.arange(2000)), data.catalogue
    assert catalogue is not None and catalogue.values.to_pylist() == catalogue.ids_M.tolist()
    names, counts = np.unique(batch.ids["C1"].values_N[batch.label_BT[:, 0] == 1], return_counts=True)
    assert dict(zip(names.tolist(), counts.tolist(), strict=True)) == dict(
        zip(catalogue.ids_M.tolist(), catalogue.counts_M.tolist(), strict=True)
    )
