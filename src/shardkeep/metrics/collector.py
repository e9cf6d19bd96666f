"""Collector: turns the figures of one process into the families of Prometheus, at each scrape. It counts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardkeep.metrics.names import METRICS, OF_EVERY_SERIES, Metric, ProcessRole, figures_of
from shardkeep.records.record import Part
from shardkeep.records.telemetry import Telemetry

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

Figures = Mapping[str, Any]
NO_LABELS: Mapping[str, str] = {}
OF_PROCESS = figures_of(Telemetry)
"""Metrics of every process, which `serving.py` reads."""


@dataclass(frozen=True, slots=True)
class Bins:
    """A histogram: counts by upper bound, in rising order, the last one infinite; and the sum of what was counted."""

    counts: Mapping[float, int]
    sum: float

    def cumulated(self) -> list[tuple[str, float]]:
        """The buckets of Prometheus, each with all that is smaller."""
        total, buckets = 0, []
        for bound, count in self.counts.items():
            total += count
            buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(total)))
        return buckets


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of the metric `name` (without the prefix)."""

    name: str
    value: float | Bins
    labels: Mapping[str, str] = field(default_factory=dict)


class ProcessCollector:
    """The metrics of one process in one role; `prometheus_client` calls it.

    Args:
        role: The process's.
        index: The process's.
        samples: Reads the figures now.
    """

    def __init__(self, role: ProcessRole, index: int, samples: Callable[[], Iterable[Sample]]) -> None:
        self._place = (role, str(index))
        self._samples = samples

    def collect(self) -> Iterator[Family]:
        families: dict[str, Family] = {}
        for sample in self._samples():
            metric = METRICS[f"shardkeep_{sample.name}"]
            family = families.get(metric.name)
            if family is None:
                family = families[metric.name] = _family(metric)
            labels = [*self._place, *(sample.labels[name] for name in metric.labels)]
            if isinstance(sample.value, Bins):
                family.add_metric(labels, sample.value.cumulated(), sum_value=sample.value.sum)  # type: ignore[attr-defined]
            else:
                family.add_metric(labels, float(sample.value))  # type: ignore[attr-defined]
        return iter(families.values())


def _family(metric: Metric) -> Family:
    from prometheus_client import core

    kinds: dict[str, type[Family]] = {
        "gauge": core.GaugeMetricFamily,
        "counter": core.CounterMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    labels = [*OF_EVERY_SERIES, *metric.labels]
    return kinds[metric.kind](metric.family, metric.text.replace("`", ""), labels=labels)  # type: ignore[call-arg]


def of_record(kind: type[Part], figures: Figures, labels: Mapping[str, str] = NO_LABELS) -> Iterator[Sample]:
    """The samples of the figures that the process has and that records of this class have, too."""
    for name, key in figures_of(kind).items():
        if name not in OF_PROCESS and (value := figures.get(key.name)) is not None:
            yield Sample(name, float(value), labels)


def seconds_bins(counts: Mapping[str, int], total_s: float) -> Bins:
    """The histogram of a process (base/histogram.py), whose counts are by upper bound as text."""
    return Bins({float(bound): count for bound, count in counts.items()}, total_s)
