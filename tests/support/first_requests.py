"""Every form of request to a server, right or wrong; and what a fresh process does in the first of each:
`python -m tests.support.first_requests FOLDER...` prints it as JSON, by the folder of a model."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from shardkeep.inference.protocol.datatypes import NUMBERS, Values
from shardkeep.proto import inference_pb2 as pb
from tests.support.logical_forms import http_binary
from tests.support.serving import Server, raw_request

TEXTS = (
    "1",
    "0.5",
    "",
    "?",
    "true",
    "1322.0",
    "2024-05-01 10:00",
    "3,50",
    "$1,234.50",
    "a|b",
    "['a', 'b']",
    "{a,NULL}",
    "é",
)
PATHS = ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/{}", "/v2/models/{}/ready", "/metrics", "/metrics")
STRANGE = ("/v2/models/{}/infer", "/v2/models/other", "/v2/models/{}/versions/99", "/v1/models/{}", "/")
BODIES = (b"", b"{}", b"[1]", b"nonsense", b"\xff\x00", "{}".encode("utf-16"), b"[" * 9999, b'{"inputs": 3}')


def inputs_of(server: Server, name: str) -> list[dict[str, Any]]:
    """Two rows of a usual request, by the model's metadata."""
    model = json.loads(server.http("GET", f"/v2/models/{name}")[2])
    found = []
    for each in model["inputs"]:
        shape = [2, *each["shape"][1:]]
        value = {"BYTES": "1700000000", "FP64": 1.7e9}.get(each["datatype"], 1)  # a time, where it is one
        found.append({**each, "shape": shape, "data": [value] * int(np.prod(shape))})
    return found


def changes(inputs: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The inputs with one of them in each form that its values may have, and in forms that it may not have."""
    for at, one in enumerate(inputs):
        count = len(one["data"])
        forms: list[dict[str, Any]] = [{"datatype": "BYTES", "data": [text] * count} for text in (*TEXTS, None)]
        forms += [{"datatype": kind, "data": [dtype.type(1).item()] * count} for kind, dtype in NUMBERS.items()]
        forms += [{"datatype": "FP64", "data": [value] * count} for value in (None, 1.5, 1e400)]
        forms += [{"shape": [1, 2, 3]}, {"shape": [0], "data": []}, {"datatype": "FP128"}, {"name": f"{one['name']}s"}]
        for form in forms:
            yield [*map(dict, inputs[:at]), {**one, **form}, *map(dict, inputs[at + 1 :])]
        yield [*map(dict, inputs[:at]), *map(dict, inputs[at + 1 :])]
    yield [*map(dict, inputs), {**inputs[0], "name": "device"}]
    for rows in (0, 1, 300):
        width = [int(np.prod(one["shape"][1:])) for one in inputs]
        shaped = [{**one, "shape": [rows, *one["shape"][1:]]} for one in inputs]
        yield [{**one, "data": one["data"][:1] * rows * w} for one, w in zip(shaped, width, strict=True)]


def values_of(inputs: Sequence[Mapping[str, Any]]) -> dict[str, Values]:
    """What a binary request has of inputs whose values fit their datatype."""
    return {
        one["name"]: [text.encode() for text in one["data"]] if one["datatype"] == "BYTES"
        else np.array(one["data"], NUMBERS[one["datatype"]])
        for one in inputs
    }  # fmt: skip


def statuses(server: Server, name: str) -> list[int]:
    """Sends all requests. The HTTP status of each reply over HTTP."""
    usual, found = inputs_of(server, name), list[int]()
    for inputs in (usual, *changes(usual)):
        found.append(server.post(inputs)[0])
    long = [{**one, "data": ["a|" * 4000] * 2} if one["datatype"] == "BYTES" else one for one in usual]
    for more in ({"outputs": [{"name": "none"}]}, {"parameters": {"top": 2}}, {"parameters": {"top": 0}}, {"id": "7"}):
        found.append(server.post(usual, **more)[0])
    found += [server.post(long)[0], server.post([*usual, {**usual[0], "data": ["a"] * 2_000_000}])[0]]
    path = f"/v2/models/{name}/infer"
    for body in BODIES:
        found.append(server.http("POST", path, body)[0])
    for headers in ({"Inference-Header-Content-Length": "x"}, {"Content-Encoding": "gzip"}):
        found.append(server.http("POST", path, b"{}", headers)[0])
    for address in (*PATHS, *STRANGE):
        found.append(server.http("GET", address.format(name))[0])
    if all(len(one["shape"]) == 1 for one in usual):
        body, length = http_binary(values_of(usual))
        found.append(server.http("POST", path, body, {"Inference-Header-Content-Length": str(length)})[0])
    _over_grpc(server, name, usual)
    return found


def _over_grpc(server: Server, name: str, usual: list[dict[str, Any]]) -> None:
    with contextlib.suppress(grpc.RpcError):
        server.infer(raw_request(values_of(usual), name))
    for inputs in list(changes(usual))[::7]:
        with contextlib.suppress(grpc.RpcError, TypeError, KeyError, AttributeError, OverflowError):
            server.infer(raw_request(values_of(inputs), name))
    for method in ("ModelMetadata", "ModelReady", "ServerReady", "ServerLive", "ServerMetadata", "ModelInfer", "None"):
        for message in (pb.ModelReadyRequest(name=name), b"", b"\xff\xff"):
            with contextlib.suppress(grpc.RpcError):
                server.call(method, message, pb.ModelReadyResponse)


def main() -> None:
    from numba.core import event

    import shardkeep
    from shardkeep.inference.server.served_model import ServedModel

    late = list[str]()
    serving = False

    class Compiled(event.Listener):
        def on_start(self, found: Any) -> None:
            late.append(f"compiles {found.data['dispatcher']}")

        def on_end(self, found: Any) -> None:
            pass

    def watch(happened: str, about: tuple[Any, ...]) -> None:
        if happened == "import" and serving and threading.current_thread() is not threading.main_thread():
            late.append(about[0])

    sys.addaudithook(watch)
    found = {}
    for folder in sys.argv[1:]:
        with Server(ServedModel(shardkeep.load(Path(folder)))) as server:
            gc.freeze()
            with event.install_listener("numba:compile", Compiled()), server.watched() as pauses:  # type: ignore[no-untyped-call]
                serving = True
                sent = statuses(server, "clicks")
                serving = False
        found[folder] = {"late": [*late], "longest_s": max(pauses), "statuses": sent}
        late.clear()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
