"""A served model over gRPC and HTTP: equal to Predictor, in every form of a request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shardkeep
from shardkeep.inference.protocol.datatypes import pack
from shardkeep.inference.server.served_model import ServedModel
from shardkeep.proto import inference_pb2 as pb
from tests.support.cases import every
from tests.support.served_clicks import as_bytes, as_json, as_typed, texts, trained
from tests.support.serving import Server, datatype_of, raw_request, scores_of


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> shardkeep.Predictor:
    return shardkeep.load(trained(tmp_path_factory.mktemp("serving")))


@pytest.fixture(scope="module")
def server(predictor: shardkeep.Predictor) -> Iterator[Server]:
    with Server(ServedModel(predictor)) as server:
        yield server


@every("count", [1, 7, 100, 300, 1500])
@every("form", [as_bytes, as_typed], ids=["texts", "typed"])
def test_scores_over_grpc_are_those_of_predict(
    server: Server, predictor: shardkeep.Predictor, count: int, form: Any
) -> None:
    columns = texts(count)
    scores_N = scores_of(server.infer(raw_request(form(columns))))
    expected_N = predictor.predict(columns)
    assert scores_N.shape == expected_N.shape and np.abs(scores_N - expected_N).max() < 1e-6


@pytest.mark.parametrize("form", [as_bytes, as_typed], ids=["texts", "typed"])
def test_scores_over_http_are_those_of_predict(server: Server, predictor: shardkeep.Predictor, form: Any) -> None:
    columns = texts(40)
    status, reply = server.post(as_json(form(columns)), id="a7")
    assert status == 200, reply
    (output,) = reply["outputs"]
    assert (output["name"], output["datatype"], output["shape"], reply["id"]) == ("score", "FP32", [40], "a7")
    assert np.abs(np.array(output["data"], np.float32) - predictor.predict(columns)).max() < 1e-6
    assert (reply["model_name"], reply["model_version"]) == ("clicks", str(predictor.step))


def test_binary_tensors_over_http_are_answered_in_binary(server: Server, predictor: shardkeep.Predictor) -> None:
    columns = texts(25)
    inputs, behind = [], []
    for name, values in as_typed(columns).items():
        behind.append(pack(values))
        parameters = {"binary_data_size": len(behind[-1])}
        told = {"name": name, "datatype": datatype_of(values), "shape": [len(values), 1], "parameters": parameters}
        inputs.append(told)
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    status, headers, body = server.http(
        "POST",
        f"/v2/models/clicks/versions/{predictor.step}/infer",
        head + b"".join(behind),
        {"Inference-Header-Content-Length": str(len(head))},
    )
    assert status == 200, body
    length = int({name.lower(): value for name, value in headers.items()}["inference-header-content-length"])
    (output,) = json.loads(body[:length])["outputs"]
    assert output["parameters"] == {"binary_data_size": 100} and len(body) == length + 100
    assert np.abs(np.frombuffer(body[length:], np.float32) - predictor.predict(columns)).max() < 1e-6


def test_typed_contents_are_answered_by_typed_contents(server: Server, predictor: shardkeep.Predictor) -> None:
    columns = texts(9)
    request = pb.ModelInferRequest(model_name="clicks", id="7")
    for name, values in as_bytes(columns).items():
        request.inputs.add(
            name=name, datatype="BYTES", shape=[9], contents=pb.InferTensorContents(bytes_contents=list(values))
        )
    reply = server.infer(request)
    assert not reply.raw_output_contents and reply.id == "7"
    found_N = np.array(reply.outputs[0].contents.fp32_contents, np.float32)
    assert np.abs(found_N - predictor.predict(columns)).max() < 1e-6


def test_the_servers_and_the_models_descriptions(server: Server, predictor: shardkeep.Predictor) -> None:
    model = server.call("ModelMetadata", pb.ModelMetadataRequest(name="clicks"), pb.ModelMetadataResponse)
    assert [(i.name, i.datatype, list(i.shape)) for i in model.inputs] == [
        ("price", "FP64", [-1]),
        ("age", "FP64", [-1]),
        ("user", "BYTES", [-1]),
        ("item", "BYTES", [-1]),
        ("tags", "BYTES", [-1]),
    ]
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
