"""Calls: what a client's calls go through. A meter (metering.py) puts itself around them; without one they are bare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from shardkeep.base.arrays import Rows
from shardkeep.base.errors import TransportError
from shardkeep.loop.demands import Demands, IdsByTable
from shardkeep.loop.gradients import gradients_of
from shardkeep.ps.client.request import Request
from shardkeep.ps.client.row_client import Pull, RowClient
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.jagged import JaggedRows
from shardkeep.workers.embeddings.bags import Bag, Pooled
from shardkeep.workers.embeddings.lookup import Lookup

VERDICT_S = 2.0
"""Seconds the coordinator gets, after a lost message, to report which member was lost."""
Around = Callable[[], AbstractContextManager[None]]
Gradients = Callable[[RowClient, int, Sequence[Lookup], float], tuple[Request, Mapping[str, Rows], int]]


class Asks(Protocol):
    """Turns ids and bags into requests: `Demands`."""

    def of(
        self, call: str, owner: object, ids: IdsByTable | Mapping[str, Bag]
    ) -> tuple[Request, Callable[[Pull, JaggedRows], Lookup]]:
        """As `Demands.of`."""
        ...

    def of_bags(
        self, call: str, owner: object, bags: Mapping[str, Bag]
    ) -> tuple[Request, Callable[[Pull, JaggedRows], Pooled]]:
        """As `Demands.of_bags`."""
        ...


@dataclass(frozen=True, slots=True)
class Calls:
    """The parts of a client's calls.

    Attributes:
        demands: Makes requests.
        gradients: Sums the gradients of a step: `gradients_of`.
        waiting: Is around a wait for rows of a step.
        pushing: Is around the push that ends a step.
        reading: Is around a read.
        apart: Is around what belongs to no step, such as a checkpoint.
        batches: Passes the batches of `ahead` on.
    """

    demands: Asks
    gradients: Gradients
    waiting: Around
    pushing: Around
    reading: Around
    apart: Around
    batches: Callable[[Iterable[Any]], Iterable[Any]]


def bare_calls(rows: RowClient, control: ControlClient | None) -> Calls:
    """The calls of a client that nobody meters."""

    @contextlib.contextmanager
    def verdict() -> Iterator[None]:
        """Replaces the error of a lost message by the job's own error, which names the process that died."""
        try:
            yield
        except TransportError as error:
            if control is not None and error.retryable and control.failed.wait(VERDICT_S):
                raise control.state.error() or error from error
            raise

    return Calls(Demands(rows), gradients_of, verdict, verdict, verdict, verdict, iter)
