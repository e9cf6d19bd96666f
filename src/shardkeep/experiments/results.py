"""What the trials of a sweep found: a row per trial, and figures per variant beside fp32. Draws and runs nothing.

Bytes are those of training: evaluation's reads are counted apart, warm-up steps are in. AUC losses are paired: the AUC
of fp32 with the same seed less that of the variant, so above 0 something was lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from shardkeep.analysis.significance import Estimate, estimate, holm, verdict
from shardkeep.base.files import atomic_write, replacing
from shardkeep.config.overrides import flat, flow
from shardkeep.experiments.plan import FP32, SweepPlan, Trial, Variant
from shardkeep.records.lines import Tail
from shardkeep.records.record import numbers
from shardkeep.records.training import Evaluation
from shardkeep.run.reader import RunReader

DIRECTIONS = ("pull", "push", "tower", "control")
Row = dict[str, Any]


@dataclass(frozen=True)
class Figures:
    """One variant over its seeds; what is not known is None. "Times fewer": fp32's bytes per sample divided by these;
    `p_holm`: corrected over all variants; `could_have_shown`: `Estimate.shows` of `auc_loss`."""

    recipe: str
    seeds: int
    bytes_per_sample: float | None
    times_fewer_bytes: float | None
    times_fewer_embedding_bytes: float | None
    auc: Estimate | None
    logloss: Estimate | None
    auc_loss: Estimate | None
    p_holm: float | None
    result: str
    could_have_shown: float | None
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Results:
    """The trials of a plan as far as they are done. `rows`: of all trials, in the order of the plan; `origin`: machine,
    versions and commit of the trials."""

    plan: SweepPlan
    rows: Sequence[Row]
    figures: Sequence[Figures]
    origin: Mapping[str, str]

    def write(self, out: Path) -> None:
        """Writes results.csv, results.parquet and summary.json. Raises OSError."""
        write_table(self.rows, out, "results")
        found = {"recipes": [asdict(each) for each in self.figures], "origin": self.origin}
        atomic_write(out / "summary.json", json.dumps(found, indent=2, ensure_ascii=False) + "\n")


def collect(plan: SweepPlan, out: Path) -> Results:
    """Reads the run folders of a plan in the folder of its sweep."""
    summaries = [RunReader(out / f"runs/{trial.name}").last_summary() or {} for trial in plan.trials]
    parts = dict.fromkeys((way, part) for way in DIRECTIONS[:3] for each in summaries
                          for part in sorted((each.get("bytes") or {}).get(way, ())))  # fmt: skip
    rows = [_row(plan, *pair, list(parts)) for pair in zip(plan.trials, summaries, strict=True)]
    fp32 = {row["seed"]: row["auc"] for row in done(rows, FP32)}
    for row in rows:
        before, now = fp32.get(row["seed"]), row["auc"]
        row["auc_loss"] = None if before is None or now is None else before - now
    losses = [estimate(_values(done(rows, each.name), "auc_loss")) for each in plan.variants]
    tested = {at: loss.p for at, loss in enumerate(losses) if at and loss is not None and loss.p is not None}
    p_holm = dict(zip(tested, holm(list(tested.values())), strict=True))
    known = enumerate(zip(plan.variants, losses, strict=True))
    origin = {key: " | ".join(sorted({json.dumps(each[key]) for each in summaries if key in each}))
              for key in ("machine", "versions", "commit")}  # fmt: skip
    return Results(plan, rows, [_figures(rows, *each, p_holm.get(at)) for at, each in known], origin)


def curve_of(run: Path, metric: str) -> list[tuple[float, float]]:
    """(MB of training so far, metric) of a run's evaluations, in order; of those after a recovery the last."""
    found = {each.step: each for each in Tail(run / "metrics.jsonl") if isinstance(each, Evaluation)}
    known = [each for _, each in sorted(found.items()) if metric in each.metrics and each.train_bytes]
    return [(each.train_bytes["total"] / 1e6, each.metrics[metric]) for each in known]


def write_table(rows: Sequence[Row], out: Path, name: str) -> None:
    """Writes rows with the same keys as NAME.csv and NAME.parquet. Raises OSError."""
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import csv, parquet

    table = pa.Table.from_pylist(list(rows))
    with replacing([out / f"{name}.csv", out / f"{name}.parquet"]) as (text, binary):
        csv.write_csv(table, text)
        parquet.write_table(table, binary)


def _row(plan: SweepPlan, trial: Trial, summary: Mapping[str, Any], parts: Sequence[tuple[str, str]]) -> Row:
    """The row of a trial without its loss. `summary`: empty if there is none; `parts`: of the ledgers of all trials."""
    counted, variant = summary.get("bytes") or {}, next(v for v in plan.variants if v.name == trial.variant)
    scores, samples = numbers(summary.get("eval")), int(summary.get("samples") or 0)
    sizes = {way: sum(counted[way].values()) if way in counted else None for way in DIRECTIONS[:3]}
    sizes["control"] = counted.get("control")
    total = sum(size or 0 for size in sizes.values())
    cpu, steps = summary.get("cpu_ms") or {}, int(summary.get("steps") or 0)
    cpu_ms = trial.config.workers * cpu.get("worker", 0.0) + trial.config.servers * cpu.get("server", 0.0)
    return {
        "recipe": trial.variant,
        "seed": trial.config.seed,
        "status": summary.get("status", "missing"),
        "settings": flow(dict(sorted(flat(variant.settings).items()))),
        **{key: trial.settings.get(key) for each in plan.variants for key in each.point},
        "steps": steps,
        "samples": samples,
        "total_bytes": total if counted else None,
        "bytes_per_sample": total / samples if samples else None,
        **{f"{way}_bytes": size for way, size in sizes.items()},
        **{f"{way}_{part}_bytes": counted.get(way, {}).get(part) for way, part in parts},
        "evaluation_bytes": sum((counted.get("read") or {}).values()) if counted else None,
        **{name: scores.get(plan.key(name)) for name in ("auc", "logloss", "normalized_entropy")},
        "auc_loss": None,
        "samples_per_s": summary.get("samples_per_s"),
        "cpu_s_per_sample": cpu_ms / 1e3 * steps / samples if cpu_ms and samples else None,
        "wall_s": summary.get("wall_s"),
        "run": f"runs/{trial.name}",  # beside the table, which may be moved
        "message": str(summary.get("message", "")),
    }


def _figures(rows: Sequence[Row], variant: Variant, loss: Estimate | None, p: float | None) -> Figures:
    own, fp32 = done(rows, variant.name), done(rows, FP32)

    def fewer(*ways: str) -> float | None:
        each = ((rows, [f"{way}_bytes" for way in ways]) for rows in (fp32, own))
        before, now = (
            [sum(row[key] or 0 for key in keys) / (row["samples"] or 1) for row in rows] for rows, keys in each
        )
        return fmean(before) / fmean(now) if before and any(now) else None

    return Figures(
        recipe=variant.name,
        seeds=len(own),
        bytes_per_sample=fmean(known) if (known := _values(own, "bytes_per_sample")) else None,
        times_fewer_bytes=fewer(*DIRECTIONS),
        times_fewer_embedding_bytes=fewer("pull", "push"),
        auc=estimate(_values(own, "auc")),
        logloss=estimate(_values(own, "logloss")),
        auc_loss=loss,
        p_holm=p,
        result="" if loss is None or variant.name == FP32 else verdict(loss, p),
        could_have_shown=None if loss is None or variant.name == FP32 else loss.shows,
        settings=flat(variant.settings),
    )


def done(rows: Sequence[Row], variant: str) -> list[Row]:
    """The rows of the completed trials of a variant."""
    return [row for row in rows if row["recipe"] == variant and row["status"] == "completed"]


def _values(rows: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in rows if row[key] is not None]
