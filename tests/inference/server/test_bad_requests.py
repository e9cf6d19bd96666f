"""Bad requests: one line of an error each, and the server answers the next request."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import shardkeep
from shardkeep.inference.protocol.datatypes import pack
from shardkeep.inference.server.served_model import ServedModel
from shardkeep.inference.server.settings import ServerSettings
from shardkeep.proto import inference_pb2 as pb
from tests.support.cases import every
from tests.support.served_clicks import as_json, as_typed, texts
from tests.support.serving import Server, call_on, datatype_of, raw_request, scores_of

ROWS = 5
PATH = "/v2/models/clicks/infer"
LENGTHS = [len([t for t in text.split("|") if t]) for text in texts(ROWS)["tags"]]


@pytest.fixture(scope="module")
def server(predictor: shardkeep.Predictor) -> Iterator[Server]:
    settings = ServerSettings("127.0.0.1:0", "127.0.0.1:0", most_bytes=1 << 20)
    with Server(ServedModel(predictor), settings) as server:
        yield server


@pytest.fixture(autouse=True)
def _answers_afterwards(server: Server) -> Iterator[None]:
    yield
    assert scores_of(server.infer(raw_request(as_typed(texts(ROWS))))).shape == (ROWS,)


def columns(**changes: Any) -> dict[str, Any]:
    """A good request's columns, with some replaced; None = left out."""
    return {name: values for name, values in (as_typed(texts(ROWS)) | changes).items() if values is not None}


CASES: list[tuple[dict[str, Any], str]] = [
    (columns(usr=[b"a"] * ROWS), "input usr: unknown; did you mean user? the model reads"),
    (columns(user=None), "input user: is missing"),
    (columns(user=[b"a"] * 4), "input user: has 4 rows, and price has 5"),
    (columns(**{"tags.lengths": None}), "input tags, or tags.values and tags.lengths: is missing"),
    (columns(tags=[b"a"] * ROWS), "input tags.values: tags needs values and lengths, and not the column too"),
    (columns(**{"age.values": np.ones(5, np.int64)}), "input age.values: age has one value a row"),
    (columns(**{"tags.lengths": np.array([-1, 1, 0, 0, 0], np.int32)}), "input tags.lengths: a length is -1; allowed"),
    (columns(**{"tags.lengths": np.array([2**62] * 5, np.int64)}), "input tags.lengths: a length is 46116860184273"),
    (columns(**{"tags.lengths": np.zeros(5, np.int32)}), f"lengths sum to 0, and there are {sum(LENGTHS)} values"),
    (columns(**{"tags.lengths": np.zeros(5, np.float32)}), "input tags.lengths: lengths are whole numbers"),
    (columns(price=[b"cheap"] * ROWS), "row 1, column price: 'cheap' is not a number"),
    (columns(price=np.array([1, 2, np.inf, 3, 4])), "row 3, column price: is infinite"),
    (columns(item=np.array([1, 2, 0.5, 3, 4])), "column item"),
]


@every(("inputs", "text"), CASES)
def test_wrong_columns_are_named_over_both_protocols(server: Server, inputs: dict[str, Any], text: str) -> None:
    code, details = server.refusal(raw_request(inputs))
    assert code == "INVALID_ARGUMENT" and text in details and "\n" not in details
    if not any(isinstance(v, np.ndarray) and v.dtype.kind == "f" and np.isinf(v).any() for v in inputs.values()):
        status, reply = server.post(as_json(inputs))
        assert status == 400 and text in reply["error"]


def changed(change: Callable[[pb.ModelInferRequest], object]) -> bytes:
    request = raw_request(columns())
    change(request)
    return request.SerializeToString()


def with_raw(index: int, content: bytes) -> bytes:
    return changed(lambda request: request.raw_input_contents.__setitem__(index, content))


def with_shape(*shape: int) -> bytes:
    return changed(lambda request: request.inputs[0].shape.__setitem__(slice(None), shape))


def in_shared_memory(request: pb.ModelInferRequest) -> None:
    request.inputs[0].parameters["shared_memory_region"].string_param = "a"


MESSAGES: list[tuple[bytes, str]] = [
    (b"\xff\xfe garbage", "are no ModelInferRequest"),
    (b"", "NOT_FOUND: model '': unknown; this server has clicks"),
    (changed(lambda r: setattr(r, "model_name", "x" * 9000)), "unknown; this server has clicks"),
    (changed(lambda r: setattr(r, "model_version", "9")), "NOT_FOUND: version '9' of clicks: unknown; it has"),
    (changed(lambda r: r.raw_input_contents.pop()), "6 inputs and 5 raw_input_contents"),
    (changed(lambda r: r.inputs.add().CopyFrom(r.inputs[0])), "7 inputs and 6 raw_input_contents"),
    (with_raw(0, b"\xff\xff\xff\xff"), "input user: has 4 bytes; expected: 5 elements"),
    (with_raw(0, b"\xff\xff\xff\xff" * 5), "its 20 bytes are not 5 elements of BYTES"),
    (with_raw(1, b"123"), "INVALID_ARGUMENT: input item: has 3 bytes; expected: 20 bytes for 5 elements"),
    (with_shape(-5), "input user: shape [-5]; allowed: [N] or [N, 1]"),
    (with_shape(), "input user: shape []; allowed"),
    (with_shape(1, 5), "input user: shape [1, 5]; allowed"),
    (with_shape(2**62), "elements; allowed: 2147483647"),
    (with_shape(2**31 - 1), "expected: 2147483647 elements of BYTES"),
    (changed(lambda r: setattr(r.inputs[0], "datatype", "TEXT")), "input user: datatype 'TEXT'; allowed: BYTES, BOOL"),
    (changed(lambda r: r.outputs.add(name="logit")), "output logit: unknown; the model has score"),
    (changed(in_shared_memory), "INVALID_ARGUMENT: input user: is in shared memory"),
]


@every(("message", "text"), MESSAGES)
def test_a_wrong_message_gets_one_line(server: Server, message: bytes, text: str) -> None:
    code, details = server.refusal(message)
    assert text in f"{code}: {details}" and "\n" not in details and len(details) <= 1000
    assert code == ("NOT_FOUND" if "unknown; " in text and "output" not in text else "INVALID_ARGUMENT")


def of_input(**changes: Any) -> bytes:
    """A body with one input; None = left out."""
    fields = {"name": "user", "datatype": "BYTES", "shape": [1], "data": ["u1"]} | changes
    return json.dumps({"inputs": [{name: value for name, value in fields.items() if value is not None}]}).encode()


def of_binary(size: Any) -> bytes:
    return of_input(data=None, parameters={"binary_data_size": size})


BODIES: list[tuple[bytes, str]] = [
    (b"", "the body is empty"),
    (b"\xff\x00garbage", "the body is no JSON"),
    (b"[" * 100_000, "nested too deep"),
    (b"[]", "the body: a list; allowed: a JSON object"),
    (b"{}", "inputs: is missing; allowed: a JSON list"),
    (b'{"inputs": [7]}', "an input: 7; allowed: a JSON object"),
    (of_input(name=3), "an input has the name 3"),
    (of_input(shape=[1.5]), "input user: shape a list; allowed: [N] or [N, 1]"),
    (of_input(shape=[True]), "input user: shape a list; allowed: [N] or [N, 1]"),
    (of_input(data=[1]), "input user: data of BYTES; allowed: texts"),
    (of_input(data=None), "input user: data is null"),
    (of_input(data=["a", "b"]), "input user: data has 2 elements; expected: 1"),
    (of_input(datatype="INT8", data=[300]), "a number that INT8 does not"),
    (of_input(datatype="INT64", data=[2**70]), "a number that INT64 does not"),
    (of_input(datatype="INT64", data=[1.5]), "1.5 in data of INT64; allowed: int"),
    (of_input(parameters={"binary_data_size": 9}), "has data and binary_data_size"),
    (of_binary(9), "binary_data_size 9; 0 bytes are left"),
    (of_binary(10**30), f"binary_data_size {10**30}; 0 bytes are left"),
    (of_input(data=None, parameters=3), "parameters of an input: 3; allowed"),
    (b'{"inputs": [], "id": 3}', "id: 3; allowed: a text"),
    (b'{"inputs": []}', "input price: is missing"),
]


@every(("body", "text"), BODIES)
def test_a_wrong_body_gets_one_line(server: Server, body: bytes, text: str) -> None:
    status, _, content = server.http("POST", PATH, body)
    error = json.loads(content)["error"]
    assert status == 400 and text in error and "\n" not in error


@every("length", ["-1", "9999999", "abc", "1e3", "9" * 4000, ""])
def test_a_wrong_length_of_the_json_gets_one_line(server: Server, length: str) -> None:
    headers = {"Inference-Header-Content-Length": length}
    status, _, content = server.http("POST", PATH, b"{}", headers)
    assert status == 400 and "Inference-Header-Content-Length" in json.loads(content)["error"]


def test_too_large_messages_are_refused_and_not_kept(server: Server) -> None:
    assert server.refusal(bytes(3 << 20))[0] == "RESOURCE_EXHAUSTED"
    status, _, content = server.http("POST", PATH, b" " * (2 << 20))
    assert status == 413 and "--max-message-mb" in json.loads(content)["error"]
    headers = {"Content-Encoding": "gzip"}
    status, _, content = server.http("POST", PATH, b"{}", headers)
    assert status == 400 and "Content-Encoding" in json.loads(content)["error"]


def test_paths_that_are_not_there(server: Server) -> None:
    assert server.http("GET", "/v2/models/other")[0] == 404
    assert server.http("GET", "/v2/models/clicks/versions/1/ready")[0] == 404
    assert server.http("GET", "/nothing")[0] == 404
    assert server.http("PUT", "/v2/models/clicks/infer", b"")[0] == 405
    assert server.refusal(pb.ModelMetadataRequest(name="other"), "ModelMetadata")[0] == "NOT_FOUND"


def test_calls_whose_message_never_comes_hold_up_no_other_call(server: Server) -> None:
    ended = threading.Event()

    def nothing() -> Iterator[bytes]:
        ended.wait(60)
        yield from ()

    with grpc.insecure_channel(server.addresses.grpc) as channel:
        begin = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        calls = [begin.future(nothing()) for _ in range(100)]
        try:
            for _ in range(3):
                assert scores_of(server.infer(raw_request(columns()))).shape == (ROWS,)
        finally:
            for call in calls:
                call.cancel()
            ended.set()


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.chaos)])
def test_damaged_messages_and_bodies_never_end_the_server(server: Server, count: int) -> None:
    random, answers = np.random.default_rng(5), Counter[Any]()
    inputs, behind = [], b""
    for name, values in columns().items():
        raw = pack(values)
        described = {"name": name, "datatype": datatype_of(values), "shape": [len(values)]}
        inputs.append(described | {"parameters": {"binary_data_size": len(raw)}})
        behind += raw
    head = json.dumps({"inputs": inputs}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    message = raw_request(columns()).SerializeToString()
    with grpc.insecure_channel(server.addresses.grpc) as channel:
        for _ in range(count):
            answers[server.http("POST", PATH, damaged(head + behind, random), headers)[0]] += 1
            try:
                call_on(channel, "ModelInfer", damaged(message, random), pb.ModelInferResponse)
            except grpc.RpcError as error:
                answers[error.code().name] += 1  # type: ignore[attr-defined]
    assert {400, "INVALID_ARGUMENT"} <= set(answers) <= {200, 400, "INVALID_ARGUMENT", "NOT_FOUND"}


def damaged(message: bytes, random: np.random.Generator) -> bytes:
    """The message with a few bytes changed, cut out or doubled."""
    found = bytearray(message)
    for _ in range(int(random.integers(1, 4))):
        at = int(random.integers(0, len(found)))
        kind = int(random.integers(0, 4))
        if kind == 0:
            found[at] = int(random.integers(0, 256))
        elif kind == 1:
            del found[at : at + int(random.integers(1, 9))]
        elif kind == 2:
            found[at:at] = found[at : at + 8]
        else:
            found = found[: at + 1]
    return bytes(found)
