"""The user's own source: module:function, arrays or a data set, whose labels must be those of its schema."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import ConfigError, DataError, ShardkeepError
from shardkeep.config import JobConfig
from shardkeep.workers.data.conversion.hashing import hash_text
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.schema import Feature, Schema
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from shardkeep.workers.model_config import RetrievalSettings, SasRecConfig, TwoTowerConfig
from tests.support.cases import every
from tests.support.configs import TINY
from tests.support.local_job import LocalJob
from tests.support.samples import ArrayDataset

CODE = """
import numpy as np
import pyarrow as pa
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature, Schema

def arrays(split, rows=6, held=True, last=1):
    if split == "eval" and not held:
        return None
    n = rows if split == "train" else 4
    cities = pa.array(["a", "b"] * (n // 2))
    return {
        "label": [*(np.arange(n - 1) % 2).tolist(), last],
        "dense": {"age": np.arange(n) * 1.0, "hour": np.arange(n)},
        "sparse": {"city": cities.dictionary_encode(), "tags": [[1, 2]] * n, "hour": np.arange(n)},
    }

def vectors(split):
    return {"label": [0, 1], "dense": {"v": np.arange(6).reshape(2, 3), "x": [6, 7]}}

def histories(split):
    lists = {"seen": [[3, 4], [], [4, 3, 3]], "age": [[1.0, 2.0], [], [3.0, 4.0, 5.0]]}
    return {"label": [0, 1, 0], "sparse": {"item": [3, 4, 5]}, "sequences": lists}

class Own:
    schema = Schema((), (Feature("u", "u"),))
    def __init__(self, rows):
        self.rows = rows
    def __len__(self):
        return self.rows
    def gather(self, rows_B):
        n = len(rows_B)
        return Batch(np.zeros((n, 0), np.float32), {"u": Ragged(rows_B)}, np.ones((n, 1), np.float32))

def own(split, rows=3, mark=None):
    made = Own(rows)
    if mark is not None:
        made.fingerprint = (lambda: mark["call"]) if isinstance(mark, dict) else mark
    return made

def views(split, label=None):
    if split == "eval":
        made = {"sparse": {"user": [7, 8], "item": ["b", "a"]}, "sequences": {"seen": [["c"], []]}}
        return made | ({} if label is None else {"label": [1, 0]})
    labels = {} if label is None else {"label": label}
    lists = {"seen": [["b"], [], ["c", " a"]]}
    return {"sparse": {"user": [7, 8, 7], "item": ["a", "b ", "a"]}, "sequences": lists} | labels

def funnel(split, names=("clicked", "bought", "seconds")):
    columns = {"clicked": [1, 0, 1, 1], "bought": [1, 0, 0, None], "seconds": np.array([2.0, np.nan, 3.5, 4.0])}
    return {"labels": {name: columns[name] for name in names}, "sparse": {"item": [3, 4, 5, 6]}}

def bare(split):
    return {"labels": [1, 0], "sparse": {"item": [3, 4]}}

def wrong(split):
    return {"labels": [1]}

def ragged(split):
    return {"label": [0, 1], "dense": {"x": [1.0]}}

def broken(split):
    raise TypeError("inside")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_data.py").write_text(CODE)
    yield tmp_path
    sys.modules.pop("my_data", None)


def _open(folder: Path, name: str = "arrays", items: RetrievalSettings | None = None, **settings: Any) -> Data:
    base = {"source": f"my_data:{name}", "root": str(folder), "scale": "none"}
    if name == "own":
        del base["scale"]
    return open_data(DataConfig.model_validate(base | settings), seed=0, items=items)


def test_a_dict_of_arrays_is_a_data_set(folder: Path) -> None:
    data = _open(folder)
    assert data.eval is not None and (len(data.train), len(data.eval)) == (6, 4)
    batch = data.train.gather(np.array([3, 0]))
    assert batch.dense_BI.tolist() == [[3.0, 3.0], [0.0, 0.0]]
    assert batch.ids["city"].values_N.tolist() == [hash_text(b"b"), hash_text(b"a")]
    assert batch.ids["hour"].values_N.tolist() == [3, 0]
    assert batch.ids["tags"].values_N.tolist() == [1, 2, 1, 2]
    assert batch.label_BT.tolist() == [[1.0], [0.0]]


def test_an_array_of_two_dimensions_is_a_dense_vector_and_lists_of_a_sequence_are_histories(folder: Path) -> None:
    for dense in ([], [{"column": "v", "width": 3}, "x"]):
        data = _open(folder, "vectors", dense=dense)
        assert data.train.schema.dense == ("v[0]", "v[1]", "v[2]", "x")
        assert data.train.gather(np.arange(2)).dense_BI.tolist() == [[0, 1, 2, 6], [3, 4, 5, 7]]
    group = {"ids": {"seen": "item"}, "numbers": ["age"], "max_length": 2}
    batch = _open(folder, "histories", sequences={"history": group}).train.gather(np.array([2, 0]))
    assert batch.ids["seen"].values_N.tolist() == [3, 3, 3, 4]
    assert batch.numbers["history"][:, 0].tolist() == [4.0, 5.0, 1.0, 2.0]


SEVERAL = [
    "clicked",
    {"column": "bought", "after": "clicked", "missing": "mask"},
    {"column": "seconds", "loss": "mse", "missing": "mask"},
]


def test_arrays_of_several_labels_are_read_as_columns_of_files_are(folder: Path) -> None:
    data = _open(folder, "funnel", labels=SEVERAL)
    assert data.train.schema.labels == ("clicked", "bought", "seconds")
    label_BT = data.train.gather(np.array([3, 1, 0])).label_BT
    np.testing.assert_array_equal(label_BT, [[1, np.nan, 4.0], [0, 0, np.nan], [1, 1, 2.0]])
    two = data.fingerprint, _open(folder, "funnel", labels=SEVERAL[:2]).fingerprint
    assert two[0] != two[1] and data.inputs is not None and len(data.inputs["labels"]) == 3


def test_columns_and_options_of_the_config_choose_and_describe(folder: Path) -> None:
    data = _open(folder, dense=["age"], sparse=[{"column": "tags", "table": "t", "pooling": "mean"}], scale="standard")
    assert data.train.schema.dense == ("age",) and data.train.schema.tables() == ("t",)
    assert abs(float(data.train.gather(np.arange(6)).dense_BI.mean())) < 1e-6
    data = _open(folder, options={"rows": 400, "held": False}, split={"by": "random", "eval": 0.5, "test": 0.0})
    assert data.eval is not None and len(data.train) + len(data.eval) == 400
    assert _open(folder, options={"held": False}).eval is None


def test_an_object_with_gather_is_used_as_it_is_and_a_source_known_by_its_arrays_or_what_it_states(
    folder: Path,
) -> None:
    def mark(name: str, **options: Any) -> str:
        return _open(folder, name, options=options).fingerprint

    train = _open(folder, "own").train
    assert len(train) == 3 and train.gather(np.array([2])).ids["u"].values_N.tolist() == [2]
    assert mark("arrays", last=0) == mark("arrays", last=0.0) != mark("arrays", last=1)
    assert mark("own", rows=3) != mark("own", rows=4)
    assert mark("own", rows=3, mark="a") == mark("own", rows=4, mark="a") != mark("own", rows=3, mark="b")
    assert mark("own", rows=3, mark={"call": "a"}) == mark("own", rows=3, mark="a")
    with pytest.raises(ConfigError, match="fingerprint is a list; allowed: a text or whole number"):
        mark("own", mark=["a"])


def test_items_of_arrays_are_named_by_their_values_and_those_of_an_object_by_their_ids(folder: Path) -> None:
    def named(data: Data) -> dict[Any, int]:
        assert data.catalogue is not None
        return dict(zip(data.catalogue.values.to_pylist(), data.catalogue.counts_M.tolist(), strict=True))

    lists = {"seen": {"ids": {"seen": "item"}, "max_length": 2}}
    towers, entries = TwoTowerConfig(item=["item"]), {"sparse": ["item"], "sequences": lists}
    assert named(_open(folder, "views", towers, sparse=["user", "item"])) == {"a": 2, "b": 1}
    assert named(_open(folder, "views", SasRecConfig(), **entries)) == {"a": 3, "b": 1, "c": 0}
    labelled = _open(folder, "views", towers, sparse=["user", "item"], options={"label": [1, 1, 0]})
    assert named(labelled) == {"a": 1, "b": 1}
    assert named(_open(folder, "own", TwoTowerConfig(item=["u"]), options={"rows": 4})) == dict.fromkeys(range(4), 1)
    with pytest.raises(DataError, match=r"returned .'sequences', 'sparse'.; allowed: a dict of label"):
        _open(folder, "views")


@every(
    ("name", "settings", "kind", "expected"),
    [
        ("nothing", {}, ConfigError, "data.source: module 'my_data' has no 'nothing'"),
        ("arrays", {"options": {"rowz": 1}}, ConfigError, "rowz"),
        ("arrays", {"dense": ["agee"]}, DataError, "has no column agee; did you mean age"),
        ("arrays", {"train": ["x"]}, ConfigError, "data.train: has no effect"),
        ("arrays", {"split": "random"}, ConfigError, "returns evaluation data of its own"),
        ("wrong", {}, DataError, r"returned \['labels'\]; allowed"),
        ("wrong", {}, DataError, "a dict of label, .*; labels needs data.labels, which describes each"),
        ("arrays", {"labels": SEVERAL}, DataError, r"returned \['dense', 'label', 'sparse'\]; allowed: a dict of"),
        ("bare", {"labels": SEVERAL}, DataError, "labels is a list; allowed: a dict of an array for each label"),
        ("funnel", {"labels": SEVERAL, "options": {"names": ["clicked"]}}, DataError,
         "labels: has no column bought; it has: clicked"),
        ("own", {"labels": SEVERAL}, ConfigError, "data.labels: has no effect"),
        ("ragged", {}, DataError, "column x has 1 rows, label has 2"),
        ("own", {"scale": "log"}, ConfigError, "data.scale: has no effect"),
        ("own", {"sequences": {"s": {"ids": {"a": "u"}, "max_length": 2}}}, ConfigError, "data.sequences: has no eff"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line(
    folder: Path, name: str, settings: dict[str, Any], kind: type[ShardkeepError], expected: str
) -> None:
    with pytest.raises(kind, match=expected):
        _open(folder, name, **settings)


def test_an_error_inside_the_users_code_keeps_its_traceback_and_a_missing_module_is_named(folder: Path) -> None:
    with pytest.raises(TypeError, match="inside"):
        _open(folder, "broken")
    with pytest.raises(ConfigError, match="module 'no_such' cannot be imported"):
        open_data(DataConfig(source="no_such:f", root=str(folder)), seed=0)


def samples(num_labels: int) -> ArrayDataset:
    """A schema of one label, and columns of so many."""
    schema, ids = Schema(("x",), (Feature("a", "a"),)), {"a": (np.arange(16), np.arange(17), None)}
    return ArrayDataset(schema, np.zeros((16, 1), np.float32), ids, np.zeros((16, num_labels), np.float32))


@every("wrong", ["train", "eval"])
def test_labels_that_the_schema_does_not_name_are_refused(wrong: str) -> None:
    job = LocalJob(
        JobConfig.model_validate(TINY), Data(**{"train": samples(1), "eval": samples(1)} | {wrong: samples(2)})
    )
    why = r"returned labels \(\d+, 2\); expected \(\d+, 1\): its schema has the labels label"
    with pytest.raises(DataError, match=why):
        job.run()
