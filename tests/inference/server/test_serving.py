"""A served model over gRPC and HTTP: equal to Predictor in every form. Values without a row are counted."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkeep
from shardkeep.inference.server.served_model import ServedModel
from shardkeep.proto import inference_pb2 as pb
from tests.support.cases import every
from tests.support.served_clicks import as_bytes, as_json, as_typed, texts
from tests.support.serving import Server, raw_request


@pytest.fixture(scope="module")
def server(predictor: shardkeep.Predictor) -> Iterator[Server]:
    with Server(ServedModel(predictor)) as server:
        yield server


@every("form", [as_bytes, as_typed], ids=["texts", "typed"])
def test_scores_over_http_are_those_of_predict(server: Server, predictor: shardkeep.Predictor, form: Any) -> None:
    columns = texts(40)
    status, reply = server.post(as_json(form(columns)), id="a7")
    assert status == 200, reply
    (output,) = reply["outputs"]
    assert (output["name"], output["datatype"], output["shape"], reply["id"]) == ("score", "FP32", [40], "a7")
    assert np.abs(np.array(output["data"], np.float32) - predictor.predict(columns)).max() < 1e-6
    assert (reply["model_name"], reply["model_version"]) == ("clicks", str(predictor.step))
    status, binary = server.post_binary(form(columns), version=str(predictor.step))
    assert status == 200 and np.abs(binary["score"] - predictor.predict(columns)).max() < 1e-6


def test_the_servers_and_the_models_descriptions(server: Server, predictor: shardkeep.Predictor) -> None:
    model = server.call("ModelMetadata", pb.ModelMetadataRequest(name="clicks"), pb.ModelMetadataResponse)
    kinds = {"price": "FP64", "age": "FP64", "user": "BYTES", "item": "BYTES", "tags": "BYTES"}
    assert [(i.name, i.datatype, list(i.shape)) for i in model.inputs] == [(*kind, [-1]) for kind in kinds.items()]
    assert [(o.name, o.datatype, list(o.shape)) for o in model.outputs] == [("score", "FP32", [-1])]
    assert list(model.versions) == [str(predictor.step)]
    status, _, body = server.http("GET", "/v2/models/clicks")
    assert status == 200 and [each["name"] for each in json.loads(body)["inputs"]] == [i.name for i in model.inputs]
    assert server.call("ServerLive", b"", pb.ServerLiveResponse).live
    assert server.call("ServerReady", b"", pb.ServerReadyResponse).ready
    assert server.call("ModelReady", pb.ModelReadyRequest(name="clicks"), pb.ModelReadyResponse).ready
    assert server.call("ServerMetadata", b"", pb.ServerMetadataResponse).version == shardkeep.__version__
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/clicks/ready", "/v2"):
        assert server.http("GET", path)[0] == 200


def with_strangers(count: int) -> dict[str, list[str]]:
    """Columns in which every other user is a stranger, and two of three tags."""
    users = [f"stranger {n}" if n % 2 else "u1" for n in range(count)]
    return texts(count) | {"user": users, "tags": ["t1|new|new"] * count}


def samples(server: Server, name: str) -> dict[str, float]:
    text = server.http("GET", "/metrics")[2].decode()
    lines = [line for line in text.splitlines() if line.startswith(f"shardkeep_serve_{name}_total{{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


@every("form", [as_bytes, as_typed], ids=["texts", "typed"])
@every("count", [1, 5, 300])
def test_metrics_count_the_values_of_requests_and_not_the_rows_that_fill_up_a_batch(
    exported: Path, count: int, form: Any
) -> None:
    columns, predictor = with_strangers(count), shardkeep.load(exported)
    predictor.predict(columns)
    with Server(ServedModel(shardkeep.load(exported))) as server:
        assert samples(server, "values") == {"user": 0, "item": 0, "tags": 0}
        server.infer(raw_request(form(columns)))
        missing, values = samples(server, "values_without_row"), samples(server, "values")
    assert missing == {"user": count // 2, "item": predictor.unseen["item"][0], "tags": 2 * count}
    assert values == {"user": count, "item": count, "tags": 3 * count}
    assert {name: [missing[name], values[name]] for name in values} == predictor.unseen


def test_counts_outlive_a_replaced_model_and_are_logged(exported: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = ServedModel(shardkeep.load(exported))
    with caplog.at_level(logging.WARNING), Server(served) as server:
        server.infer(raw_request(as_bytes(with_strangers(10))))
        served.replace(shardkeep.load(exported))
        server.infer(raw_request(as_bytes(with_strangers(10))))
        assert samples(server, "values_without_row") == {"user": 10, "item": 0, "tags": 40}
    fields = [record.__dict__["fields"] for record in caplog.records if record.message == "values without a row"]
    told = "tags 66.7 % (40 of 60); user 50 % (10 of 20)"
    assert fields == [{"features": told}]
