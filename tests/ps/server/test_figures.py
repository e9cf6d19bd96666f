"""The telemetry records of a server."""

from __future__ import annotations

from typing import Any

from shardkeep.ps.server.figures import shard_record


def figures(requests: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {"requests": requests, "request_s": seconds, "request_histogram": {}, **more}


def test_counts_that_a_table_without_policies_never_has_are_left_out() -> None:
    plain = {"name": "a", "rows": 0, "bytes": 0, "created": 0, "removed": 0, "refused": 0, "candidates": 0}
    ruled = {"name": "b", "rows": 3, "bytes": 9, "created": 5, "removed": 2, "refused": 0, "candidates": 4}
    record = shard_record(figures(0, 0.0, tables=[plain, ruled]), figures(0, 0.0))
    assert record["tables"] == [
        {"name": "a", "rows": 0, "bytes": 0, "created": 0},
        {"name": "b", "rows": 3, "bytes": 9, "created": 5, "removed": 2, "candidates": 4},
    ]


def test_the_time_of_a_request_is_that_since_the_last_record() -> None:
    assert shard_record(figures(30, 5.1, pulls=7), figures(10, 5.0)) == {"pulls": 7, "request_ms": 5.0}
    assert shard_record(figures(10, 5.0), figures(10, 5.0)) == {"request_ms": None}, "there was no service yet"
