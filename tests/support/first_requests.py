"""Every form of request to a server, right or wrong; and what a fresh process does in the first of each:
`python -m tests.support.first_requests FOLDER...` prints it as JSON, by the folder of a model."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np

from shardkeep.inference.protocol.datatypes import NUMBERS, Values
from shardkeep.proto import inference_pb2 as pb
from tests.support.logical_forms import http_binary
from tests.support.serving import Server, raw_request

Inputs = list[dict[str, Any]]
TEXTS = ("1", "0.5", "", "?", "true", "1322.0", "2024-05-01 10:00", "$1,234.50", "a|b", "['a', 'b']", "{a,NULL}", "é")
GETS = "/v2 /v2/health/live /v2/health/ready /v2/models/m /v2/models/m/ready /metrics /v2/models/m/infer /v2/models/x /"
BODIES = (b"", b"{}", b"[1]", b"nonsense", b"\xff\x00", "{}".encode("utf-16"), b"[" * 9999, b'{"inputs": 3}')
METHODS = ("ModelMetadata", "ModelReady", "ServerReady", "ServerLive", "ServerMetadata", "ModelInfer", "None")


def usual(server: Server) -> Inputs:
    """Two rows of a usual request, by the model's metadata."""
    found = []
    for each in json.loads(server.http("GET", "/v2/models/m")[2])["inputs"]:
        shape = [2, *each["shape"][1:]]
        value = {"BYTES": "1700000000", "FP64": 1.7e9}.get(each["datatype"], 1)  # a time, where it is one
        found.append(each | {"shape": shape, "data": [value] * int(np.prod(shape))})
    return found


def changed(inputs: Inputs) -> Iterator[Inputs]:
    """The inputs with one of them in each form that its values may have, and in forms that it may not have."""
    for at, one in enumerate(inputs):
        size = len(one["data"])
        forms: Inputs = [{"datatype": "BYTES", "data": [text] * size} for text in (*TEXTS, None)]
        forms += [{"datatype": kind, "data": [dtype.type(1).item()] * size} for kind, dtype in NUMBERS.items()]
        forms += [{"datatype": "FP64", "data": [value] * size} for value in (None, 1.5, 1e400)]
        forms += [{"shape": [1, 2, 3]}, {"shape": [0], "data": []}, {"datatype": "FP128"}, {"name": f"{one['name']}s"}]
        for form in forms:
            yield [*inputs[:at], one | form, *inputs[at + 1 :]]
        yield inputs[:at] + inputs[at + 1 :]
    yield [*inputs, inputs[0] | {"name": "device"}]
    yield [*inputs, inputs[0] | {"name": "device", "data": ["a"] * 1_200_000}]
    yield [one | {"data": ["a|" * 4000] * 2} if one["datatype"] == "BYTES" else one for one in inputs]
    for rows in (0, 1, 300):
        yield [one | {"shape": [rows, *one["shape"][1:]], "data": (one["data"] * rows)[::2]} for one in inputs]


def values_of(inputs: Inputs) -> dict[str, Values]:
    """What a binary request has of inputs whose values fit their datatype."""
    texts, numbers = ([one for one in inputs if (one["datatype"] == "BYTES") == are] for are in (True, False))
    columns: dict[str, Values] = {one["name"]: [text.encode() for text in one["data"]] for one in texts}
    return columns | {one["name"]: np.array(one["data"], NUMBERS[one["datatype"]]) for one in numbers}


def statuses(server: Server) -> set[int]:
    """Sends all requests to the model m. The HTTP statuses of the replies over HTTP."""
    inputs, path = usual(server), "/v2/models/m/infer"
    found = {server.post(each)[0] for each in (inputs, *changed(inputs))}
    for more in ({"outputs": [{"name": "none"}]}, {"parameters": {"top": 2}}, {"parameters": {"top": 0}}, {"id": "7"}):
        found.add(server.post(inputs, **more)[0])
    found |= {server.http("POST", path, body)[0] for body in BODIES}
    for headers in ({"Inference-Header-Content-Length": "x"}, {"Content-Encoding": "gzip"}):
        found.add(server.http("POST", path, b"{}", headers)[0])
    found |= {server.http("GET", address)[0] for address in (*GETS.split(), "/metrics")}
    body, length = http_binary(values_of(inputs))
    found.add(server.http("POST", path, body, {"Inference-Header-Content-Length": str(length)})[0])
    messages = [("ModelInfer", raw_request(values_of(inputs), "m"))]
    messages += [(method, message) for method in METHODS for message in (pb.ModelReadyRequest(name="m"), b"", b"\xff")]
    for method, message in messages:
        with contextlib.suppress(grpc.RpcError):
            server.call(method, message, pb.ModelReadyResponse)
    return found


def main() -> None:
    import shardkeep
    from shardkeep.inference.server.served_model import ServedModel

    late, serving = list[str](), threading.Event()

    def watch(happened: str, about: tuple[Any, ...]) -> None:
        if happened == "import" and serving.is_set() and threading.current_thread() is not threading.main_thread():
            late.append(about[0])

    sys.addaudithook(watch)
    for folder in sys.argv[1:]:
        with Server(ServedModel(shardkeep.load(folder)), name="m") as server:
            gc.freeze()
            with server.watched() as pauses:
                serving.set()
                found = statuses(server)
                serving.clear()
        print(json.dumps({"folder": folder, "late": late, "longest_s": max(pauses), "statuses": sorted(found)}))
        late.clear()


if __name__ == "__main__":
    main()
