"""Metrics of a server, for Prometheus; without prometheus_client, none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from shardkeep.inference.protocol.status import Status
from shardkeep.inference.server.served_model import ServedModel

LATENCIES = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_NAME = "shardkeep_serve"
BATCH_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class NoMetrics:
    """Counts nothing."""

    def answered(self, protocol: str, rows: int, seconds: float) -> None:
        """A request has its scores."""

    def refused(self, protocol: str, status: Status) -> None:
        """A request has an error."""

    def batch(self, rows: int) -> None:
        """A batch begins."""


class PrometheusMetrics:
    """Counters with a registry of their own. Raises ImportError without prometheus_client."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = registry = CollectorRegistry()
        requests = Counter(f"{_NAME}_requests", "Requests with scores.", ["protocol"], registry=registry)
        rows = Counter(f"{_NAME}_rows", "Rows scored.", ["protocol"], registry=registry)
        what = "From a request's arrival to its reply."
        latency = Histogram(f"{_NAME}_request_seconds", what, ["protocol"], buckets=LATENCIES, registry=registry)
        self._answered = {
            name: (requests.labels(name), rows.labels(name), latency.labels(name)) for name in ("grpc", "http")
        }
        self._errors = Counter(f"{_NAME}_errors", "Requests with an error.", ["protocol", "status"], registry=registry)
        self._batch = Histogram(f"{_NAME}_batch_rows", "Rows of a batch.", buckets=BATCH_ROWS, registry=registry)
        self._queue = Gauge(f"{_NAME}_queue_requests", "Requests that wait.", registry=registry)
        self._step = Gauge(f"{_NAME}_model_step", "Training step of the model.", registry=registry)
        what = "Seconds since the model was made, or else loaded."
        self._age = Gauge(f"{_NAME}_model_age_seconds", what, registry=registry)

    def watch(self, served: ServedModel, waiting: Callable[[], int]) -> None:
        """Reads these at every scrape."""
        self._queue.set_function(waiting)
        self._step.set_function(lambda: served.current.predictor.step)
        self._age.set_function(lambda: time.time() - served.current.made_at)
        self._served = served
        self.registry.register(self)
        self.text()  # no scrape is to wait for an import

    def collect(self) -> Iterator[Any]:
        """The counters that are read at every scrape."""
        from prometheus_client.core import CounterMetricFamily

        what = "Times that a newer checkpoint could not be served."
        yield CounterMetricFamily(f"{_NAME}_follow_errors", what, value=self._served.num_missed)
        values = CounterMetricFamily(f"{_NAME}_values", "Values of a feature.", labels=["feature"])
        unseen = CounterMetricFamily(f"{_NAME}_values_without_row", "Those without a row.", labels=["feature"])
        for feature, (missing, count) in self._served.current.unseen.counts().items():
            unseen.add_metric([feature], missing)
            values.add_metric([feature], count)
        yield from (values, unseen)

    def answered(self, protocol: str, rows: int, seconds: float) -> None:
        requests, all_rows, latency = self._answered[protocol]
        requests.inc()
        all_rows.inc(rows)
        latency.observe(seconds)

    def refused(self, protocol: str, status: Status) -> None:
        self._errors.labels(protocol, status.name.lower()).inc()

    def batch(self, rows: int) -> None:
        self._batch.observe(rows)

    def text(self) -> bytes:
        """The text that Prometheus scrapes."""
        from prometheus_client import generate_latest

        return bytes(generate_latest(self.registry))


Metrics = NoMetrics | PrometheusMetrics
