"""Models of vectors, of partitions and of your own source: every entrance takes what training took, with the same
scores."""

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


def table_of(count: int, seed: int) -> pa.Table:
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


def trained(folder: Path, **data: Any) -> Path:
    job = click_job(folder / "train.parquet")
    vectors = {"source": "parquet", "dense": ["price", {"column": "v", "width": WIDTH}], "sparse": ["user"]}
    job["data"] |= vectors | data
    job["data"] = {name: value for name, value in job["data"].items() if value is not None}
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=folder / "run", quiet=True)
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    pq.write_table(table_of(200, 1), folder / "train.parquet")
    return trained(folder)


@pytest.fixture(scope="module")
def predictor(run: Path) -> shardkeep.Predictor:
    return shardkeep.load(run)


@pytest.fixture(scope="module")
def server(predictor: shardkeep.Predictor) -> Iterator[Server]:
    with Server(ServedModel(predictor)) as server:
        yield server


ROWS = table_of(70, 2)
V_NW = np.array(ROWS["v"].to_pylist(), np.float32)
TEXTS = [str(row) for row in V_NW.tolist()]


def test_vectors_are_taken_in_every_form_of_memory_and_of_one_width(predictor: shardkeep.Predictor) -> None:
    assert predictor.columns == ["price", "v", "user"]
    expected_N = predictor.predict(ROWS)
    plain = {name: ROWS[name].to_pylist() for name in ("price", "user")}
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(V_NW.reshape(-1)), WIDTH)
    for v in (V_NW, V_NW.tolist(), list(V_NW), torch.tensor(V_NW), fixed, TEXTS):
        assert (predictor.predict(plain | {"v": v}) == expected_N).all()
    rows = ROWS.to_pylist()
    assert (predictor.predict(rows) == expected_N).all()
    rows[1]["v"] = [1.0, 2.0]
    with pytest.raises(DataError, match=r"row 2, column v: has 2 numbers; allowed: 4, the column's width"):
        predictor.predict(rows)
    with pytest.raises(DataError, match="column v: holds int64; allowed: lists of 4 numbers"):
        predictor.predict({"price": [1], "user": [1], "v": [1]})


def test_files_and_an_export_score_vectors_like_frames(
    run: Path, predictor: shardkeep.Predictor, tmp_path: Path
) -> None:
    export_run(run, tmp_path / "export")
    expected_N = predictor.predict(ROWS)
    assert (shardkeep.load(tmp_path / "export").predict(ROWS) == expected_N).all()
    pq.write_table(ROWS, tmp_path / "new.parquet")
    pacsv.write_csv(ROWS.set_column(0, "v", pa.array(TEXTS)), tmp_path / "new.csv")
    for file in (tmp_path / "new.parquet", tmp_path / "new.csv"):
        predict_files(tmp_path / "export", [file], tmp_path / "out.parquet")
        assert np.abs(pq.read_table(tmp_path / "out.parquet")["score"].to_numpy() - expected_N).max() < 1e-6
        assert evaluate_run(tmp_path / "export", files=[file])["samples"] == 70


Tensors = dict[str, tuple[Values, list[int]]]


def tensors_of(v: Values, shape: list[int], count: int = 70) -> Tensors:
    rows = ROWS.slice(0, count)
    return {
        "v": (v, shape),
        "price": (rows["price"].to_numpy().astype(np.float64), [count]),
        "user": (rows["user"].to_numpy().astype(np.int64), [count, 1]),
    }


def test_vectors_are_tensors_over_grpc(server: Server, predictor: shardkeep.Predictor) -> None:
    expected_N, flat = predictor.predict(ROWS), V_NW.reshape(-1)
    for values, shape in (
        (flat, [70, WIDTH]),
        (flat.astype(np.float64), [70, WIDTH]),
        ([str(x).encode() for x in flat.tolist()], [70, WIDTH]),
        ([text.encode() for text in TEXTS], [70]),
        (V_NW[0], [1, WIDTH]),
    ):
        request = pb.ModelInferRequest(model_name="clicks")
        for name, (tensor, its_shape) in tensors_of(values, shape, shape[0]).items():
            request.inputs.add(name=name, datatype=datatype_of(tensor), shape=its_shape)
            request.raw_input_contents.append(pack(tensor))
        assert np.abs(scores_of(server.infer(request)) - expected_N[: shape[0]]).max() < 1e-6


def json_of(tensors: Tensors, v: Any) -> list[dict[str, Any]]:
    told = [
        {"name": name, "datatype": datatype_of(values), "shape": shape, "data": np.asarray(values).tolist()}
        for name, (values, shape) in tensors.items()
    ]
    return [told[0] | {"data": v}, *told[1:]]


def test_vectors_are_tensors_over_http_and_the_metadata_say_their_width(
    server: Server, predictor: shardkeep.Predictor
) -> None:
    gaps: list[list[float | None]] = V_NW.tolist()
    gaps[3][2] = None
    expected_N = predictor.predict(ROWS.set_column(0, "v", pa.array(gaps)))
    tensors = tensors_of(V_NW.reshape(-1), [70, WIDTH])
    for v in (gaps, [x for row in gaps for x in row]):
        status, reply = server.post(json_of(tensors, v))
        assert status == 200 and np.abs(np.array(reply["outputs"][0]["data"]) - expected_N).max() < 1e-6, reply
    _, _, body = server.http("GET", "/v2/models/clicks")
    assert b'{"name":"v","datatype":"FP64","shape":[-1,4]}' in body.replace(b" ", b"")


@every(
    ("shape", "why"),
    [
        ([70, 3], r"input v: shape \[70, 3\]; allowed: \[N\] or \[N, 4\]"),
        ([70, 1], r"input v: shape \[70, 1\]; allowed: \[N\] or \[N, 4\]"),
        ([280], "has 70 rows, and v has 280|has 280 rows"),
        ([70], "column v: holds double; allowed: lists of 4 numbers"),
        ([69, 4], "has 70 rows|has 69 rows"),
    ],
)
def test_tensors_of_another_shape_are_refused(server: Server, shape: list[int], why: str) -> None:
    zeros = np.zeros(int(np.prod(shape)))
    status, reply = server.post(json_of(tensors_of(zeros, shape), zeros.tolist()))
    assert status == 400 and re.search(why, reply["error"]), reply


def test_partitions_are_scored_kept_and_grouped(tmp_path: Path) -> None:
    by = pads.partitioning(pa.schema([("country", pa.string())]), flavor="hive")
    for name, count, seed in (("log", 200, 1), ("new", 80, 2)):
        pads.write_dataset(table := table_of(count, seed), tmp_path / name, format="parquet", partitioning=by)
    run = trained(tmp_path, train=[str(tmp_path / "log")], sparse=["user", "country"])
    keys = list(zip(table["price"].to_pylist(), table["user"].to_pylist(), strict=True))
    assert len(set(keys)) == 80
    told = zip(table["country"].to_pylist(), shardkeep.load(run).predict(table).tolist(), strict=True)
    expected, files = dict(zip(keys, told, strict=True)), input_files([str(tmp_path / "new")])
    done = predict_files(run, files, tmp_path / "out.csv", keep=["price", "user", "country"])
    out = pacsv.read_csv(tmp_path / "out.csv").to_pylist()
    assert done.rows == len(out) == 80 and done.unseen["country"] == [0, 80]
    for row in out:
        country, score = expected[row["price"], row["user"]]
        assert row["country"] == country and abs(row["score"] - score) < 1e-6
    groups = evaluate_run(run, files=files, by="country")["by"]["groups"]
    counts = {name: table["country"].to_pylist().count(name) for name in COUNTRIES}
    assert {group["value"]: group["samples"] for group in groups} == counts
