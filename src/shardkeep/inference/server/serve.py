"""Serve: a server from its start to its end, in one process with one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardkeep.base.logs.log import EventLog
from shardkeep.base.machine.allocator import keep_freed_memory
from shardkeep.base.net.addresses import join_address, split_address
from shardkeep.config import JobConfig
from shardkeep.inference.predictor import Predictor
from shardkeep.inference.server.batcher import Batcher
from shardkeep.inference.server.grpc_front import GrpcFront
from shardkeep.inference.server.metrics import Metrics, NoMetrics, PrometheusMetrics
from shardkeep.inference.server.served_model import ServedModel
from shardkeep.inference.server.service import Service
from shardkeep.inference.server.settings import ServerSettings
from shardkeep.view.unseen_lines import unseen_shares

if TYPE_CHECKING:
    from shardkeep.inference.server.http_front import HttpFront

GRACE_S = 10.0
"""Seconds that running requests have when the server stops."""
LARGEST_KEPT_BYTES, KEPT_BYTES = 4 << 20, 64 << 20
"""Of freed memory: enough for the arrays of a batch; those of a model that was replaced are larger, and go back."""
TELL_EVERY_S = 60.0
OTHER_CALLS = 64
"""Calls over gRPC that may run besides the requests that may wait."""


@dataclass(frozen=True)
class Addresses:
    """Where a server listens."""

    grpc: str
    http: str | None


def model_name(predictor: Predictor, folder: Path) -> str:
    """The job's name if it has one of its own, or else the folder's."""
    name = predictor.trained.config.name
    return name if name != JobConfig.model_fields["name"].default else folder.resolve().name


async def serve(
    name: str,
    served: ServedModel,
    settings: ServerSettings,
    *,
    ready: Callable[[Addresses], None],
    stop: asyncio.Event,
) -> None:
    """Serves until `stop` is set; then answers what waits. Raises ConfigError: it cannot listen."""
    settings.check()
    metrics = NoMetrics() if settings.http is None else PrometheusMetrics()
    batcher = Batcher(served, settings.limits, metrics)
    if isinstance(metrics, PrometheusMetrics):
        metrics.watch(served, lambda: batcher.waiting)
    service = Service(name, served, batcher, metrics)
    most_calls = settings.limits.requests + OTHER_CALLS
    grpc_front = GrpcFront(
        service, settings.listen, settings.access, most_bytes=settings.most_bytes, most_calls=most_calls
    )
    http_front = _http_front(service, settings, metrics)
    await grpc_front.start()
    host = split_address(settings.listen, lowest_port=0)[0]
    http = None if http_front is None else http_front.address
    ready(Addresses(join_address(host, grpc_front.port), http))
    telling = asyncio.create_task(_tell_unseen(served, stop))
    await stop.wait()
    service.ready = False
    await asyncio.gather(*(front.stop(GRACE_S) for front in (grpc_front, http_front) if front is not None))
    await batcher.close()
    await telling


async def _tell_unseen(served: ServedModel, stop: asyncio.Event) -> None:
    """Logs the features with too many values without a row, whenever there are more of them than before."""
    log, ended = EventLog("serve"), False
    while not ended:
        ended = stop.is_set()
        if shares := unseen_shares(served.current.unseen.counts()):
            log.warning("values without a row", once=str(len(shares)), features="; ".join(shares))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), TELL_EVERY_S)


def serve_until_signal(
    name: str, served: ServedModel, settings: ServerSettings, *, ready: Callable[[Addresses], None]
) -> None:
    """Serves until SIGTERM or SIGINT. Blocks. Raises as `serve`."""

    gc.freeze()  # else the loop stands while a collection looks at all objects of torch
    keep_freed_memory(largest_bytes=LARGEST_KEPT_BYTES, kept_bytes=KEPT_BYTES)

    async def body() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await serve(name, served, settings, ready=ready, stop=stop)

    with asyncio.Runner(loop_factory=_event_loop()) as runner:
        runner.run(body())


def _event_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop, which `uvicorn[standard]` brings; asyncio's own takes a third more CPU for a request."""
    try:
        import uvloop
    except ImportError:
        return None
    make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make


def _http_front(service: Service, settings: ServerSettings, metrics: Metrics) -> HttpFront | None:
    if settings.http is None or not isinstance(metrics, PrometheusMetrics):
        return None
    from shardkeep.inference.server.http_front import HttpFront

    return HttpFront(service, settings.http, settings.access, metrics, most_bytes=settings.most_bytes)
