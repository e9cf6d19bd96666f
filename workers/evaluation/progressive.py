"""Progressive validation: each sample is scored by the model of its step, before the model trains on it.

So one pass over samples in the order of time gives both a model and its quality on samples that it had not seen (Blum,
Kalai and Langford, "Beating the Hold-Out", COLT 1999). Later epochs are not scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardkeep.ps.jagged import JaggedRows
from shardkeep.workers.blocks import BlockScorer
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.metrics.binned import BinnedScores
from shardkeep.workers.pipeline import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressiveValidation:
    """Scores steps in one generation. Every rank makes the same calls, `score` excepted."""

    scores: BinnedScores
    """Of this process; checkpoints and the states for recovery hold them."""
    scorer: BlockScorer
    every_steps: int
    """Steps between two reports; 0 = one report, at the end."""
    collective: Collective

    def score(self, prepared: Prepared, rows: JaggedRows) -> None:
        """Scores this rank's samples of a step with the rows and the dense model that the step begins with."""
        size = self.scorer.size
        for start in range(0, prepared.rank_samples, size):
            part = slice(start, min(start + size, prepared.rank_samples))
            batch = prepared.batch.slice(part.start, part.stop)
            self.scores.add(self.scorer.logits(batch, prepared.plan, rows, part), batch.label_BT, batch.weight_B)

    def after(self, step: int, *, last: bool) -> dict[str, Any] | None:
        """The metrics of the samples since the last report, if one is due after `step`. Blocks."""
        if not last and (not self.every_steps or (step + 1) % self.every_steps):
            return None
        metrics = self.scores.close(self.collective)
        return metrics if metrics["samples"] else None  # none if a generation was lost right after the report

    def total(self) -> dict[str, Any]:
        """The metrics of all samples of the job. Blocks until every rank has called it."""
        return self.scores.total(self.collective)
