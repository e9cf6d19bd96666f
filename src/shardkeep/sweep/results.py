"""What the runs of a sweep found, put side by side: estimates per recipe. Draws, formats and writes nothing.

Bytes of a run are those of training: evaluation's reads are counted apart, warm-up steps are in. AUC losses are paired:
the AUC of fp32 with the same seed less that of the recipe, so above 0 something was lost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardkeep.compression.recipes import BASELINES
from shardkeep.records.lines import Tail
from shardkeep.records.record import Record, numbers
from shardkeep.records.training import Evaluation
from shardkeep.sweep.plan import PlannedRun, SweepPlan, Variant
from shardkeep.sweep.student import Estimate, estimate

FP32 = BASELINES[0]
DIRECTIONS = ("pull", "push", "tower", "control")


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One evaluation on the way."""

    step: int
    samples: int
    """Trained samples until then."""
    train_bytes: int
    """Bytes of training until then: push, pull and tower of all workers."""
    auc: float


@dataclass(frozen=True)
class RunResult:
    """One run of the plan."""

    planned: PlannedRun
    folder: Path
    summary: Mapping[str, Any]
    """Empty where there is none."""
    records: Sequence[Record]
    """Its metrics, where it completed."""

    @property
    def status(self) -> str:
        """completed, failed, stopped; missing = not run yet."""
        return str(self.summary.get("status", "missing"))

    @property
    def message(self) -> str:
        return str(self.summary.get("message", ""))

    @property
    def recipe(self) -> str:
        return self.planned.variant.name

    @property
    def done(self) -> bool:
        return self.status == "completed"

    @property
    def scores(self) -> Mapping[str, Any]:
        """The last evaluation."""
        return numbers(self.summary.get("eval"))

    @cached_property
    def curve(self) -> tuple[CurvePoint, ...]:
        """Evaluations in order of their steps; of those repeated after a recovery the last."""
        found = {}
        for record in self.records:
            if (
                isinstance(record, Evaluation)
                and record.train_bytes
                and (auc := record.metrics.get(self.planned.key("auc"))) is not None
            ):
                step, size = record.step or 0, record.train_bytes["total"]
                found[step] = CurvePoint(step, record.train_samples or 0, size, auc)
        return tuple(found[step] for step in sorted(found))

    @property
    def auc(self) -> float | None:
        return self.scores.get(self.planned.key("auc"))

    @property
    def logloss(self) -> float | None:
        return self.scores.get(self.planned.key("logloss"))

    @property
    def samples(self) -> int:
        return int(self.summary.get("samples") or 0)

    def parts(self) -> dict[tuple[str, str], int]:
        """Bytes of training by direction and part."""
        counted = self.summary.get("bytes") or {}
        found = {}
        for direction in DIRECTIONS:
            own = counted.get(direction, {})
            for part, size in own.items() if isinstance(own, Mapping) else [("", own)]:
                found[direction, part] = int(size)
        return found

    def direction_bytes(self, direction: str) -> int:
        return sum(size for (own, _), size in self.parts().items() if own == direction)

    @property
    def train_bytes(self) -> int:
        return sum(self.parts().values())

    @property
    def bytes_per_sample(self) -> float | None:
        return self.train_bytes / self.samples if self.samples else None

    @property
    def cpu_s_per_sample(self) -> float | None:
        """CPU seconds of all workers and servers for one sample of training."""
        cpu, steps = self.summary.get("cpu_ms") or {}, int(self.summary.get("steps") or 0)
        if not cpu or not steps or not self.samples:
            return None
        config = self.planned.config
        total_ms = config.workers * float(cpu["worker"]) + config.servers * float(cpu.get("server", 0.0))
        return total_ms / 1e3 / (self.samples / steps)


@dataclass(frozen=True)
class RecipeResult:
    """One recipe over its seeds. What is not known is None."""

    variant: Variant
    runs: tuple[RunResult, ...]
    """Completed ones, by seed."""
    fp32: tuple[RunResult, ...]
    """Those of the baseline."""

    @property
    def name(self) -> str:
        return self.variant.name

    @cached_property
    def auc(self) -> Estimate | None:
        return estimate([run.auc for run in self.runs if run.auc is not None])

    @cached_property
    def logloss(self) -> Estimate | None:
        return estimate([run.logloss for run in self.runs if run.logloss is not None])

    @cached_property
    def losses(self) -> dict[int, float]:
        """The AUC losses of the seeds that fp32 has completed, too."""
        return paired(self.fp32, self.runs)

    @cached_property
    def auc_loss(self) -> Estimate | None:
        return estimate(list(self.losses.values()))

    @property
    def bytes_per_sample(self) -> float | None:
        return _mean_bytes(self.runs, DIRECTIONS)

    @property
    def times_fewer(self) -> float | None:
        """fp32's bytes per sample divided by these."""
        return self._times_fewer(DIRECTIONS)

    @property
    def embedding_times_fewer(self) -> float | None:
        """The same of pull and push alone."""
        return self._times_fewer(("pull", "push"))

    def _times_fewer(self, directions: Sequence[str]) -> float | None:
        before, own = (_mean_bytes(runs, directions) for runs in (self.fp32, self.runs))
        return before / own if before and own else None


@dataclass(frozen=True)
class Results:
    """All runs of a plan as far as they are done."""

    plan: SweepPlan
    runs: tuple[RunResult, ...]
    recipes: tuple[RecipeResult, ...]
    command: str = ""
    """What makes them again."""

    @property
    def completed(self) -> tuple[RunResult, ...]:
        return tuple(run for run in self.runs if run.done)

    def recipe(self, name: str) -> RecipeResult:
        return next(recipe for recipe in self.recipes if recipe.name == name)

    @property
    def seed_noise(self) -> Estimate | None:
        """fp32's AUC over the seeds."""
        return self.recipe(FP32).auc

    @property
    def shows(self) -> tuple[float, float] | None:
        """The smallest and the largest of the AUC losses that the recipes' comparisons could have shown."""
        found = [
            r.auc_loss.shows for r in self.recipes if r.name != FP32 and r.auc_loss and r.auc_loss.shows is not None
        ]
        return (min(found), max(found)) if found else None


def paired(first: Sequence[RunResult], second: Sequence[RunResult]) -> dict[int, float]:
    """AUC of the first runs less that of the second, by the seeds that both have."""
    mine, other = ({run.planned.seed: run.auc for run in runs if run.auc is not None} for runs in (first, second))
    return {seed: auc - other[seed] for seed, auc in mine.items() if seed in other}


def collect(plan: SweepPlan, runs: Path, command: str = "") -> Results:
    """Reads the run folders of a plan, `runs`/NAME each. `command`: what makes them again."""
    found = tuple(_read(run, runs / run.name) for run in plan.runs)
    by_name = {
        variant.name: tuple(
            sorted((r for r in found if r.recipe == variant.name and r.done), key=lambda r: r.planned.seed)
        )
        for variant in plan.variants
    }
    recipes = (RecipeResult(variant, by_name[variant.name], by_name[FP32]) for variant in plan.variants)
    return Results(plan, found, tuple(recipes), command)


def read_summary(run: Path) -> dict[str, Any] | None:
    """summary.json of a run folder; None where there is none that can be read."""
    try:
        return dict(json.loads((run / "summary.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _read(run: PlannedRun, folder: Path) -> RunResult:
    summary = read_summary(folder) or {}
    completed = summary.get("status") == "completed"
    return RunResult(run, folder, summary, list(Tail(folder / "metrics.jsonl")) if completed else [])


def _mean_bytes(runs: Sequence[RunResult], directions: Sequence[str]) -> float | None:
    """Bytes per sample."""
    own = [sum(map(run.direction_bytes, directions)) / run.samples for run in runs if run.samples]
    return math.fsum(own) / len(own) if own else None
