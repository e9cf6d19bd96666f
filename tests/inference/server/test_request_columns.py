"""Columns of requests: numbers at their limits, headings that are known, and sequences cut as in training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import DataError
from shardkeep.inference.columns import input_columns
from shardkeep.inference.frames import chunks_of
from shardkeep.inference.protocol import grpc_form, json_form
from shardkeep.inference.protocol.datatypes import NUMBERS as DATATYPES
from shardkeep.inference.protocol.status import Refusal
from shardkeep.inference.recent import Recent
from shardkeep.inference.server.request_ids import Conversion
from shardkeep.inference.server.signature import Column, Jagged, Rows, Signature
from shardkeep.proto import inference_pb2 as pb
from shardkeep.workers.data.fitting.inputs import Inputs
from tests.support.cases import every
from tests.support.history_files import ROWS, open_histories, write_csv, write_parquet

NUMBERS = [{"column": "seen_age", "scale": "log_standard", "fill": 2.0}]


def jagged(lists: list[list[Any]], dtype: Any = None) -> Jagged:
    values: Any = [entry for entries in lists for entry in entries]
    lengths_N = np.array([len(entries) for entries in lists])
    return Jagged([text.encode() for text in values] if dtype is None else np.array(values, dtype), lengths_N)


def inputs_of(path: Path, seen: Mapping[str, Any], **settings: Any) -> Inputs:
    return Inputs.of_json(open_histories(path, {"numbers": NUMBERS} | seen, **settings).inputs)


def rows_of(inputs: Inputs, columns: Mapping[str, Column]) -> Rows:
    return Rows(2, [columns[column.name] for column in input_columns(inputs)])


TEXTS = {"item": [b"a", b"?"], "category": [b"x", b"y"], "price": np.array([1.5, np.nan])}


def test_a_number_whose_id_is_that_of_a_mark_is_not_missing(tmp_path: Path) -> None:
    rows = dict(ROWS) | {"item": [1, 2, 3, 1, 2, 3], "seen_item": [[1], [], [2] * 5, [3, 4, 5], None, [None, 9]]}
    inputs = inputs_of(write_parquet(tmp_path / "a.parquet", rows), {}, missing=["-1"])
    lists = {"seen_item": jagged([[7], [8]], np.int64), "seen_category": jagged([["x"], ["y"]])}
    lists["seen_age"] = jagged([[1.0], [2.0]], np.float32)
    marked, beyond = (
        rows_of(inputs, TEXTS | lists | {"item": values})
        for values in (np.array([1, -1]), np.array([1, 2**64 - 1], np.uint64))
    )
    assert Conversion(inputs).direct([marked], 2) is not None and Conversion(inputs).direct([beyond], 2) is None


def test_requests_together_are_the_rows_of_each(tmp_path: Path) -> None:
    inputs = inputs_of(write_csv(tmp_path / "a.csv", ROWS), {})
    entries = {"seen_item": [b"a|b|c|d", b""], "seen_category": [b"x|y|x|y", b""]}
    one = rows_of(inputs, TEXTS | entries | {"seen_age": jagged([[1.0, 2.0, 3.0, 4.0], []], np.float64)})
    others = {"seen_item": [b"e", b"f"], "seen_category": [b"x", b"x"]}
    other = rows_of(inputs, TEXTS | others | {"seen_age": jagged([[5.0], [6.0]], np.float64)})
    batch = Conversion(inputs).direct([one, other], 5)
    assert batch is not None
    assert batch.ids["seen_item"].lengths_B is not None
    assert batch.ids["seen_item"].lengths_B.tolist() == [3, 0, 1, 1, 0]
    alone = [next(Conversion(inputs).general(rows, lambda count: count))[0] for rows in (one, other)]
    for name in ("seen_item", "seen_category"):
        values_N = np.concatenate([each.ids[name].values_N for each in alone])
        assert np.array_equal(batch.ids[name].values_N, values_N)
    assert np.array_equal(batch.numbers["seen"], np.concatenate([each.numbers["seen"] for each in alone]))


def test_a_request_whose_lists_differ_in_length_is_refused(tmp_path: Path) -> None:
    inputs = inputs_of(write_csv(tmp_path / "a.csv", ROWS), {})
    entries = {"seen_item": [b"a|b", b""], "seen_category": [b"x|y", b""]}
    asked = rows_of(inputs, TEXTS | entries | {"seen_age": jagged([[1.0, 2.0], [3.0, 4.0]], np.float32)})
    assert Conversion(inputs).direct([asked], 2) is None
    with pytest.raises(DataError, match="row 2, column seen_age: has 2 entries, and seen_item has 0"):
        next(Conversion(inputs).general(asked, lambda rows: rows))


@every("suffix", ["csv", "parquet"])
def test_a_signature_has_the_tensors_of_a_sequence(tmp_path: Path, suffix: str) -> None:
    inputs = inputs_of((write_csv if suffix == "csv" else write_parquet)(tmp_path / f"a.{suffix}", ROWS), {})
    tensors = {tensor.name: tensor.datatype for tensor in Signature(inputs, ["clicked"]).inputs}
    assert list(tensors)[:2] == ["item", "category"]
    if suffix == "csv":
        assert [*tensors.items()][2:] == [(name, "BYTES") for name in ("seen_item", "seen_category", "seen_age")]
    else:
        kinds = {"seen_item": "BYTES", "seen_category": "BYTES", "seen_age": "FP64"}
        pairs = [((f"{name}.values", kind), (f"{name}.lengths", "INT32")) for name, kind in kinds.items()]
        assert [*tensors.items()][2:] == [tensor for pair in pairs for tensor in pair]


def test_a_column_that_a_request_lacks_is_missing_where_it_may_be_absent(tmp_path: Path) -> None:
    rows = dict(ROWS) | {"price": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
    strict, inputs = (
        inputs_of(write_parquet(tmp_path / "a.parquet", rows), {}, dense=["price"], **more)
        for more in ({}, {"absent": "missing"})
    )
    body = {"inputs": [{"name": "item", "datatype": "BYTES", "shape": [2], "data": ["a", "?"]}]}
    request = json_form.RequestReader().read(json.dumps(body).encode(), None, model="m", version="")
    with pytest.raises(Refusal, match="input price: is missing"):
        Signature(strict, ["clicked"]).rows(request)
    ((found, count),) = Conversion(inputs).batches(Signature(inputs, ["clicked"]).rows(request), lambda count: count)
    (chunk,) = chunks_of({"item": ["a", "?"]}, inputs)
    expected = inputs.samples(chunk).gather(np.arange(2))
    assert count == 2 and np.array_equal(found.dense_BI, expected.dense_BI)
    assert {name: ids.values_N.tolist() for name, ids in found.ids.items()} == {
        name: ids.values_N.tolist() for name, ids in expected.ids.items()
    }
    with pytest.raises(DataError, match="the data: has no column price"):
        next(chunks_of({"item": ["a", "?"]}, strict))


@every("datatype", [name for name, dtype in DATATYPES.items() if dtype.kind in "iu"])
def test_the_limits_beside_0_are_no_other_numbers(datatype: str) -> None:
    limits = np.iinfo(DATATYPES[datatype])
    sent = [0, int(limits.max), int(limits.max) - 1, int(limits.min)]
    request = pb.ModelInferRequest(model_name="m")
    described = request.inputs.add(name="x", datatype=datatype, shape=[len(sent)])
    width = "64" if datatype.endswith("64") else ""
    field = f"{'u' * datatype.startswith('U')}int{width}_contents"
    getattr(described.contents, field).extend(sent)
    by_grpc = grpc_form.RequestReader().read(request.SerializeToString())
    body = {"inputs": [{"name": "x", "datatype": datatype, "shape": [len(sent)], "data": sent}]}
    by_json = json_form.RequestReader().read(json.dumps(body).encode(), None, model="m", version="")
    for (values,) in (by_grpc.values, by_json.values):
        assert isinstance(values, np.ndarray) and values.tolist() == sent


def test_a_value_is_made_once_and_a_full_memory_begins_again() -> None:
    made: list[int] = []

    def of(key: int) -> str:
        made.append(key)
        return str(key)

    recent = Recent(of, 2, lambda key, value: key != 9 and value != "8")
    assert [recent[key] for key in (1, 2, 1, 9, 9, 8, 8, 2)] == ["1", "2", "1", "9", "9", "8", "8", "2"]
    assert made == [1, 2, 9, 9, 8, 8]
    assert recent[3] == "3" and dict(recent) == {3: "3"}


def test_headings_of_equal_requests_are_one_key_whoever_has_read_them() -> None:
    inputs = [{"name": "price", "datatype": "FP64", "shape": [2], "data": [1.0, 2.0]}]
    body, other = (json.dumps({"inputs": inputs, "id": id}).encode() for id in ("a", "b"))
    headings = [json_form.RequestReader().read(each, None, model="m", version="").heading for each in (body, other)]
    wider = json.dumps({"inputs": [inputs[0] | {"shape": [2, 1]}]}).encode()
    headings.append(json_form.RequestReader().read(wider, None, model="m", version="").heading)
    assert len(set(headings)) == 2 and headings[0] == headings[1]
