"""What the runs of a sweep found, put side by side: estimates per recipe. Draws, formats and writes nothing.

Bytes of a run are those of training: evaluation's reads are counted apart, warm-up steps are in. AUC losses are paired:
the AUC of fp32 with the same seed less that of the recipe, so above 0 something was lost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkeep.compression.recipes import BASELINES
from shardkeep.run.reader import MetricsTail
from shardkeep.sweep.plan import PlannedRun, SweepPlan, Variant
from shardkeep.sweep.student import Estimate, estimate

FP32 = BASELINES[0]
DIRECTIONS = ("pull", "push", "tower", "control")
TARGET_LOSS = 0.002
"""How far below fp32's AUC of the same seed the default target of the predicted time lies."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One evaluation on the way."""

    step: int
    samples: int
    """Trained samples until then."""
    train_bytes: int
    """Bytes of training until then: push, pull and tower of all workers."""
    auc: float


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of the plan."""

    planned: PlannedRun
    folder: Path
    status: str
    """completed, failed, stopped; missing = not run yet."""
    message: str
    summary: Mapping[str, Any]
    curve: tuple[CurvePoint, ...]
    times: tuple[str, str] | None = None
    """When its metrics begin and end, local time in ISO 8601."""

    @property
    def recipe(self) -> str:
        return self.planned.variant.name

    @property
    def done(self) -> bool:
        return self.status == "completed"

    @property
    def auc(self) -> float | None:
        found = (self.summary.get("eval") or {}).get("auc")
        return None if found is None else float(found)

    @property
    def logloss(self) -> float | None:
        found = (self.summary.get("eval") or {}).get("logloss")
        return None if found is None else float(found)

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
    def delivered_age(self) -> float | None:
        """How many steps old the oldest gradient was in what servers got of a row, the mean weighed by norms; 0 where
        none wait, None where single values wait, whose ages nobody knows."""
        if self.planned.config.compression.push.keep_values is not None or not self.done:
            return None
        shares = self.summary.get("delivered_by_age") or {"0": 1.0}
        return math.fsum(float(share) * _middle_age(int(least)) for least, share in shares.items())

    @property
    def oldest_read(self) -> int | None:
        """How many steps a row that training reads may lag behind: the staleness, and the lease of a cached row; None
        where nothing bounds it."""
        consistency, pull = self.planned.config.consistency, self.planned.config.compression.pull
        if consistency.mode == "async":
            return None
        return (consistency.staleness if consistency.mode == "bounded" else 0) + (pull.lease if pull.cache_rows else 0)

    @property
    def cpu_s_per_sample(self) -> float | None:
        """CPU seconds of all workers and servers for one sample of training."""
        cpu, steps = self.summary.get("cpu_ms") or {}, int(self.summary.get("steps") or 0)
        if not cpu or not steps or not self.samples:
            return None
        config = self.planned.config
        total_ms = config.workers * float(cpu["worker"]) + config.servers * float(cpu.get("server", 0.0))
        return total_ms / 1e3 / (self.samples / steps)


@dataclass(frozen=True, slots=True)
class RecipeResult:
    """One recipe over its seeds. What is not known is None."""

    variant: Variant
    runs: tuple[RunResult, ...]
    """Completed ones, by seed."""
    auc: Estimate | None
    logloss: Estimate | None
    auc_loss: Estimate | None
    """Over the seeds that fp32 has completed, too."""
    bytes_per_sample: float | None
    times_fewer: float | None
    """fp32's bytes per sample divided by these."""
    embedding_times_fewer: float | None
    """The same of pull and push alone."""

    @property
    def name(self) -> str:
        return self.variant.name


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

    def target_auc(self, seed: int) -> float | None:
        """The AUC that times are predicted for; None = fp32 is not done with this seed."""
        if self.plan.target_auc is not None:
            return self.plan.target_auc
        aucs = [run.auc for run in self.recipe(FP32).runs if run.planned.seed == seed and run.auc is not None]
        return aucs[0] - TARGET_LOSS if aucs else None

    @property
    def target_text(self) -> str:
        """What times are predicted to, in words."""
        if self.plan.target_auc is not None:
            return f"an AUC of {self.plan.target_auc:g}"
        return f"{TARGET_LOSS:g} below fp32's final AUC of the same seed"

    def losses(self) -> list[tuple[RunResult, float]]:
        """AUC losses of all runs that have a partner, recipe by recipe."""
        return [pair for variant in self.plan.variants for pair in _paired(self.runs, variant.name)]


def collect(plan: SweepPlan, runs: Path, command: str = "") -> Results:
    """Reads the run folders of a plan, `runs`/NAME each. `command`: what makes them again."""
    found = tuple(_read(run, runs / run.name) for run in plan.runs)
    fp32_bytes = _mean_bytes(found, FP32, DIRECTIONS)
    fp32_rows = _mean_bytes(found, FP32, ("pull", "push"))
    recipes = []
    for variant in plan.variants:
        own = tuple(sorted((r for r in found if r.recipe == variant.name and r.done), key=lambda r: r.planned.seed))
        per_sample = _mean_bytes(found, variant.name, DIRECTIONS)
        rows = _mean_bytes(found, variant.name, ("pull", "push"))
        recipes.append(
            RecipeResult(
                variant,
                own,
                estimate([run.auc for run in own if run.auc is not None]),
                estimate([run.logloss for run in own if run.logloss is not None]),
                estimate([loss for _, loss in _paired(found, variant.name)]),
                per_sample,
                fp32_bytes / per_sample if fp32_bytes and per_sample else None,
                fp32_rows / rows if fp32_rows and rows else None,
            )
        )
    return Results(plan, found, tuple(recipes), command)


def read_summary(run: Path) -> dict[str, Any] | None:
    """summary.json of a run folder; None where there is none that can be read."""
    try:
        return dict(json.loads((run / "summary.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _read(run: PlannedRun, folder: Path) -> RunResult:
    summary = read_summary(folder)
    if summary is None:
        return RunResult(run, folder, "missing", "", {}, ())
    status = str(summary.get("status"))
    records = list(MetricsTail(folder / "metrics.jsonl")) if status == "completed" else []
    times = [str(record["time"]) for record in records if "time" in record]
    ends = (min(times), max(times)) if times else None
    return RunResult(run, folder, status, str(summary.get("message", "")), summary, _curve(records), ends)


def _middle_age(least: int) -> float:
    """Of a bin of ages: 0, 1, 2-3, 4-7, ..."""
    return (3 * least - 1) / 2 if least else 0.0


def _curve(records: Iterable[Mapping[str, Any]]) -> tuple[CurvePoint, ...]:
    """Evaluations in order of their steps; of those repeated after a recovery the last."""
    found = {}
    for record in records:
        if record.get("kind") == "eval" and "train_bytes" in record and record.get("auc") is not None:
            step = int(record["step"])
            found[step] = CurvePoint(
                step, int(record["train_samples"]), int(record["train_bytes"]["total"]), record["auc"]
            )
    return tuple(found[step] for step in sorted(found))


def _paired(runs: Sequence[RunResult], recipe: str) -> list[tuple[RunResult, float]]:
    """The runs of a recipe whose seed fp32 has completed too, with their AUC losses."""
    against = {run.planned.seed: run.auc for run in runs if run.recipe == FP32 and run.done and run.auc is not None}
    found = []
    for run in runs:
        before = against.get(run.planned.seed)
        if run.recipe == recipe and run.done and run.auc is not None and before is not None:
            found.append((run, before - run.auc))
    return found


def _mean_bytes(runs: Sequence[RunResult], recipe: str, directions: Sequence[str]) -> float | None:
    own = [run for run in runs if run.recipe == recipe and run.done and run.samples]
    if not own:
        return None
    return math.fsum(sum(map(run.direction_bytes, directions)) / run.samples for run in own) / len(own)
