"""The metrics of one process: a registry of its own, the collectors of its roles, and the site that shows them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

from shardkeep.base.errors import ConfigError
from shardkeep.base.machine.limits import limit_bytes, rss_bytes
from shardkeep.base.net.addresses import is_loopback, join_address, split_address
from shardkeep.base.plugging.packages import METRICS, missing
from shardkeep.metrics.collector import ProcessCollector, Sample
from shardkeep.metrics.names import ProcessRole
from shardkeep.web.access import Access
from shardkeep.web.server import WebServer
from shardkeep.web.site import Limits, Site, shown_url

if TYPE_CHECKING:
    from shardkeep.web.routes import Routes

PATH, TARGETS_PATH = "/metrics", "/sd"
LIMITS = Limits(connections=16, per_s=5, burst=1, backlog=16, head_bytes=8192, wait_s=5.0)
"""They cost a training process nothing: a flood gets five connections a second, and less than a percent of a core."""
Pages = Mapping[str, Callable[[], tuple[bytes, str]]]
"""Path -> what makes the body of a reply and its type, in the server's thread."""


def serve_metrics(
    web: WebServer,
    sources: Mapping[tuple[ProcessRole, int], Callable[[], Iterable[Sample]]],
    access: Access,
    *,
    listen: str,
    pages: Pages | None = None,
) -> str:
    """Serves the metrics of this process; returns scheme, host and port. `sources`: by role and index, what reads the
    figures. `pages`: beside the metrics.

    Raises ConfigError if it cannot listen there, or a package is missing."""
    if (need := missing(*METRICS)) is not None:
        raise ConfigError(f"web.metrics: {need}; or off")
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_LATEST

    registry = CollectorRegistry()
    about_process = _process_samples()
    for (role, index), samples in sources.items():
        registry.register(ProcessCollector(role, index, lambda one=samples: [*about_process(), *one()]))  # type: ignore[misc]
    scrape: Pages = {PATH: lambda: (generate_latest(registry), CONTENT_TYPE_LATEST)}
    try:
        address = web.open(listen, metrics_site(access, {**scrape, **(pages or {})}))
    except ConfigError as error:
        raise ConfigError(f"web.metrics: {error}") from error
    return shown_url(address, secure=access.tls is not None)


def metrics_site(access: Access, pages: Pages) -> Site:
    """Pages for programs that make one request on a connection."""

    def routes() -> Routes:
        from shardkeep.web.routes import Routes, reply_of

        calls = {path: reply_of(page) for path, page in pages.items()}
        return Routes(access, calls, headers={"connection": "close"})

    return Site(routes, access, LIMITS)


def member_listen(coordinator_listen: str, own_host: str) -> str:
    """Where a server or worker listens, on a free port.

    For its machine alone if the coordinator does so. At the coordinator's address if the member's own is loopback,
    because both are then on one machine. Else at the member's own address."""
    host, _ = split_address(coordinator_listen, lowest_port=0)
    if is_loopback(host):
        return join_address("127.0.0.1", 0)
    return join_address(host if is_loopback(own_host) else own_host, 0)


def _process_samples() -> Callable[[], Iterator[Sample]]:
    versions = {"version": _version("shardkeep"), "torch": _version("torch"), "python": platform.python_version()}
    limit = limit_bytes()

    def samples() -> Iterator[Sample]:
        yield Sample("build_info", 1.0, versions)
        yield Sample("memory_bytes", rss_bytes())
        yield Sample("memory_limit_bytes", limit)

    return samples


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
