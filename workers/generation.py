"""Generation: the parts of a worker that live as long as one formation of the group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from shardkeep.ps.transport.transport import Transport
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.reporting.summary import SummarySources, stopped_figures, summarize
from shardkeep.workers.trainer import Trainer


class Link:
    """The connections of one formation: to the servers, and between the workers. `close` is idempotent.

    Args:
        number: The generation's.
        before_close: Called while the connections are still open.
    """

    def __init__(
        self,
        number: int,
        transport: Transport,
        collective: Collective,
        *,
        before_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.number = number
        self.transport = transport
        self.collective = collective
        self._open = contextlib.ExitStack()
        self._open.callback(transport.close)
        self._open.callback(collective.close)
        self._open.callback(before_close)

    def close(self) -> None:
        self._open.close()


@dataclass(frozen=True, slots=True)
class Generation:
    """Trains in one formation; made by `TrainingRun.enter`. Leaving its `with` closes the link."""

    link: Link
    trainer: Trainer
    sources: SummarySources
    start_step: int
    follows: bool
    """Whether it follows a lost generation."""

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.link.close()
        finally:
            self.trainer.wait_for_writer()  # calls of its thread end when the transport is closed

    def train(self, should_stop: Callable[[int], bool]) -> dict[str, Any] | None:
        """Trains to the end of the job. Returns the summary on rank 0, None elsewhere; `lacks` of it, if there, says
        what the job was to keep and did not. Raises as `Trainer.run`."""
        steps = self.trainer.run(self.start_step, should_stop, self._stopping, follows=self.follows)
        report, progressive, best = self.trainer.report, self.trainer.step.progressive, self.trainer.best
        report.closing(steps)
        summary = summarize(
            self.sources,
            steps=steps,
            evaluation=report.last_evaluation,
            best=best.metrics(),
            progressive=None if progressive is None else progressive.total(),
        )
        report.ended()
        checkpoints, kept = self.trainer.checkpoints, best.facts().get("best_step")
        lacks = "" if summary is None or checkpoints is None else checkpoints.lacks(steps, kept)
        return summary if summary is None or not lacks else summary | {"lacks": lacks}

    def _stopping(self, step: int) -> None:
        figures = stopped_figures(self.sources, steps=step)
        if figures is not None:
            self.trainer.report.stopped(step, figures)
        self.trainer.report.ended()
