"""A metered client in this process, whose records a test reads and whose clock it turns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from shardkeep import EmbeddingClient, TableSpec
from shardkeep.compression.config import CompressionConfig
from shardkeep.loop.joining import Joined, join_local, loop_config
from shardkeep.loop.metering import StepMeter


class Records:
    def __init__(self) -> None:
        self._records: list[tuple[str, dict[str, Any]]] = []

    def report(self, kind: str, record: dict[str, Any]) -> None:
        self._records.append((kind, record))

    def update(self, *, step: int, phase: str, unsent_rows: int | None = None) -> None:
        pass

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for name, record in self._records if name == kind]


class Clock:
    """Seconds that only a test lets pass."""

    def __init__(self) -> None:
        self._now = 1000.0

    def __call__(self) -> float:
        return self._now

    def add(self, seconds: float) -> None:
        self._now += seconds

    def slow(self, batches: Iterable[Any], *, seconds: float) -> Iterator[Any]:
        """Yields batches, each after some seconds."""
        for batch in batches:
            self.add(seconds)
            yield batch


class SlowReads(StepMeter):
    """A meter whose client's reads take some seconds."""

    def __init__(self, *parts: Any, clock: Clock, read_s: float, **others: Any) -> None:
        super().__init__(*parts, clock=clock, **others)
        self._wait = partial(clock.add, read_s)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with super().reading():
            self._wait()
            yield


def metered_client(
    tables: Sequence[TableSpec],
    *,
    consistency: str = "bounded",
    seed: int = 0,
    compression: CompressionConfig | None = None,
    report_every_s: float = 2.0,
    read_s: float = 0.0,
) -> tuple[EmbeddingClient, Records, Clock]:
    """A client whose tables are in this process. `read_s`: seconds that pass in each read."""
    config = loop_config(0, seed, consistency, compression)
    config = config.model_copy(update={"train": config.train.model_copy(update={"report_every_s": report_every_s})})
    joined, records, clock = join_local(tables, config), Records(), Clock()
    meter = SlowReads(
        joined.rows,
        joined.ledger,
        config,
        records,
        samples=0,
        generation=lambda: joined.rows.generation,
        metrics=None,
        clock=clock,
        read_s=read_s,
    )
    metered = Joined(joined.rows, joined.ledger, joined.ending, joined.saving, meter)
    return EmbeddingClient(metered), records, clock
