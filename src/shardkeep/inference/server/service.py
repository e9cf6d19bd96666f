"""Service: answers the calls of the protocol for both fronts."""

from __future__ import annotations

import time

from shardkeep import __version__
from shardkeep.inference.protocol.status import Refusal, Status
from shardkeep.inference.protocol.tensors import InferReply, InferRequest, ModelMetadata, ServerMetadata
from shardkeep.inference.server.batcher import Batcher, Scored
from shardkeep.inference.server.entrance import Entrance
from shardkeep.inference.server.metrics import Metrics
from shardkeep.inference.server.served_model import ServedModel
from shardkeep.inference.server.signature import Rows


class Service:
    """One model under one name. To be made in the batcher's event loop; any thread may call.

    Attributes:
        ready: Whether requests are accepted.
    """

    def __init__(self, name: str, served: ServedModel, batcher: Batcher, metrics: Metrics) -> None:
        self.name = name
        self.ready = True
        self.metrics = metrics
        self._served, self._batcher, self._entrance = served, batcher, Entrance(batcher)

    async def infer(self, protocol: str, request: InferRequest) -> InferReply:
        """Scores a request. In the event loop. Raises Refusal."""
        began = time.perf_counter()
        rows = self._rows(request)
        return self._reply(protocol, request, rows, await self._batcher.submit(rows, request.size), began)

    def infer_and_wait(self, protocol: str, request: InferRequest) -> InferReply:
        """As `infer`, in any other thread. Blocks."""
        began = time.perf_counter()
        rows = self._rows(request)
        return self._reply(protocol, request, rows, self._entrance.scores(rows, request.size), began)

    def _rows(self, request: InferRequest) -> Rows:
        self._check(request.model, request.version)
        signature = self._served.current.signature
        signature.check_outputs(request.outputs)
        return signature.rows(request)

    def _reply(self, protocol: str, request: InferRequest, rows: Rows, scored: Scored, began: float) -> InferReply:
        outputs = scored.model.signature.tensors(scored.answer, request.outputs)
        self.metrics.answered(protocol, rows.count, time.perf_counter() - began)
        return InferReply(self.name, scored.model.version, outputs, request.id)

    def model_ready(self, model: str, version: str) -> bool:
        """Raises Refusal: no such model."""
        self._check(model, version)
        return self.ready

    def model(self, model: str, version: str) -> ModelMetadata:
        """Raises Refusal: no such model."""
        self._check(model, version)
        loaded = self._served.current
        return ModelMetadata(self.name, loaded.version, loaded.signature.inputs, loaded.signature.outputs)

    def server(self) -> ServerMetadata:
        return ServerMetadata(__version__)

    def failed(self, protocol: str, error: BaseException) -> Refusal:
        """Counts a failed request, and returns the client's error."""
        refusal = error if isinstance(error, Refusal) else Refusal(Status.INTERNAL, f"the server failed: {error!r}")
        self.metrics.refused(protocol, refusal.status)
        return refusal

    def _check(self, model: str, version: str) -> None:
        current = self._served.current
        if model != self.name:
            raise Refusal(Status.NOT_FOUND, f"model {model[:60]!r}: unknown; this server has {self.name}")
        if version and version != current.version:
            raise Refusal(Status.NOT_FOUND, f"version {version[:60]!r} of {model}: unknown; it has {current.version}")
