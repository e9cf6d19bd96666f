"""What a sweep writes for programs: results.csv, a line per run, and summary.json, its comparisons and their origin."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardkeep.base.files import atomic_write
from shardkeep.config.overrides import flat
from shardkeep.sweep.compare import Comparison, against_fp32, all_pairs
from shardkeep.sweep.origin import origin
from shardkeep.sweep.results import DIRECTIONS, RecipeResult, Results, RunResult
from shardkeep.sweep.student import CONFIDENCE, POWER, Estimate


def write_results(results: Results, out: Path) -> list[Path]:
    """Writes results.csv and summary.json into `out`; their paths. Raises OSError."""
    table, summary = out / "results.csv", out / "summary.json"
    atomic_write(table, as_csv(results))
    atomic_write(summary, json.dumps(as_json(results), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return [table, summary]


def as_csv(results: Results) -> str:
    """One line per run of the plan, in its order."""
    parts = sorted({key for run in results.runs for key in run.parts()}, key=lambda k: (DIRECTIONS.index(k[0]), k[1]))
    rows = [_row(run, results.recipe(run.recipe).losses.get(run.planned.seed), parts) for run in results.runs]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def as_json(results: Results) -> dict[str, Any]:
    """What summary.json holds: first how much the comparison could have shown, then what each recipe did."""
    shows, against = results.shows, against_fp32(results)
    return {
        "comparison": {
            "confidence": CONFIDENCE,
            "power": POWER,
            "correction": "Holm",
            "seeds": list(results.plan.seeds),
            "smallest_auc_loss_it_could_show": None if shows is None else {"from": shows[0], "to": shows[1]},
            "fp32_auc": _plain(results.seed_noise),
        },
        "origin": asdict(origin(results)),
        "recipes": [_recipe_json(recipe, against.get(recipe.name)) for recipe in results.recipes],
        "pairs": [pair.as_json() for pair in all_pairs(results)],
        "not_completed": [
            {"run": run.planned.name, "status": run.status, "message": run.message}
            for run in results.runs
            if not run.done
        ],
    }


def _row(run: RunResult, loss: float | None, parts: Sequence[tuple[str, str]]) -> dict[str, Any]:
    summary, own = run.summary, run.parts()
    read = (summary.get("bytes") or {}).get("read") or {}
    return {
        "recipe": run.recipe,
        "seed": run.planned.seed,
        "status": run.status,
        "settings": run.planned.variant.text,
        "steps": summary.get("steps"),
        "samples": summary.get("samples"),
        "total_bytes": run.train_bytes if run.done else None,
        "bytes_per_sample": run.bytes_per_sample,
        **{f"{direction}_bytes": run.direction_bytes(direction) if run.done else None for direction in DIRECTIONS},
        **{f"{direction}_{part}_bytes": own.get((direction, part)) for direction, part in parts if part},
        "evaluation_bytes": sum(read.values()) if run.done else None,
        "auc": run.auc,
        "logloss": run.logloss,
        "normalized_entropy": run.scores.get("normalized_entropy"),
        "auc_loss": loss,
        "samples_per_s": summary.get("samples_per_s"),
        "cpu_s_per_sample": run.cpu_s_per_sample,
        "wall_s": summary.get("wall_s"),
        "run": run.folder.relative_to(run.folder.parents[1]).as_posix(),  # beside results.csv, which may be moved
        "message": run.message,
    }


def _plain(score: Estimate | None) -> dict[str, Any] | None:
    """Without what it shows: that is for differences."""
    return None if score is None else {key: value for key, value in asdict(score).items() if key != "shows"}


def _recipe_json(recipe: RecipeResult, against: Comparison | None) -> dict[str, Any]:
    return {
        "recipe": recipe.name,
        "settings": flat(recipe.variant.settings),
        "seeds": [run.planned.seed for run in recipe.runs],
        "bytes_per_sample": recipe.bytes_per_sample,
        "times_fewer_bytes": recipe.times_fewer,
        "times_fewer_embedding_bytes": recipe.embedding_times_fewer,
        "auc": _plain(recipe.auc),
        "logloss": _plain(recipe.logloss),
        "auc_loss": None if recipe.auc_loss is None else asdict(recipe.auc_loss),
        "p": None if against is None else against.p,
        "p_holm": None if against is None else against.p_holm,
        "verdict": None if against is None else against.verdict,
    }
