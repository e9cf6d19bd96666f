"""Columns of one table as many programs hand them over: each is read as plain Arrow, wherever a table is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.config import JobConfig
from shardkeep.inference.frames import chunks_of
from shardkeep.launch.frames import with_frames
from shardkeep.workers.data.conversion.inputs import Inputs
from shardkeep.workers.data.samples import Dataset
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every
from tests.support.data_files import batch_of, opened

TIMES = pa.array([10**15, None, 2 * 10**15, 10**15], pa.timestamp("us"))
COLUMNS = {
    "text": pa.array(["a", "b", None, "b"]),
    "number": pa.array([1, 2, None, 2]),
    "truth": pa.array([True, None, False, True]),
    "day": TIMES.cast(pa.date32()),
    "time": TIMES,
    "price": pa.array([1.5, None, 2.5, 1.5]),
    "tags": pa.array([["a", "b"], None, [], ["b", None]]),
    "seen": pa.array([[1, 2], None, [], [2, 3]]),
    "y": pa.array([0, 1, 1, 0]),
}
SETTINGS: dict[str, Any] = {
    "dense": ["price", {"column": "time", "scale": "none"}],
    "sparse": ["text", "number", "truth", "day", "tags"],
    "sequences": {"history": {"ids": {"seen": "number"}, "max_length": 2}},
    "scale": "none",
}
Writer = Callable[[Any], Any]


def coded(values: pa.Array) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(range(len(values)), "uint32"), values)


def runs(values: pa.Array) -> pa.Array:
    longer = pa.concat_arrays([values.slice(0, 1), values])
    return pa.RunEndEncodedArray.from_arrays(pa.array(range(1, len(longer) + 1), pa.int16()), longer).slice(1)


def views(values: pa.Array) -> pa.Array:
    return values.cast(pa.string_view()) if values.type == pa.string() else values


def large(values: pa.Array) -> pa.Array:
    if pa.types.is_list(values.type):
        return values.cast(pa.large_list(large(values.values).type))
    return values.cast(pa.large_string()) if values.type == pa.string() else values


def decimals(values: pa.Array) -> pa.Array:
    return values.cast(pa.decimal128(38, 2)).cast(pa.decimal64(9, 2)) if pa.types.is_integer(values.type) else values


def listed(change: Writer, *, view: bool = False) -> Writer:
    """Changes the entries of lists, and nothing of other columns."""

    def changed(values: pa.Array) -> Any:
        if not pa.types.is_list(values.type):
            return values
        lengths_N, missing = [len(row or ()) for row in values.to_pylist()], values.is_null()
        offsets, entries = pa.array(np.cumsum([0, *lengths_N]), pa.int32()), change(values.flatten())
        if view:
            return pa.ListViewArray.from_arrays(offsets[:-1], pa.array(lengths_N, pa.int32()), entries, mask=missing)
        return pa.ListArray.from_arrays(offsets, entries, mask=missing)

    return changed


STORED: dict[str, Writer] = {
    "large": large,
    "views": views,
    "decimals": decimals,
    "lists of views": listed(views),
    "list views": listed(views, view=True),
}
"""Forms that a Parquet file has."""
WRITERS: dict[str, Writer] = STORED | {
    "dictionaries": coded,
    "categories of polars": lambda values: coded(views(values)),
    "pieces with a dictionary each": lambda values: pa.chunked_array([coded(values[:1]), coded(values[1:])]),
    "runs of a dictionary": lambda values: runs(coded(values)),
    "pieces of runs": lambda values: pa.chunked_array([runs(values), runs(values)[:0]]),
    "lists of runs": listed(runs),
    "list views of dictionaries": listed(coded, view=True),
    "runs of lists of dictionaries": lambda values: runs(listed(coded)(values)),
}


def shown(dataset: Dataset) -> Any:
    batch = batch_of(dataset)
    ids = {name: (bag.values_N.tolist(), np.array(bag.lengths_B).tolist()) for name, bag in batch.ids.items()}
    return ids, batch.dense_BI.tolist(), batch.label_BT.tolist()


def given(split: str, part: Any) -> Any:
    return part if split == "train" else None


@every("writer", WRITERS)
def test_a_table_of_any_writer_is_the_plain_one_in_training_and_in_scoring(tmp_path: Path, writer: str) -> None:
    right = opened(tmp_path, {"plain.parquet": COLUMNS}, **SETTINGS)
    frame = pa.table({name: WRITERS[writer](values) for name, values in COLUMNS.items()})
    job = JobConfig.model_validate({"data": {"label": "y"} | SETTINGS})
    of_frame = open_data(with_frames(job, {"train": frame}, tmp_path / "run").data, seed=0)
    part: dict[str, Any] = {"label": frame["y"], "dense": {name: frame[name] for name in ("price", "time")}}
    part |= {"sparse": {n: frame[n] for n in SETTINGS["sparse"]}, "sequences": {"seen": frame["seen"]}}
    own = {"source": f"{__name__}:given", "options": {"part": part}, "label": "label"}
    of_source = open_data(DataConfig.model_validate(SETTINGS | own), seed=0)
    inputs = Inputs.of_json(right.inputs)
    (chunk,) = chunks_of(frame, inputs)
    found, label = shown(inputs.samples(chunk)), shown(right.train)
    assert shown(of_frame.train) == shown(of_source.train) == label and found[:2] == label[:2]


@every("writer", STORED)
def test_files_of_several_writers_are_one_table(tmp_path: Path, writer: str) -> None:
    other = {name: STORED[writer](values) for name, values in COLUMNS.items()}
    found = []
    for number, files in enumerate(((COLUMNS, COLUMNS), (COLUMNS, other), (other, COLUMNS))):
        names = [f"{number}{n}.parquet" for n in range(2)]
        found.append(shown(opened(tmp_path, dict(zip(names, files, strict=True)), train=names, **SETTINGS).train))
    assert found[0] == found[1] == found[2]
