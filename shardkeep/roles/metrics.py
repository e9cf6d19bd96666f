"""The endpoints for Prometheus of the processes of a job: who serves which metrics, and where.

Imports prometheus_client only where metrics are on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.base.errors import ConfigError
from shardkeep.base.log import EventLog
from shardkeep.config import JobConfig
from shardkeep.metrics.names import ProcessRole
from shardkeep.ps.control.grpc.endpoint import Endpoint as ControlEndpoint
from shardkeep.ps.control.grpc.tls import Tls
from shardkeep.ps.control.records import JobSink, Member
from shardkeep.trust.view import put_view_token, view_token

if TYPE_CHECKING:
    from shardkeep.metrics.collector import Sample
    from shardkeep.metrics.endpoint import Endpoint
    from shardkeep.metrics.job_samples import JobCounts
    from shardkeep.workers.figures import WorkerFigures

_log = EventLog("roles")
Samples = Callable[[], "Iterable[Sample]"]
Sources = Mapping[tuple[ProcessRole, int], Samples]
"""By role and index, what reads the figures. A job in one process has several roles."""


class JobMetrics:
    """The endpoint with the job's metrics and targets: of the coordinator, or of a job in one process.

    Args:
        config: The job; its metrics are on.
        sink: Where records go; `sink` of this object passes them on.
        run: The run folder.
        start_step: Of the checkpoint that the job starts from; 0 = from the beginning.
        token: The job's; the view token follows from it.
    """

    def __init__(
        self, config: JobConfig, sink: JobSink, run: Path, token: str, *, start_step: int, tls: Tls | None = None
    ) -> None:
        from shardkeep.metrics.job_samples import JobCounts
        from shardkeep.metrics.serving import check_client

        check_client()
        every = config.checkpoint.every_steps
        self.sink: JobCounts = JobCounts(
            sink,
            lease_s=config.liveness.lease_s,
            period_steps=None if every == "auto" else every,
            start_step=start_step,
        )
        self._config, self._run, self._token, self._tls = config, run, token, tls

    @contextlib.contextmanager
    def served(self, others: Sources | None = None) -> Iterator[str]:
        """Serves the job's metrics inside the `with`, and those of `others` in this process; gives their address.

        Raises ConfigError and UserError."""
        from shardkeep.metrics.discovery import targets
        from shardkeep.metrics.endpoint import Access
        from shardkeep.metrics.serving import PATH, TARGETS_PATH, serve_metrics

        config, run = self._config, self._run
        file = put_view_token(run, self._token)
        own: list[str] = []
        pages = {TARGETS_PATH: lambda: targets([*own, *self.sink.addresses()], job=config.name, run=run.resolve().name)}
        access = Access(view_token(self._token), self._tls)
        sources: Sources = {("coordinator", 0): self.sink.samples, **(others or {})}
        with contextlib.closing(serve_metrics(sources, access, listen=config.metrics.listen, pages=pages)) as endpoint:
            own.append(f"{endpoint.url}{PATH}")
            text = f"{own[0]}, all processes {endpoint.url}{TARGETS_PATH}; the token is in {file}"
            self.sink.event({"kind": "phase", "phase": "metrics", "text": text, "role": "coordinator", "index": 0})
            yield own[0]


class MemberMetrics:
    """The endpoint of a server or worker, as long as its process. Where it cannot listen, the log says why.

    `address`: of its metrics; None = there are none."""

    def __init__(self, config: JobConfig, coordinator: ControlEndpoint, member: Member) -> None:
        self._config = config
        self._samples: Samples = tuple
        self._endpoint: Endpoint | None = None
        self.address: str | None = None
        if config.metrics.on:
            self._serve(config, coordinator, member)

    def show_worker(self, figures: Callable[[], WorkerFigures | None]) -> None:
        """Serves the metrics of a worker with these figures."""
        if self._endpoint is not None:
            self._samples = worker_samples(figures, self._config)

    def show_server(self, figures: Callable[[], dict[str, Any]]) -> None:
        """Serves the metrics of a server with these figures."""
        if self._endpoint is not None:
            self._samples = server_samples(figures)

    def close(self) -> None:
        """Ends the endpoint."""
        if self._endpoint is not None:
            self._endpoint.close()

    def _serve(self, config: JobConfig, coordinator: ControlEndpoint, member: Member) -> None:
        from shardkeep.metrics.endpoint import Access
        from shardkeep.metrics.serving import PATH, member_listen, serve_metrics

        access = Access(view_token(coordinator.token), coordinator.tls)
        listen = member_listen(config.metrics.listen, member.host)
        try:
            endpoint = serve_metrics({(member.role, member.index): lambda: self._samples()}, access, listen=listen)
        except ConfigError as error:  # training needs none
            _log.warning("no metrics", why=str(error))
        else:
            self._endpoint, self.address = endpoint, f"{endpoint.url}{PATH}"


def worker_samples(figures: Callable[[], WorkerFigures | None], config: JobConfig) -> Samples:
    """What a worker's metrics say."""
    from shardkeep.metrics.worker_samples import WorkerSamples

    return WorkerSamples(figures, staleness=config.consistency.staleness, servers=max(config.servers, 1))


def server_samples(figures: Callable[[], dict[str, Any]]) -> Samples:
    """What a server's metrics say."""
    from shardkeep.metrics.server_samples import ServerSamples

    return ServerSamples(figures)
