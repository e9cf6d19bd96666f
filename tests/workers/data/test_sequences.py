"""Sequences: list columns of one length in each row become histories, cut to the newest entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.config import parse_config
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.conversion.rules import FORM
from shardkeep.workers.data.fitting.inputs import Inputs
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns, sample_inputs
from shardkeep.workers.data.sources.registry import columns_of_files
from tests.support.cases import every
from tests.support.data_files import batch_of
from tests.support.history_files import ROWS, Rows, history_config, open_histories, write_csv, write_parquet


def all_rows(data: Data) -> Batch:
    return batch_of(data.train)


def texts_of(entries: list[Any]) -> list[int]:
    return [MISSING_ID if text is None else hash_text(text.encode()) for text in entries]


def kept(rows: Rows, name: str, most: int) -> list[list[Any]]:
    """The newest entries of each row, which are the last ones."""
    return [(entries or [])[-most:] for entries in rows[name]]


@every(("file", "write"), [("a.csv", write_csv), ("a.parquet", write_parquet)])
def test_lists_of_a_sequence_that_differ_in_length_are_named(tmp_path: Path, file: str, write: Any) -> None:
    path = write(tmp_path / file, dict(ROWS) | {"seen_age": [[1.0], [], [1.0, 2.0, 3.0, 4.0, 5.0], [7.0], None, [2.0]]})
    with pytest.raises(DataError) as error:
        open_histories(path)
    assert str(error.value) == (
        f"{path}, row 4, column seen_age: has 1 entries, and seen_item has 3; "
        "the lists of a sequence have one length in each row"
    )


def test_only_what_is_stored_decides_about_the_cache_and_all_that_is_read_about_the_fingerprint(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    own_tables = {"sparse": [{"column": "item", "table": "t"}, "category"]}
    marks = [open_histories(path, **own_tables).fingerprint]
    for seen in ({}, {"max_length": 4}, {"newest": "first"}):
        marks.append(open_histories(path, seen).fingerprint)
    assert marks[0] == marks[1] and len(set(marks)) == 3
    open_histories(path, {"numbers": [{"column": "seen_age", "scale": "log"}]})
    names = [column.name.rpartition("-")[0] for column in tmp_path.glob(".shardkeep-cache/a-*/*.column")]
    features = ["ids-category", "ids-item", "ids-seen_category", "ids-seen_item"]
    assert sorted(name for name in names if name != "rows-0") == [*features, "label", "numbers-seen_age"]


def test_texts_in_brackets_are_lists_and_a_missing_field_beside_them_is_one_missing_entry(tmp_path: Path) -> None:
    rows = ["0,a,\"['a', 'b']\",\"[1.5, null]\"", "1,b,[],[]", "0,b,\"['c']\",[2]"]
    (tmp_path / "a.csv").write_text("\n".join(["clicked,item,seen_item,seen_age", *rows]))
    seen = {"ids": {"seen_item": "item"}, "separator": ","}
    batch = all_rows(open_histories(tmp_path / "a.csv", seen, sparse=["item"]))
    assert batch.ids["seen_item"].values_N.tolist() == texts_of(["a", "b", "c"])
    assert batch.numbers["seen"][:, 0].tolist() == [1.5, 1.75, 2.0]
    (tmp_path / "a.csv").write_text("clicked,item,category,seen_item,seen_category,seen_age\n0,a,x,,x,2\n1,b,y,NA,,\n")
    batch = all_rows(open_histories(tmp_path / "a.csv"))
    assert batch.ids["seen_item"].values_N.tolist() == [MISSING_ID]
    assert batch.ids["seen_category"].values_N.tolist() == texts_of(["x"])
    assert np.array_equal(batch.ids["seen_category"].lengths_B, [1, 0])


@every(
    ("seen", "says"),
    [
        ({"separator": None}, r"column seen_item: holds binary; allowed: lists; of texts such as a\|b give"),
        ({"ids": {"seen_itm": "item"}}, r"has no column seen_itm; did you mean seen_item\?"),
        ({"numbers": ["seen_category"]}, "row 1, column seen_category: 'x' is not a number"),
    ],
)
def test_what_a_sequence_cannot_be_read_from_is_refused(tmp_path: Path, seen: dict[str, Any], says: str) -> None:
    path = write_csv(tmp_path / "a.csv", ROWS)
    with pytest.raises(DataError, match=says):
        open_histories(path, {"ids": {"seen_item": "item"}} | seen, sparse=["item"])
    path = write_parquet(tmp_path / "a.parquet", dict(ROWS) | {"seen_age": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]})
    with pytest.raises(DataError, match="column seen_age: holds double; allowed: lists, or texts with the sequence's"):
        open_histories(path)


def test_columns_are_named_by_their_features(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    schema = open_histories(path, sparse=[{"column": "item", "table": "things"}, "category"]).train.schema
    assert [column.table for column in schema.sequences[0].ids] == ["things", "category"]
    assert schema.tables() == ("things", "category")
    features = open_histories(path, sparse=["*"]).train.schema.features
    assert [feature.name for feature in features] == ["item", "category"], "a pattern leaves those of sequences out"


def test_numbers_are_scaled_by_the_entries_of_the_training_rows_or_as_the_model_does_that_a_job_continues(
    tmp_path: Path,
) -> None:
    rows = dict(ROWS) | {"seen_age": [[1.0], [], [1.0, 2.0, 3.0, 4.0, 5.0], [7.0, 8.0, 9.0], None, [2.0, 0.5]]}
    train, held = tmp_path / "a.parquet", tmp_path / "b.parquet"
    write_parquet(train, rows)
    write_parquet(held, dict(rows) | {"seen_age": [[100.0] * len(ages or ()) for ages in rows["seen_age"]]})
    numbers = [{"column": "seen_age", "scale": "log_standard"}]
    data = open_histories(train, {"numbers": numbers, "max_length": 2}, eval=str(held))
    logs = np.log1p([age for ages in rows["seen_age"] for age in ages or ()])
    ages = np.log1p([age for ages in kept(rows, "seen_age", 2) for age in ages])
    assert np.allclose(all_rows(data).numbers["seen"][:, 0], (ages - logs.mean()) / logs.std(), atol=1e-5)
    assert data.eval is not None
    held_NS = batch_of(data.eval).numbers["seen"]
    assert np.allclose(held_NS, (np.log1p(100.0) - logs.mean()) / logs.std(), rtol=1e-5)
    other = {"numbers": numbers, "max_length": 2}
    kept_NS, fresh_NS = (all_rows(open_histories(held, other, fitted=f)).numbers["seen"] for f in (data.inputs, None))
    assert np.allclose(kept_NS, held_NS[:1]) and not fresh_NS.any()


def test_the_record_of_a_model_has_the_form_of_its_rules(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    data = open_histories(path)
    assert data.inputs is not None and data.inputs["form"] == FORM
    assert data.describe().endswith("; seen: 16.7% of the histories are cut to 3, 33.3% are empty")
    inputs = Inputs.of_json(data.inputs)
    assert inputs.to_json() == data.inputs
    assert inputs.columns() == ["item", "category", "seen_item", "seen_category", "seen_age"]
    plain = open_histories(path, sequences={}).inputs
    assert plain is not None and plain["form"] == FORM and "sequences" not in plain
    record: Any = open_histories(path, fitted=plain).inputs
    with pytest.raises(ValueError, match=f"form: .*greater than or equal to {FORM}"):
        Inputs.of_json(plain | {"form": FORM - 1})  # of rules that are read no more
    record["sequences"]["seen"]["ids"]["item"] = "item"
    with pytest.raises(ValueError, match="seen: names item, which is in data"):
        Inputs.of_json(record)


@every(
    ("settings", "says"),
    [
        ({"dense": ["seen_age"]}, "data.sequences.seen: names seen_age, which is in data.dense"),
        ({"sparse": ["item", "category", "seen_item"]}, "names seen_item, which is in data.sparse"),
        ({"label": "seen_item"}, "names seen_item, which is the label"),
        ({"weight": "seen_age"}, "names seen_age, which is data.weight"),
        ({"time": "seen_age"}, "names seen_age, which is data.time"),
        ({"sparse": ["seen"]}, "data.sequences: seen is the name of a feature"),
        (
            {"sequences": {name: {"ids": {"seen_item": "item"}, "max_length": 3} for name in ("seen", "bought")}},
            r"data\.sequences\.bought: names seen_item, which is in data\.sequences\.seen",
        ),
    ],
)
def test_a_column_of_a_sequence_is_nothing_else(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_histories(write_parquet(tmp_path / "a.parquet", ROWS), **settings)


def test_a_table_that_nothing_else_has_is_refused_by_the_header_alone(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", dict(ROWS) | {"clicked": ["neither 0 nor 1"] * 6})
    columns = columns_of_files(history_config(path, {"ids": {"seen_item": "itm"}}, sparse=["*"]))
    assert columns is not None
    with pytest.raises(ConfigError) as error:
        parse_config("seed: 1").check_tables(columns)
    assert str(error.value) == (
        "data.sequences.seen.ids.seen_item: no feature has the table itm; did you mean item? "
        "allowed: item, category, seen_category, or a table of its own in tables"
    )
    parse_config("tables: {itm: {dim: 4}}").check_tables(columns)


def test_an_own_data_sets_sequences_are_read_again_by_its_record() -> None:
    seen = SequenceColumns("seen", (Feature("a", "t", "none"),), ("age", "price"), 4)
    inputs = Inputs.of_json(sample_inputs(Schema(("x",), (Feature("b", "t"),), sequences=(seen,)), frozenset()))
    columns = {"x": [1.0, 2.0], "b": [3, 4], "a": [[5, 6], []], "age": [[7.0, None], []], "price": [[8.0, 9.0], []]}
    arrays = {name: pa.array(values) for name, values in columns.items()}
    batch = inputs.samples(Chunk("the data", np.array([1, 2]), arrays)).gather(np.arange(2))
    assert batch.ids["a"].values_N.tolist() == [5, 6]
    assert batch.numbers["seen"].tolist() == [[7.0, 8.0], [0.0, 9.0]]
