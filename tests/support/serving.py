"""A server of a model in this process, and clients of it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import grpc
import numpy as np

from shardkeep.inference.protocol.datatypes import NUMBERS, Values, pack
from shardkeep.inference.server.serve import Addresses, serve
from shardkeep.inference.server.served_model import ServedModel
from shardkeep.inference.server.settings import ServerSettings
from shardkeep.proto import inference_pb2 as pb

LIMIT_S = 90.0


class Server:
    """Serves in a thread, on free ports."""

    def __init__(self, served: ServedModel, settings: ServerSettings | None = None, name: str = "clicks") -> None:
        self._settings = settings or ServerSettings("127.0.0.1:0", "127.0.0.1:0")
        self._served, self._name = served, name
        self._ready: Future[Addresses] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="event loop")
        self.addresses = Addresses("", None)

    def __enter__(self) -> Server:
        self._thread.start()
        self.addresses = self._ready.result(LIMIT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.begin_stop()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def begin_stop(self) -> None:
        assert self._loop is not None and self._stop is not None
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[float]]:
        """CPU seconds between turns of the event loop meanwhile."""
        found = list[float]()

        async def watch() -> None:
            last = time.thread_time()
            while True:
                await asyncio.sleep(0.001)
                now = time.thread_time()
                found.append(now - last)
                last = now

        assert self._loop is not None
        watching = asyncio.run_coroutine_threadsafe(watch(), self._loop)
        try:
            yield found
        finally:
            watching.cancel()

    def call(self, method: str, request: Any, reply: Any, **options: Any) -> Any:
        with grpc.insecure_channel(self.addresses.grpc) as channel:
            return call_on(channel, method, request, reply, **options)

    def infer(self, request: Any, **options: Any) -> pb.ModelInferResponse:
        return self.call("ModelInfer", request, pb.ModelInferResponse, **options)  # type: ignore[no-any-return]

    def refusal(self, request: Any, method: str = "ModelInfer", **options: Any) -> tuple[str, str]:
        try:
            self.call(method, request, pb.ModelInferResponse, **options)
        except grpc.RpcError as error:
            return error.code().name, error.details()  # type: ignore[attr-defined]
        raise AssertionError("the call is answered")

    def http(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        assert self.addresses.http is not None
        connection = http.client.HTTPConnection(self.addresses.http, timeout=LIMIT_S)
        try:
            connection.request(method, path, body, dict(headers or {}))
            reply = connection.getresponse()
            return reply.status, dict(reply.getheaders()), reply.read()
        finally:
            connection.close()

    def post(self, inputs: Sequence[Mapping[str, Any]], **more: Any) -> tuple[int, Any]:
        """An infer request as plain JSON: status and JSON."""
        body = json.dumps({"inputs": list(inputs), **more}).encode()
        status, _, content = self.http("POST", f"/v2/models/{self._name}/infer", body)
        return status, json.loads(content)

    def post_binary(self, columns: Mapping[str, Values], version: str = "") -> tuple[int, dict[str, Any]]:
        """An infer request with bytes behind its JSON: status, and the values of each output or the error."""
        behind = [pack(values) for values in columns.values()]
        inputs = [
            {"name": name, "datatype": datatype_of(values), "shape": [len(values), 1]}
            | {"parameters": {"binary_data_size": len(part)}}
            for (name, values), part in zip(columns.items(), behind, strict=True)
        ]
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        sent = {"Inference-Header-Content-Length": str(len(head))}
        path = f"/v2/models/{self._name}{version and f'/versions/{version}'}/infer"
        status, headers, body = self.http("POST", path, head + b"".join(behind), sent)
        length = {name.lower(): value for name, value in headers.items()}.get("inference-header-content-length")
        if length is None:
            return status, json.loads(body)
        values, at = dict[str, Any](), int(length)
        for output in json.loads(body[:at])["outputs"]:
            size = output["parameters"]["binary_data_size"]
            values[output["name"]] = np.frombuffer(body[at : at + size], np.float32)
            at += size
        assert at == len(body)
        return status, values

    def _run(self) -> None:
        try:
            asyncio.run(self._body())
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            raise

    async def _body(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await serve(self._name, self._served, self._settings, ready=self._ready.set_result, stop=self._stop)


def call_on(channel: grpc.Channel, method: str, request: Any, reply: Any, **options: Any) -> Any:
    message = request if isinstance(request, bytes) else request.SerializeToString()
    stub = channel.unary_unary(
        f"/inference.GRPCInferenceService/{method}", response_deserializer=reply.FromString
    )  # no serializer: the message is bytes
    return stub(message, timeout=LIMIT_S, **options)


def datatype_of(values: Values) -> str:
    return "BYTES" if isinstance(values, list) else next(n for n, dtype in NUMBERS.items() if dtype == values.dtype)


def raw_request(columns: Mapping[str, Values], model: str = "clicks", **more: Any) -> pb.ModelInferRequest:
    """A request with raw contents, as tritonclient sends it."""
    request = pb.ModelInferRequest(model_name=model, **more)
    for name, values in columns.items():
        request.inputs.add(name=name, datatype=datatype_of(values), shape=[len(values)])
        request.raw_input_contents.append(pack(values))
    return request


def scores_of(reply: pb.ModelInferResponse, index: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(reply.raw_output_contents[index], np.float32)
