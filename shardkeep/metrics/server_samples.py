"""What a server's metrics say, from its figures (ps/shard/figures.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardkeep.metrics.collector import Figures, Sample, each, seconds_bins

_TABLE = {
    "table_rows": "rows",
    "table_bytes": "bytes",
    "table_rows_created_total": "created",
    "table_rows_removed_total": "removed",
    "table_rows_refused_total": "refused",
    "table_candidates": "candidates",
}
"""Metric -> figure of a table."""


class ServerSamples:
    """Reads one server's figures at each scrape."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures

    def __call__(self) -> Iterator[Sample]:
        figures = self._figures()
        yield from each("server_step", figures, "step")
        yield from each("pulls_total", figures, "pulls")
        yield from each("pushes_total", figures, "pushes")
        yield from each("parked_pulls", figures)
        yield from each("journal_bytes", figures)
        yield from each("snapshot_duration_seconds", figures.get("checkpoint") or {}, "seconds")
        yield Sample("request_duration_seconds", seconds_bins(figures["request_histogram"], figures["request_s"]))
        for table in figures.get("tables", ()):
            for name, key in _TABLE.items():
                yield Sample(name, table[key], {"table": table["name"]})
