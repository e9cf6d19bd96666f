"""What a server's metrics say, from its figures (ps/server/figures.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardkeep.metrics.collector import Figures, Sample, of_record, seconds_bins
from shardkeep.records.telemetry import ServerTelemetry, TableFigures, WrittenPart


class ServerSamples:
    """Reads one server's figures at each scrape."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures

    def __call__(self) -> Iterator[Sample]:
        figures = self._figures()
        yield from of_record(ServerTelemetry, figures)
        yield from of_record(WrittenPart, figures.get("checkpoint") or {})
        yield Sample("request_duration_seconds", seconds_bins(figures["request_histogram"], figures["request_s"]))
        for table in figures.get("tables", ()):
            yield from of_record(TableFigures, table, {"table": table["name"]})
