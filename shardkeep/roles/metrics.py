"""The endpoints for Prometheus of the processes of a job: who serves which metrics, and where.

Imports shardkeep/metrics only where metrics are on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shardkeep.base.errors import ConfigError
from shardkeep.base.log import EventLog
from shardkeep.config import JobConfig
from shardkeep.ps.control.grpc.endpoint import Endpoint as ControlEndpoint
from shardkeep.ps.control.grpc.tls import Tls
from shardkeep.ps.control.records import JobSink, Status
from shardkeep.trust.view import put_view_token, view_token

if TYPE_CHECKING:
    from shardkeep.metrics.collector import Sample
    from shardkeep.metrics.endpoint import Endpoint
    from shardkeep.metrics.job_samples import JobCounts
    from shardkeep.metrics.names import ProcessRole
    from shardkeep.metrics.serving import Sources

_log = EventLog("roles")
Samples = Callable[[], "Iterable[Sample]"]


class JobMetrics:
    """The endpoint with the job's metrics and targets: of the coordinator, or of a job in one process.

    Args:
        config: The job; its metrics are on.
        sink: Where records go; `sink` of this object passes them on.
        run: The run folder.
        token: The job's; the view token follows from it.
    """

    def __init__(self, config: JobConfig, sink: JobSink, run: Path, token: str, tls: Tls | None = None) -> None:
        from shardkeep.metrics.job_samples import JobCounts
        from shardkeep.metrics.serving import check_client

        check_client()
        every = config.checkpoint.every_steps
        self.sink: JobCounts = JobCounts(sink, period_steps=None if every == "auto" else every)
        self._config, self._run, self._token, self._tls = config, run, token, tls

    @contextlib.contextmanager
    def served(self, sources: Sources) -> Iterator[str]:
        """Serves the metrics of this process inside the `with`; gives their address. Raises ConfigError, UserError."""
        from shardkeep.metrics.discovery import targets
        from shardkeep.metrics.endpoint import Access
        from shardkeep.metrics.serving import PATH, TARGETS_PATH, serve_metrics

        config, run = self._config, self._run
        file = put_view_token(run, self._token)
        addresses: list[str] = []

        def found() -> list[str]:
            return [*addresses, *self.sink.addresses()]

        pages = {TARGETS_PATH: lambda: targets(found(), job=config.name, run=run.name)}
        access = Access(view_token(self._token), self._tls)
        with contextlib.closing(serve_metrics(sources, access, listen=config.metrics.listen, pages=pages)) as endpoint:
            addresses.append(f"{endpoint.url}{PATH}")
            text = f"{addresses[0]}, all processes {endpoint.url}{TARGETS_PATH}; the token is in {file}"
            self.sink.event({"kind": "phase", "phase": "metrics", "text": text, "role": "coordinator", "index": 0})
            yield addresses[0]

    def of_coordinator(self, status: Callable[[], Status]) -> contextlib.AbstractContextManager[str]:
        """Serves the coordinator's metrics."""
        from shardkeep.metrics.job_samples import status_samples

        return self.served({("coordinator", 0): lambda: [*status_samples(status()), *self.sink.samples()]})

    def of_one_process(self, worker: Samples, server: Samples) -> contextlib.AbstractContextManager[str]:
        """Serves the metrics of a job in one process."""
        return self.served({("coordinator", 0): self.sink.samples, ("worker", 0): worker, ("server", 0): server})


def member_metrics(
    config: JobConfig, coordinator: ControlEndpoint, *, role: ProcessRole, index: int, host: str, samples: Samples
) -> Endpoint | None:
    """The endpoint of a server or worker; None = metrics are off, or it has none, and the log says why.

    `host`: where others reach the process."""
    if not config.metrics.on:
        return None
    from shardkeep.metrics.endpoint import Access
    from shardkeep.metrics.serving import member_listen, serve_metrics

    try:
        access = Access(view_token(coordinator.token), coordinator.tls)
        return serve_metrics({(role, index): samples}, access, listen=member_listen(config.metrics.listen, host))
    except ConfigError as error:  # training needs none
        _log.warning("no metrics", why=str(error))
        return None


def metrics_address(endpoint: Endpoint | None) -> str | None:
    """The address of an endpoint's metrics."""
    if endpoint is None:
        return None
    from shardkeep.metrics.serving import PATH

    return f"{endpoint.url}{PATH}"
