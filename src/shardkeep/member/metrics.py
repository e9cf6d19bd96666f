"""The endpoints for Prometheus of the processes of a job: who serves which metrics, and where.

prometheus_client is imported only where metrics are on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.base.errors import ConfigError
from shardkeep.base.logs.log import EventLog
from shardkeep.config import JobConfig
from shardkeep.metrics.collector import Sample
from shardkeep.metrics.discovery import targets
from shardkeep.metrics.names import ProcessRole
from shardkeep.metrics.server_samples import ServerSamples
from shardkeep.metrics.serving import PATH, TARGETS_PATH, member_listen, serve_metrics
from shardkeep.ps.control.records import JobSink, Member
from shardkeep.trust.endpoint import Endpoint as ControlEndpoint
from shardkeep.trust.tls import Tls
from shardkeep.trust.view import put_view_token, view_token
from shardkeep.web.access import Access
from shardkeep.web.server import WebServer

if TYPE_CHECKING:
    from shardkeep.metrics.job_samples import JobCounts
    from shardkeep.workers.reporting.figures import WorkerFigures

_log = EventLog("roles")
Samples = Callable[[], Iterable[Sample]]
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

        self.sink: JobCounts = JobCounts(
            sink,
            lease_s=config.liveness.lease_s,
            period_steps=config.checkpoint.period,
            start_step=start_step,
        )
        self._config, self._run, self._token, self._tls = config, run, token, tls

    def serve(self, web: WebServer, others: Sources | None = None) -> str:
        """Serves the job's metrics until `web` ends, and those of `others` in this process; returns their address.

        Raises ConfigError and UserError."""
        config, run = self._config, self._run
        file = put_view_token(run, self._token)
        own: list[str] = []
        pages = {TARGETS_PATH: lambda: targets([*own, *self.sink.addresses()], job=config.name, run=run.resolve().name)}
        access = Access(view_token(self._token), self._tls)
        sources: Sources = {("coordinator", 0): self.sink.samples, **(others or {})}
        url = serve_metrics(web, sources, access, listen=config.web.metrics, pages=pages)
        own.append(f"{url}{PATH}")
        text = f"{own[0]}, all processes {url}{TARGETS_PATH}; the token is in {file}"
        self.sink.event({"kind": "phase", "phase": "metrics", "text": text, "role": "coordinator", "index": 0})
        return own[0]


class MemberMetrics:
    """The endpoint of a server or worker, as long as its process. Where it cannot listen, the log says why.

    `address`: of its metrics; None = there are none."""

    def __init__(self, config: JobConfig, coordinator: ControlEndpoint, member: Member) -> None:
        self._config = config
        self._samples: Samples = tuple
        self._web = WebServer()
        self.address: str | None = None
        if config.web.has_metrics:
            self._serve(config, coordinator, member)

    def show_worker(self, figures: Callable[[], WorkerFigures | None]) -> None:
        """Serves the metrics of a worker with these figures."""
        self._samples = worker_samples(figures, self._config)

    def show_server(self, figures: Callable[[], dict[str, Any]]) -> None:
        """Serves the metrics of a server with these figures."""
        self._samples = ServerSamples(figures)

    def close(self) -> None:
        """Ends the endpoint."""
        self._web.close()

    def _serve(self, config: JobConfig, coordinator: ControlEndpoint, member: Member) -> None:
        access = Access(view_token(coordinator.token), coordinator.tls)
        listen = member_listen(config.web.metrics, member.host)
        sources: Sources = {(member.role, member.index): lambda: self._samples()}
        try:
            self.address = f"{serve_metrics(self._web, sources, access, listen=listen)}{PATH}"
        except ConfigError as error:  # training needs none
            _log.warning("no metrics", why=str(error))


def worker_samples(figures: Callable[[], WorkerFigures | None], config: JobConfig) -> Samples:
    """What a worker's metrics say."""
    from shardkeep.metrics.worker_samples import WorkerSamples  # loads torch, which a coordinator has not

    return WorkerSamples(figures, staleness=config.consistency.staleness, servers=max(config.servers, 1))
