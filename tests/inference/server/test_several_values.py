"""Served models with several values a row and weights of values: in every form and protocol the scores are those of
Predictor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

import shardkeep
from shardkeep.inference.export.writing import export_run
from shardkeep.inference.protocol.datatypes import Values
from shardkeep.inference.server.served_model import ServedModel
from tests.support.cases import every
from tests.support.click_files import click_job
from tests.support.served_clicks import as_json
from tests.support.serving import Server, datatype_of, raw_request, scores_of

Rows = dict[str, list[Any]]
LISTS = ("words", "topics", "seen", "seen_weight")
TEXT = dict.fromkeys((*LISTS, "price", "user"), "text")
VALUES = {"words": "texts", "topics": "int64", "seen": "texts", "seen_weight": "float32"}
FORMS: dict[str, list[dict[str, str]]] = {
    "parquet": [
        VALUES,
        VALUES | {"topics": "texts", "seen_weight": "texts"},
        VALUES | {"topics": "int16", "seen_weight": "float64"},
    ],
    "csv": [
        TEXT,
        VALUES | {"topics": "texts"},
        VALUES | {"topics": "texts", "seen_weight": "text"},
        TEXT | {"seen_weight": "float32"},
        TEXT | {"seen": "texts", "seen_weight": "float32"},
    ],
}
"""How a request of a model of each source may hold its columns: as a text a row, or values of a type and lengths."""


def rows_of(count: int, seed: int = 9) -> Rows:
    """Lists of texts, lists of whole numbers, and lists with a weight each; some are empty."""
    random = np.random.default_rng(seed)
    seen = [[f"s{n}" for n in random.integers(0, 20, random.integers(0, 5))] for _ in range(count)]
    return {
        "price": np.round(random.lognormal(2, 1, count), 2).tolist(),
        "user": random.integers(0, 40, count).tolist(),
        "words": [[f"w{n}" for n in random.integers(0, 9, random.integers(0, 4))] for _ in range(count)],
        "topics": [random.integers(0, 30, random.integers(0, 4)).tolist() for _ in range(count)],
        "seen": seen,
        "seen_weight": [np.round(random.normal(0, 1, len(ids)), 3).tolist() for ids in seen],
    }


def joined(rows: Rows) -> Rows:
    """As a CSV holds them."""
    return rows | {name: ["|".join(map(str, entries)) for entries in rows[name]] for name in LISTS}


def inputs_of(rows: Rows, form: Mapping[str, str]) -> dict[str, Values]:
    """What a request has of rows."""
    found: dict[str, Values] = {}
    for name, values in rows.items():
        way = form.get(name, {"price": "float64", "user": "int64"}.get(name, ""))
        flat = [value for entries in values for value in entries] if name in LISTS else values
        if way == "text":
            found[name] = [str(value).encode() for value in joined(rows)[name]]
        else:
            one_each = name if name not in LISTS else f"{name}.values"
            found[one_each] = [str(value).encode() for value in flat] if way == "texts" else np.array(flat, way)
            if name in LISTS:
                found[f"{name}.lengths"] = np.array([len(entries) for entries in values], np.int32)
    return found


@pytest.fixture(scope="module", params=FORMS)
def source(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def predictor(source: str, tmp_path_factory: pytest.TempPathFactory) -> shardkeep.Predictor:
    folder, rows = tmp_path_factory.mktemp(source), rows_of(200, 5)
    rows["clicked"] = [int(user % 3 == 0) for user in rows["user"]]
    if source == "parquet":
        pq.write_table(pa.table(rows), folder / "train.parquet")
    else:
        flat = joined(rows)
        lines = [",".join(flat), *(",".join(map(str, row)) for row in zip(*flat.values(), strict=True))]
        (folder / "train.csv").write_text("\n".join(lines) + "\n")
    job, cut = click_job(folder / f"train.{source}"), {"separator": "|"} if source == "csv" else {}
    weighted = {"column": "seen", "pooling": "weighted", "weights": "seen_weight"} | cut
    pooled = [{"column": name, "pooling": how} | cut for name, how in (("words", "mean"), ("topics", "max"))]
    job["data"] |= {"source": source, "dense": ["price"], "sparse": ["user", *pooled, weighted]}
    job["tables"]["default"]["optimizer"] = {"name": "adagrad", "lr": 0.6}
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=folder / "run", quiet=True)
    export_run(folder / "run", folder / "out")
    return shardkeep.load(folder / "out")


@pytest.fixture(scope="module")
def server(predictor: shardkeep.Predictor) -> Iterator[Server]:
    with Server(ServedModel(predictor)) as server:
        yield server


def expected_of(predictor: shardkeep.Predictor, source: str, rows: Rows) -> np.ndarray:
    return predictor.predict(rows if source == "parquet" else joined(rows))


@every("count", [1, 30])
def test_every_form_over_every_protocol_has_the_scores_of_predict(
    server: Server, predictor: shardkeep.Predictor, source: str, count: int
) -> None:
    rows = rows_of(count)
    heavy = rows | {"seen_weight": [[9] * len(ids) for ids in rows["seen"]]}
    expected_N, heavy_N = (expected_of(predictor, source, each) for each in (rows, heavy))
    assert count == 1 or min(expected_N.std(), np.abs(heavy_N - expected_N).max()) > 0.01
    for form in FORMS[source]:
        inputs = inputs_of(rows, form)
        found = {"grpc": scores_of(server.infer(raw_request(inputs)))}
        status, reply = server.post(as_json(inputs))
        assert status == 200, (form, reply)
        found["json"] = np.array(reply["outputs"][0]["data"], np.float32)
        status, values = server.post_binary(inputs)
        assert status == 200, (form, values)
        found["binary"] = values["score"]
        for protocol, scores_N in found.items():
            assert scores_N.shape == expected_N.shape, (form, protocol)
            assert np.abs(scores_N - expected_N).max() < 1e-6, (form, protocol)
        assert np.abs(scores_of(server.infer(raw_request(inputs_of(heavy, form)))) - heavy_N).max() < 1e-6, form


def test_a_missing_value_in_a_row_counts_as_in_predict(
    server: Server, predictor: shardkeep.Predictor, source: str
) -> None:
    rows = rows_of(4) | {
        "words": [["w1", "", "w2"], ["NA", "w3"], ["w4"], []],
        "topics": [[1, "", 2], [""], [3], []],
        "seen": [["s1", "", "s2"], ["s3", "NA"], ["s4"], []],
        "seen_weight": [[0.5, 7, -1], [2, 7], [3], []],
    }
    topics = [[1, None, 2], [None], [3], []] if source == "parquet" else [[1, "", 2], [], [3], []]
    expected_N = expected_of(predictor, source, rows | {"topics": topics})
    assert np.abs(expected_N - expected_of(predictor, source, rows_of(4))).max() > 1e-3
    told = inputs_of(rows, VALUES | {"topics": "texts"})
    assert np.abs(scores_of(server.infer(raw_request(told))) - expected_N).max() < 1e-6
    inputs = as_json(told)
    for each in inputs:
        if each["name"] in ("words.values", "seen.values"):
            each["data"] = [None if text in ("", "NA") else text for text in each["data"]]
    status, reply = server.post(inputs)
    assert status == 200, reply
    assert np.abs(np.array(reply["outputs"][0]["data"], np.float32) - expected_N).max() < 1e-6


def test_the_metadata_name_the_tensors_that_a_client_sends(server: Server, source: str) -> None:
    status, _, body = server.http("GET", "/v2/models/clicks")
    found = {each["name"]: each["datatype"] for each in json.loads(body)["inputs"]}
    expected = {name: datatype_of(values) for name, values in inputs_of(rows_of(3), FORMS[source][0]).items()}
    assert status == 200 and found == expected | {"price": "FP64"}


def refused(server: Server, inputs: dict[str, Values]) -> str:
    code, details = server.refusal(raw_request(inputs))
    assert code == "INVALID_ARGUMENT"
    status, reply = server.post_binary(inputs)
    assert status == 400 and reply["error"] == details and "\n" not in details
    return details


def test_weights_that_do_not_fit_their_values_are_refused(server: Server, source: str) -> None:
    good = inputs_of(rows_of(4), FORMS[source][0] | {"seen": "texts", "seen_weight": "float32"})
    good |= {"seen.values": [b"s1", b"s2"], "seen.lengths": np.array([1, 0, 1, 0], np.int32)}

    def weights(values: Values, lengths: list[int]) -> dict[str, Values]:
        return good | {"seen_weight.values": values, "seen_weight.lengths": np.array(lengths, np.int32)}

    two, fit = np.array([0.5, 1.0], np.float32), [1, 0, 1, 0]
    assert scores_of(server.infer(raw_request(weights(two, fit)))).shape == (4,)
    for inputs, why in (
        (weights(two, [1, 1, 0, 0]), "row 2, column seen_weight: holds 1 weights for 0 ids of seen"),
        (weights(two[:0], [0, 0, 0, 0]), "row 1, column seen_weight: holds 0 weights for 1 ids"),
        (weights(np.array([0.5, np.nan], np.float32), fit), "row 3, column seen_weight: a weight is missing"),
        (weights(np.array([np.inf, 1], np.float32), fit), "row 1, column seen_weight: is infinite"),
        (weights([b"1", b"heavy"], fit), "'heavy' is not a number"),
        (
            {name: column for name, column in good.items() if "weight" not in name},
            "input seen_weight, or seen_weight.values and seen_weight.lengths: is missing",
        ),
    ):
        assert why in refused(server, inputs)
