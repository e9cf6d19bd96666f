"""Starts the metrics of one process: a registry of its own, the collectors of its roles, and the endpoint."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata

from shardkeep.base.errors import ConfigError
from shardkeep.base.machine.memory_limit import limit_bytes, rss_bytes
from shardkeep.metrics.collector import ProcessCollector, Sample
from shardkeep.metrics.endpoint import Access, Endpoint, Pages, Reply
from shardkeep.metrics.names import ProcessRole
from shardkeep.ps.control.grpc.addresses import is_loopback, join_address, split_address

PATH, TARGETS_PATH = "/metrics", "/sd"


def serve_metrics(
    sources: Mapping[tuple[ProcessRole, int], Callable[[], Iterable[Sample]]],
    access: Access,
    *,
    listen: str,
    pages: Pages | None = None,
) -> Endpoint:
    """The endpoint of this process. `sources`: by role and index, what reads the figures. `pages`: beside the metrics.

    Raises ConfigError if it cannot listen there, or prometheus_client is missing."""
    check_client()
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_LATEST

    registry = CollectorRegistry()
    about_process = _process_samples()
    for (role, index), samples in sources.items():
        registry.register(ProcessCollector(role, index, lambda one=samples: [*about_process(), *one()]))  # type: ignore[misc]
    scrape = {PATH: lambda: Reply(generate_latest(registry), CONTENT_TYPE_LATEST)}
    try:
        return Endpoint(listen, access, {**scrape, **(pages or {})})
    except ConfigError as error:
        raise ConfigError(f"metrics.listen: {error}") from error


def check_client() -> None:
    """Raises ConfigError if prometheus_client is not installed. Does not import it."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError("metrics.listen: needs prometheus_client: pip install 'shardkeep[web]'; or off")


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
