"""A server counts the values of its requests whose id has no row, and not the rows that fill up a batch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import shardkeep
from shardkeep.inference.server.served_model import ServedModel
from tests.support.cases import every
from tests.support.served_clicks import as_bytes, as_typed, texts, trained
from tests.support.serving import Server, raw_request


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("unseen"))


def columns_of(count: int) -> dict[str, list[str]]:
    """Every other user is a stranger, and so is one tag of each row."""
    columns = texts(count)
    columns["user"] = [f"stranger {n}" if n % 2 else "u1" for n in range(count)]
    columns["tags"] = ["t1|new|new"] * count
    return columns


def samples(server: Server, name: str) -> dict[str, float]:
    """The values of a counter, by feature."""
    text = server.http("GET", "/metrics")[2].decode()
    lines = [line for line in text.splitlines() if line.startswith(f"shardkeep_serve_{name}_total{{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


@every("form", [as_bytes, as_typed], ids=["texts", "typed"])
@every("count", [1, 5, 300, 1500])
def test_metrics_count_the_values_of_requests_alone(folder: Path, count: int, form: Any) -> None:
    columns, predictor = columns_of(count), shardkeep.load(folder)
    predictor.predict(columns)
    with Server(ServedModel(shardkeep.load(folder))) as server:
        assert samples(server, "values") == {"user": 0, "item": 0, "tags": 0}
        server.infer(raw_request(form(columns)))
        missing, values = samples(server, "values_without_row"), samples(server, "values")
    assert missing == {"user": count // 2, "item": predictor.unseen["item"][0], "tags": 2 * count}
    assert values == {"user": count, "item": count, "tags": 3 * count}
    assert {name: [missing[name], values[name]] for name in values} == predictor.unseen


def test_counts_outlive_a_replaced_model_and_are_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = ServedModel(shardkeep.load(folder))
    with caplog.at_level(logging.WARNING), Server(served) as server:
        server.infer(raw_request(as_bytes(columns_of(10))))
        served.replace(shardkeep.load(folder))
        server.infer(raw_request(as_bytes(columns_of(10))))
        assert samples(server, "values_without_row") == {"user": 10, "item": 0, "tags": 40}
    fields = [record.__dict__["fields"] for record in caplog.records if record.message == "values without a row"]
    assert fields == [
        {"features": "tags: 40 of 60 values (66.7 %) have no row; user: 10 of 20 values (50 %) have no row"}
    ]
