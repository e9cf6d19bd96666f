"""How long would each recipe of a sweep take to an AUC over a slower network? A model fed with measured bytes and CPU
time.

    python benchmarks/predicted_times.py sweep.yaml --out runs/sweep --mbit 100 1000 10000

reads what `shardkeep sweep` has written to the folder, and runs nothing. docs/research/method.md explains the model.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

from shardkeep.core_plan import worker_threads
from shardkeep.experiments.plan import FP32, load_sweep
from shardkeep.experiments.results import Results, Row, collect, done
from shardkeep.records.lines import Tail
from shardkeep.records.training import Evaluation
from shardkeep.run.reader import RunReader

TARGET_LOSS = 0.002
"""How far below fp32's AUC of the same seed the default target lies."""


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


def step_cost(results: Results, row: Row, out: Path) -> StepCost | None:
    """None where the run was too short to measure its CPU time."""
    cpu, steps = (RunReader(out / row["run"]).last_summary() or {}).get("cpu_ms") or {}, row["steps"]
    if not cpu or not steps:
        return None
    config = next(trial.config for trial in results.plan.trials if row["run"].endswith(f"/{trial.name}"))
    links = min(max(config.servers, 1), config.workers)
    wire = ((row["pull_bytes"] + row["push_bytes"]) / links + row["tower_bytes"] / config.workers) / steps
    compute_ms = float(cpu["worker"]) / worker_threads(config) + float(cpu.get("server", 0.0))
    return StepCost(compute_ms / 1e3, wire, row["samples"] / steps)


def samples_to(run: Path, metric: str, auc: float) -> float | None:
    """Samples trained when the AUC first was there, between two evaluations on the line; None = never.

    Before the first evaluation nothing is known, so a run that is there already counts as long as that."""
    before = None
    records = (each for each in Tail(run / "metrics.jsonl") if isinstance(each, Evaluation))
    points = {each.step: (each.train_samples or 0, each.metrics[metric]) for each in records if metric in each.metrics}
    for _, (samples, score) in sorted(points.items()):
        if score >= auc:
            if before is None:
                return float(samples)
            return before[0] + (auc - before[1]) / (score - before[1]) * (samples - before[0])
        before = (samples, score)
    return None


def target_of(results: Results, seed: int, target_auc: float | None) -> float | None:
    """The AUC that a run of this seed has to reach; None = fp32 is not done with it."""
    if target_auc is not None:
        return target_auc
    aucs = [row["auc"] for row in done(results.rows, FP32) if row["seed"] == seed and row["auc"] is not None]
    return aucs[0] - TARGET_LOSS if aucs else None


def predict(
    results: Results, recipe: str, out: Path, mbit: float, target_auc: float | None = None
) -> list[tuple[float, float]] | None:
    """Seconds to the target of each seed: nothing overlaps, everything overlaps. None where a run has not reached it,
    or was not measured."""
    targets = [(row, target_of(results, row["seed"], target_auc)) for row in done(results.rows, recipe)]
    found = [
        (step_cost(results, row, out), samples_to(out / row["run"], results.plan.metric, auc))
        for row, auc in targets
        if auc is not None
    ]
    known = [(cost, samples) for cost, samples in found if cost is not None and samples is not None]
    if not known or len(known) < len(found):
        return None
    times = [(cost.seconds(mbit), samples / cost.samples) for cost, samples in known]
    return [(apart * steps, together * steps) for (apart, together), steps in times]


def line_of(results: Results, recipe: str, out: Path, mbits: list[float], target_auc: float | None) -> str:
    """`balanced  10.2 ± 0.1 / 8.0 ± 0.1 s at 100 Mbit/s ...`, or why there is no time."""
    times = {mbit: predict(results, recipe, out, mbit, target_auc) for mbit in mbits}
    if not all(times.values()):
        measured = all(step_cost(results, row, out) is not None for row in done(results.rows, recipe))
        return "the AUC was not reached with every seed" if measured else "CPU time not measured: too few steps"
    return "   ".join(
        f"{mbit:g} Mbit/s: {' / '.join(map(_seconds, zip(*found, strict=True)))} s"
        for mbit, found in times.items()
        if found
    )


def _seconds(values: tuple[float, ...]) -> str:
    """Mean and standard deviation."""
    spread = f" \N{PLUS-MINUS SIGN} {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):,.1f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="the sweep's YAML file")
    parser.add_argument("--out", type=Path, required=True, help="folder of the sweep")
    parser.add_argument(
        "--mbit", type=float, nargs="+", default=[100.0, 1_000.0, 10_000.0], help="bandwidths of a link"
    )
    parser.add_argument("--target-auc", type=float, help=f"default: {TARGET_LOSS:g} below fp32's of the same seed")
    parser.add_argument("--smoke", action="store_true", help="has no effect: it only reads")
    given = parser.parse_args()
    results = collect(load_sweep(given.sweep), given.out)
    print("seconds to the AUC when computing and sending do not overlap / when they do")
    for each in results.figures:
        print(f"{each.recipe:<16} {line_of(results, each.recipe, given.out, given.mbit, given.target_auc)}")


if __name__ == "__main__":
    main()
