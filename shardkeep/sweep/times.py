"""How long a recipe would take to reach an AUC over a slower network: a model fed with measured bytes and CPU time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardkeep.sweep.results import RecipeResult, Results, RunResult
from shardkeep.sweep.student import Estimate, estimate

MBIT_PER_S = (100, 1_000, 10_000)
MODEL = (
    "Each process is alone on its machine, with a link of the given bandwidth. A step computes for the CPU time that "
    "was measured here, of one worker (divided by its threads) and one server, and sends over the busiest link for its "
    "bytes divided by the bandwidth: a worker's or server's share of pull and push, then a worker's of the tower. "
    "Nothing overlaps: the time of a step is the sum of both. The second figure is the larger of the two instead, as "
    "if they overlapped wholly; training lies between. Each is the mean over the seeds with its standard deviation. "
    "Latency, packet headers, evaluation and start-up are left out."
)


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step of a run costs."""

    compute_s: float
    wire_bytes: float
    """Over the busiest link, all phases of a step one after the other."""
    samples: float

    def seconds(self, mbit_per_s: float) -> tuple[float, float]:
        """Of a step: nothing overlaps, everything overlaps."""
        wire_s = 8.0 * self.wire_bytes / (1e6 * mbit_per_s)
        return self.compute_s + wire_s, max(self.compute_s, wire_s)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds to the target AUC at one bandwidth, over the seeds."""

    mbit_per_s: float
    sum_s: Estimate
    """Nothing overlaps."""
    max_s: Estimate
    """Everything overlaps."""


def step_cost(run: RunResult) -> StepCost | None:
    """None where the run was too short to measure its CPU time."""
    cpu, steps = run.summary.get("cpu_ms") or {}, int(run.summary.get("steps") or 0)
    if not cpu or not steps:
        return None
    config = run.planned.config
    links = min(max(config.servers, 1), config.workers)
    rows = run.direction_bytes("pull") + run.direction_bytes("push")
    wire = (rows / links + run.direction_bytes("tower") / config.workers) / steps
    compute_ms = float(cpu["worker"]) / config.threads + float(cpu.get("server", 0.0))
    return StepCost(compute_ms / 1e3, wire, run.samples / steps)


def samples_to(run: RunResult, auc: float) -> float | None:
    """Samples trained when the AUC first was there, between two evaluations on the line; None = never.

    Before the first evaluation nothing is known, so a run that is there already counts as long as that."""
    before = None
    for point in run.curve:
        if point.auc >= auc:
            if before is None:
                return float(point.samples)
            share = (auc - before.auc) / (point.auc - before.auc)
            return before.samples + share * (point.samples - before.samples)
        before = point
    return None


def predict(
    results: Results, recipe: RecipeResult, bandwidths: Sequence[float] = MBIT_PER_S
) -> list[Prediction] | None:
    """The times of a recipe to the target; None where a run has not reached it, or was not measured."""
    targets = [(run, results.target_auc(run.planned.seed)) for run in recipe.runs]
    costs = [(step_cost(run), samples_to(run, auc)) for run, auc in targets if auc is not None]
    known = [(cost, samples) for cost, samples in costs if cost is not None and samples is not None]
    if not known or len(known) < len(costs):
        return None
    found = []
    for mbit in bandwidths:
        pairs = [[seconds * samples / cost.samples for seconds in cost.seconds(mbit)] for cost, samples in known]
        together, overlapped = (estimate(times) for times in zip(*pairs, strict=True))
        if together is not None and overlapped is not None:
            found.append(Prediction(mbit, together, overlapped))
    return found


def why_no_time(results: Results, recipe: RecipeResult) -> str:
    """Why `predict` tells nothing of a recipe."""
    if any(step_cost(run) is None for run in recipe.runs):
        return "CPU time not measured: too few steps"
    targets = [(run, results.target_auc(run.planned.seed)) for run in recipe.runs]
    reached = [auc is not None and samples_to(run, auc) is not None for run, auc in targets]
    return f"reached by {sum(reached)} of {len(reached)} seeds"


def bandwidth_name(mbit_per_s: float) -> str:
    """`100 Mbit/s`, `10 Gbit/s`."""
    return f"{mbit_per_s / 1000:g} Gbit/s" if mbit_per_s >= 1000 else f"{mbit_per_s:g} Mbit/s"
