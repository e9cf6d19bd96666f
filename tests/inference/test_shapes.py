"""Models of vectors and of partitions: every entrance takes what training took, with the same scores."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pyarrow.dataset as pads  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import torch

import shardkeep
from shardkeep.base.errors import DataError
from shardkeep.inference.export.writing import export_run
from shardkeep.inference.files import input_files
from shardkeep.inference.protocol.datatypes import Values, pack
from shardkeep.inference.scoring import evaluate_run, predict_files
from shardkeep.inference.server.served_model import ServedModel
from shardkeep.proto import inference_pb2 as pb
from tests.support.cases import every
from tests.support.click_files import click_job
from tests.support.serving import Server, datatype_of, scores_of

WIDTH = 4
COUNTRIES = ("DE", "FR", "U S")


def _table(count: int, seed: int) -> pa.Table:
    random = np.random.default_rng(seed)
    vectors_NW = np.round(random.normal(size=(count, WIDTH)), 3)
    country = random.integers(0, 3, count)
    columns = {
        "v": pa.array(vectors_NW.tolist(), pa.list_(pa.float32())),
        "price": np.round(random.lognormal(2, 1, count), 2),
        "user": random.integers(0, 20, count),
        "clicked": (vectors_NW[:, 0] + country > 1).astype(int),
        "country": [COUNTRIES[c] for c in country],
    }
    return pa.table(columns)


def _trained(folder: Path, **data: Any) -> Path:
    job = click_job(folder / "train.parquet")
    del job["data"]["sparse"]
    job["data"] |= {"source": "parquet", "dense": ["price", {"column": "v", "width": WIDTH}], "sparse": ["user"]} | data
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=folder / "run", quiet=True)
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    pq.write_table(_table(400, 1), folder / "train.parquet")
    return _trained(folder)


@pytest.fixture(scope="module")
def predictor(run: Path) -> shardkeep.Predictor:
    return shardkeep.load(run)


@pytest.fixture(scope="module")
def server(predictor: shardkeep.Predictor) -> Iterator[Server]:
    with Server(ServedModel(predictor)) as server:
        yield server


ROWS = _table(70, 2)
V_NW = np.array(ROWS["v"].to_pylist(), np.float32)


def test_vectors_are_taken_in_every_form_of_memory(predictor: shardkeep.Predictor) -> None:
    assert predictor.columns == ["price", "v", "user"]
    expected_N = predictor.predict(ROWS)
    plain = {name: ROWS[name].to_pylist() for name in ("price", "user")}
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(V_NW.reshape(-1)), WIDTH)
    for v in (V_NW, V_NW.tolist(), list(V_NW), torch.tensor(V_NW), fixed, [str(row) for row in V_NW.tolist()]):
        assert (predictor.predict(plain | {"v": v}) == expected_N).all()
    assert (predictor.predict(ROWS.to_pylist()) == expected_N).all()


def test_another_width_is_refused_with_its_row(predictor: shardkeep.Predictor) -> None:
    rows = ROWS.to_pylist()[:3]
    rows[1]["v"] = [1.0, 2.0]
    with pytest.raises(DataError, match=r"row 2, column v: has 2 numbers; allowed: 4, the column's width"):
        predictor.predict(rows)
    with pytest.raises(DataError, match="column v: holds int64; allowed: lists of 4 numbers"):
        predictor.predict({"price": [1], "user": [1], "v": [1]})


@every("name", ["new.parquet", "new.csv"])
def test_files_of_vectors_are_scored_like_frames(
    run: Path, predictor: shardkeep.Predictor, tmp_path: Path, name: str
) -> None:
    if name.endswith(".parquet"):
        pq.write_table(ROWS, tmp_path / name)
    else:
        pacsv.write_csv(ROWS.set_column(0, "v", pa.array([str(row) for row in V_NW.tolist()])), tmp_path / name)
    predict_files(run, [tmp_path / name], tmp_path / "out.parquet")
    expected_N = predictor.predict(ROWS)
    assert np.abs(pq.read_table(tmp_path / "out.parquet")["score"].to_numpy() - expected_N).max() < 1e-6
    assert evaluate_run(run, files=[tmp_path / name])["samples"] == 70


def test_an_export_of_vectors_scores_like_its_run(run: Path, predictor: shardkeep.Predictor, tmp_path: Path) -> None:
    export_run(run, tmp_path / "export")
    assert (shardkeep.load(tmp_path / "export").predict(ROWS) == predictor.predict(ROWS)).all()


def _tensors(v: Values, shape: list[int], count: int = 70) -> dict[str, tuple[Values, list[int]]]:
    rows = ROWS.slice(0, count)
    return {
        "v": (v, shape),
        "price": (rows["price"].to_numpy().astype(np.float64), [count]),
        "user": (rows["user"].to_numpy().astype(np.int64), [count, 1]),
    }


def _infer(server: Server, tensors: dict[str, tuple[Values, list[int]]]) -> Any:
    request = pb.ModelInferRequest(model_name="clicks")
    for name, (values, shape) in tensors.items():
        request.inputs.add(name=name, datatype=datatype_of(values), shape=shape)
        request.raw_input_contents.append(pack(values))
    return scores_of(server.infer(request))


def test_vectors_are_tensors_over_grpc(server: Server, predictor: shardkeep.Predictor) -> None:
    expected_N = predictor.predict(ROWS)
    texts: Values = [str(row).encode() for row in V_NW.tolist()]
    entries: Values = [str(x).encode() for x in V_NW.reshape(-1).tolist()]
    flat = V_NW.reshape(-1)
    for values, shape in (
        (flat, [70, WIDTH]),
        (flat.astype(np.float64), [70, WIDTH]),
        (entries, [70, WIDTH]),
        (texts, [70]),
    ):
        assert np.abs(_infer(server, _tensors(values, shape)) - expected_N).max() < 1e-6
    one_N = _infer(server, _tensors(V_NW[0], [1, WIDTH], 1))
    assert np.abs(one_N - expected_N[:1]).max() < 1e-6


def _json(tensors: dict[str, tuple[Values, list[int]]], v: Any) -> list[dict[str, Any]]:
    told = [
        {"name": name, "datatype": datatype_of(values), "shape": shape, "data": np.asarray(values).tolist()}
        for name, (values, shape) in tensors.items()
    ]
    return [told[0] | {"data": v}, *told[1:]]


def test_vectors_are_tensors_over_http(server: Server, predictor: shardkeep.Predictor) -> None:
    gaps: list[list[float | None]] = V_NW.tolist()
    gaps[3][2] = None
    expected_N = predictor.predict(ROWS.set_column(0, "v", pa.array(gaps)))
    tensors = _tensors(V_NW.reshape(-1), [70, WIDTH])
    for v in (gaps, [x for row in gaps for x in row]):
        status, reply = server.post(_json(tensors, v))
        assert status == 200 and np.abs(np.array(reply["outputs"][0]["data"]) - expected_N).max() < 1e-6, reply


def test_the_metadata_say_the_width(server: Server) -> None:
    _, _, body = server.http("GET", "/v2/models/clicks")
    assert b'{"name":"v","datatype":"FP64","shape":[-1,4]}' in body.replace(b" ", b"")


@every(
    ("count", "shape", "why"),
    [
        (70 * 3, [70, 3], r"input v: shape \[70, 3\]; allowed: \[N\] or \[N, 4\]"),
        (70, [70, 1], r"input v: shape \[70, 1\]; allowed: \[N\] or \[N, 4\]"),
        (280, [280], "has 70 rows, and v has 280|has 280 rows"),
        (70, [70], "column v: holds double; allowed: lists of 4 numbers"),
        (69 * 4, [69, 4], "has 70 rows|has 69 rows"),
    ],
)
def test_tensors_of_another_shape_are_refused(server: Server, count: int, shape: list[int], why: str) -> None:
    status, reply = server.post(_json(_tensors(np.zeros(count), shape), np.zeros(count).tolist()))
    assert status == 400 and re.search(why, reply["error"]), reply


def _partitions(folder: Path, count: int, seed: int) -> pa.Table:
    table = _table(count, seed)
    by = pads.partitioning(pa.schema([("country", pa.string())]), flavor="hive")
    pads.write_dataset(table, folder, format="parquet", partitioning=by)
    return table


def test_partitions_are_scored_kept_and_grouped(tmp_path: Path) -> None:
    _partitions(tmp_path / "log", 400, 1)
    run = _trained(tmp_path, train=[str(tmp_path / "log")], sparse=["user", "country"])
    table = _partitions(tmp_path / "new", 80, 2)
    keys = list(zip(table["price"].to_pylist(), table["user"].to_pylist(), strict=True))
    assert len(set(keys)) == 80
    told = zip(table["country"].to_pylist(), shardkeep.load(run).predict(table).tolist(), strict=True)
    expected = dict(zip(keys, told, strict=True))

    done = predict_files(
        run, input_files([str(tmp_path / "new")]), tmp_path / "out.csv", keep=["price", "user", "country"]
    )
    out = pacsv.read_csv(tmp_path / "out.csv").to_pylist()
    assert done.rows == len(out) == 80
    assert done.unseen["country"] == [0, 80]
    for row in out:
        country, score = expected[row["price"], row["user"]]
        assert row["country"] == country and abs(row["score"] - score) < 1e-6

    found = evaluate_run(run, files=input_files([str(tmp_path / "new")]), by="country")
    counts = {group["value"]: group["samples"] for group in found["by"]["groups"]}
    assert counts == {name: table["country"].to_pylist().count(name) for name in COUNTRIES}
