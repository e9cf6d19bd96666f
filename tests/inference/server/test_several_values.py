"""Served models with several values a row and weights of values: in every form and protocol the scores are those of
Predictor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

import shardkeep
from shardkeep.inference.export.writing import export_run
from shardkeep.inference.predictor import Predictor
from shardkeep.inference.protocol.datatypes import Values
from shardkeep.inference.server.served_model import ServedModel
from tests.support.cases import every
from tests.support.click_files import click_job
from tests.support.served_clicks import as_json
from tests.support.serving import Server, datatype_of, raw_request, scores_of

COLUMNS = ("price", "user", "words", "topics", "seen", "seen_weight")


def rows_of(count: int, seed: int) -> dict[str, list[Any]]:
    """Lists of texts, lists of whole numbers, and lists with a weight each; some are empty."""
    random = np.random.default_rng(seed)
    users = random.integers(0, 40, count)
    seen = [[f"s{n}" for n in random.integers(0, 20, random.integers(0, 5))] for _ in range(count)]
    return {
        "clicked": (users % 3 == 0).astype(int).tolist(),
        "price": np.round(random.lognormal(2, 1, count), 2).tolist(),
        "user": users.tolist(),
        "words": [[f"w{n}" for n in random.integers(0, 9, random.integers(0, 4))] for _ in range(count)],
        "topics": [random.integers(0, 30, random.integers(0, 4)).tolist() for _ in range(count)],
        "seen": seen,
        "seen_weight": [np.round(random.normal(0, 1, len(ids)), 3).tolist() for ids in seen],
    }


def joined(lists: list[list[Any]]) -> list[str]:
    return ["|".join(map(str, entries)) for entries in lists]


@dataclass(frozen=True)
class Case:
    """A model, rows as `Predictor.predict` takes them, and the forms in which clients send them."""

    predictor: Predictor
    rows: Mapping[str, Any]
    forms: Mapping[str, dict[str, Values]]


def sparse(separator: str | None) -> list[Any]:
    cut = {} if separator is None else {"separator": separator}
    return [
        "user",
        {"column": "words", "pooling": "mean", **cut},
        {"column": "topics", "pooling": "max", **cut},
        {"column": "seen", "pooling": "weighted", "weights": "seen_weight", **cut},
    ]


def run_of(folder: Path, separator: str | None, *, weighted: bool) -> Path:
    rows = rows_of(500, 5)
    if separator is None:
        pq.write_table(pa.table(rows), folder / "train.parquet")
    else:
        lists = ("words", "topics", "seen", "seen_weight")
        flat = {name: joined(values) if name in lists else values for name, values in rows.items()}
        lines = [",".join(flat), *(",".join(map(str, row)) for row in zip(*flat.values(), strict=True))]
        (folder / "train.csv").write_text("\n".join(lines) + "\n")
    job = click_job(folder / ("train.parquet" if separator is None else "train.csv"))
    job["data"] |= {"dense": ["price"], "sparse": sparse(separator)[: 4 if weighted else 3]}
    job["tables"]["default"]["optimizer"] = {"name": "adagrad", "lr": 0.3}
    if separator is None:
        job["data"]["source"] = "parquet"
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=folder / "run", quiet=True)
    return folder / "run"


def lists_of(rows: Mapping[str, Any], name: str, *, texts: bool, weights: bool = False) -> dict[str, Values]:
    """A column as NAME.values and NAME.lengths."""
    flat = [value for values in rows[name] for value in values]
    numbers = np.array(flat, np.float32 if weights else np.int64) if not texts else None
    values: Values = [str(value).encode() for value in flat] if numbers is None else numbers
    return {f"{name}.values": values, f"{name}.lengths": np.array([len(v) for v in rows[name]], np.int32)}


def as_text(rows: Mapping[str, Any], *names: str) -> dict[str, Values]:
    """Columns in the form of the CSV."""
    return {
        name: [text.encode() for text in joined(rows[name])] if isinstance(rows[name][0], list) else encoded(rows[name])
        for name in names
    }


def encoded(values: list[Any]) -> list[bytes]:
    return [str(value).encode() for value in values]


def typed(rows: Mapping[str, Any]) -> dict[str, Values]:
    return {"price": np.array(rows["price"], np.float64), "user": np.array(rows["user"], np.int64)}


def parquet_case(run: Path, count: int) -> Case:
    rows = {name: values for name, values in rows_of(count, 9).items() if name != "clicked"}
    usual = (
        typed(rows) | lists_of(rows, "words", texts=True) | lists_of(rows, "topics", texts=False)
        | lists_of(rows, "seen", texts=True) | lists_of(rows, "seen_weight", texts=False, weights=True)
    )  # fmt: skip
    texts = usual | lists_of(rows, "topics", texts=True) | lists_of(rows, "seen_weight", texts=True)
    narrow = usual | {"topics.values": np.array(usual["topics.values"], np.int16)}
    narrow |= {"seen_weight.values": np.array(usual["seen_weight.values"], np.float64)}
    return Case(shardkeep.load(run), rows, {"values": usual, "texts in values": texts, "other numbers": narrow})


def csv_case(run: Path, count: int) -> Case:
    rows = {name: values for name, values in rows_of(count, 9).items() if name != "clicked"}
    given = {name: joined(values) if isinstance(values[0], list) else values for name, values in rows.items()}
    text = as_text(rows, *COLUMNS)
    ids = ("words", "topics", "seen")
    values = typed(rows) | {k: v for name in ids for k, v in lists_of(rows, name, texts=True).items()}
    weights, weights_text = lists_of(rows, "seen_weight", texts=False, weights=True), as_text(rows, "seen_weight")
    without_seen = {name: column for name, column in text.items() if not name.startswith("seen")}
    seen = {name: column for name, column in values.items() if name.startswith("seen")}
    forms = {
        "text": text,
        "values": values | weights,
        "weights as text": values | weights_text,
        "weights as values": without_seen | as_text(rows, "seen") | weights,
        "only the weighted column as values": without_seen | seen | weights,
    }
    return Case(shardkeep.load(run), given, forms)


FORMS = ("parquet", "csv")
PLAIN = ("parquet-plain", "csv-plain")  # without a column of weights


@pytest.fixture(scope="module", params=FORMS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    separator = None if request.param.startswith("parquet") else "|"
    return run_of(tmp_path_factory.mktemp(request.param), separator, weighted="plain" not in request.param)


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Server]:
    export_run(run, run.parent / "out")
    with Server(ServedModel(shardkeep.load(run.parent / "out"))) as server:
        yield server


def case_of(run: Path, count: int) -> Case:
    case = parquet_case(run, count) if run.parent.name.startswith("parquet") else csv_case(run, count)
    if is_weighted(run):
        return case
    forms = {form: without_weighted(columns) for form, columns in case.forms.items() if "weight" not in form}
    return Case(case.predictor, case.rows, forms)


def is_weighted(run: Path) -> bool:
    return "plain" not in run.parent.name


def without_weighted(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values for name, values in columns.items() if not name.startswith("seen")}


@pytest.mark.parametrize("run", [*FORMS, *PLAIN], indirect=True, scope="module")
@every("count", [1, 30])
def test_every_form_over_every_protocol_has_the_scores_of_predict(server: Server, run: Path, count: int) -> None:
    case = case_of(run, count)
    expected_N = case.predictor.predict(case.rows)
    assert count == 1 or expected_N.std() > 0.02
    for form, columns in case.forms.items():
        found = {"grpc": scores_of(server.infer(raw_request(columns)))}
        status, reply = server.post(as_json(columns))
        assert status == 200, (form, reply)
        found["json"] = np.array(reply["outputs"][0]["data"], np.float32)
        status, values = server.post_binary(columns)
        assert status == 200, (form, values)
        found["binary"] = values["score"]
        for protocol, scores_N in found.items():
            assert scores_N.shape == expected_N.shape, (form, protocol)
            assert np.abs(scores_N - expected_N).max() < 1e-6, (form, protocol)


def test_a_missing_value_in_a_row_counts_as_in_predict(server: Server, run: Path) -> None:
    case = case_of(run, 4)
    parquet = run.parent.name.startswith("parquet")
    words = [["w1", "", "w2"], ["NA", "w3"], ["w4"], []]
    seen, weights = [["s1", "", "s2"], ["s3", "NA"], ["s4"], []], [[0.5, 7, -1], [2, 7], [3], []]
    topics = [[1, None, 2], [None], [3], []] if parquet else [[1, "", 2], [], [3], []]
    changed = {"words": words, "topics": topics, "seen": seen, "seen_weight": weights}
    given = {name: values if parquet else joined(values) for name, values in changed.items()}
    expected_N = case.predictor.predict({**case.rows, **given})
    assert np.abs(expected_N - case.predictor.predict(case.rows)).max() > 1e-3
    for form, columns in case.forms.items():
        told = {k: v for k, v in columns.items() if k.split(".")[0] not in changed}
        told |= lists_of(changed, "words", texts=True) | lists_of(changed, "seen", texts=True)
        told |= lists_of(changed, "seen_weight", texts=False, weights=True)
        told |= lists_of({"topics": [["" if t is None else t for t in each] for each in topics]}, "topics", texts=True)
        assert np.abs(scores_of(server.infer(raw_request(told))) - expected_N).max() < 1e-6, form
        inputs = as_json(told)
        for each in inputs:
            if each["name"] in ("words.values", "seen.values"):
                each["data"] = [None if text in ("", "NA") else text for text in each["data"]]
        status, reply = server.post(inputs)
        assert status == 200, reply
        assert np.abs(np.array(reply["outputs"][0]["data"], np.float32) - expected_N).max() < 1e-6, form


def test_weights_change_the_score(server: Server, run: Path) -> None:
    case = case_of(run, 60)
    columns = dict(next(iter(case.forms.values())))
    before_N = scores_of(server.infer(raw_request(columns)))
    name = "seen_weight.values" if "seen_weight.values" in columns else "seen_weight"
    weights: Any = columns[name]
    columns[name] = (
        [b"|".join(b"9" for _ in text.split(b"|")) if text else b"" for text in weights]
        if isinstance(weights, list) else np.full(len(weights), 9.0, weights.dtype)
    )  # fmt: skip
    assert np.abs(scores_of(server.infer(raw_request(columns))) - before_N).max() > 1e-3


def test_the_metadata_name_the_tensors_that_a_client_sends(server: Server, run: Path) -> None:
    case = case_of(run, 3)
    status, _, body = server.http("GET", "/v2/models/clicks")
    assert status == 200
    found = {each["name"]: each["datatype"] for each in json.loads(body)["inputs"]}
    if run.parent.name.startswith("parquet"):
        expected = {name: datatype_of(values) for name, values in case.forms["values"].items()}
    else:
        expected = dict.fromkeys(case.forms["text"], "BYTES") | {"price": "FP64"}
    assert found == expected


def refused(server: Server, columns: dict[str, Values]) -> str:
    code, details = server.refusal(raw_request(columns))
    assert code == "INVALID_ARGUMENT"
    status, reply = server.post_binary(columns)
    assert status == 400 and reply["error"] == details and "\n" not in details
    return details


def test_weights_that_do_not_fit_their_values_are_refused(server: Server, run: Path) -> None:
    case = case_of(run, 4)
    good = typed(case.rows) | next(f for name, f in case.forms.items() if name in ("values", "text in values"))
    ids: dict[str, Values] = {"seen.values": [b"s1", b"s2"], "seen.lengths": np.array([1, 0, 1, 0], np.int32)}
    good |= ids

    def weights(values: Values, lengths: list[int]) -> dict[str, Values]:
        return good | {"seen_weight.values": values, "seen_weight.lengths": np.array(lengths, np.int32)}

    two = np.array([0.5, 1.0], np.float32)
    assert scores_of(server.infer(raw_request(weights(two, [1, 0, 1, 0])))).shape == (4,)
    moved = refused(server, weights(two, [1, 1, 0, 0]))
    assert moved == "row 2, column seen_weight: holds 1 weights for 0 ids of seen"
    assert "row 1, column seen_weight: holds 0 weights for 1 ids" in refused(server, weights(two[:0], [0, 0, 0, 0]))
    nan, inf = np.array([0.5, np.nan], np.float32), np.array([np.inf, 1], np.float32)
    assert refused(server, weights(nan, [1, 0, 1, 0])) == "row 3, column seen_weight: a weight is missing"
    assert refused(server, weights(inf, [1, 0, 1, 0])).startswith("row 1, column seen_weight: is infinite")
    assert "'heavy' is not a number" in refused(server, weights([b"1", b"heavy"], [1, 0, 1, 0]))
    without = {name: column for name, column in weights(two, [1, 0, 1, 0]).items() if "weight" not in name}
    assert refused(server, without).startswith(
        "input seen_weight, or seen_weight.values and seen_weight.lengths: is missing"
    )
