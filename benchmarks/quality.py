"""How well do the examples learn? Trains each through the command line and holds its AUC against a target.

    python benchmarks/quality.py --data FOLDER      # FOLDER holds adult/ and census_income_kdd/ (docs/guide/data.md)
    python benchmarks/quality.py --groups demo      # needs no files
    python benchmarks/quality.py --groups demo --smoke

Writes a dated JSON file into benchmarks/results and exits 1 when a target is missed. Runs that the file already
holds are not repeated, so the work can be done in pieces (--stop-after-s); each run keeps its own date and commit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quality_cases import GROUPS, Case

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FOLDERS = {"adult": "adult", "census": "census_income_kdd"}
LIMIT_S = 600.0
SMOKE = ("train.max_steps=12", "eval.max_samples=2000")

Run = dict[str, Any]


def main() -> int:
    options = _options()
    cases = [case for group in options.groups for case in GROUPS[group]]
    if options.data is None and any(case.example in FOLDERS for case in cases):
        print("quality.py: --data FOLDER is needed: it holds adult/ and census_income_kdd/ (docs/guide/data.md)")
        return 2
    began = time.monotonic()
    out = options.out or HERE / "results" / f"{datetime.now(UTC):%Y-%m-%d}-quality.json"
    runs: list[Run] = json.loads(out.read_text())["runs"] if out.exists() and not options.smoke else []
    done = {(run["name"], run["seed"]) for run in runs}
    for case in cases:
        for seed in options.seeds:
            if (case.name, seed) in done or time.monotonic() - began > options.stop_after_s:
                continue
            runs.append(_run(case, seed=seed, data=options.data, smoke=options.smoke))
            print(_line(runs[-1]), flush=True)
            if not options.smoke:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(_result(runs), indent=1) + "\n")
    missed = [] if options.smoke else misses(runs)
    for text in missed:
        print(f"missed: {text}")
    return 1 if missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of adult/ and census_income_kdd/")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[7])
    parser.add_argument("--smoke", action="store_true", help="a few steps of each; no targets, no result file")
    parser.add_argument("--out", type=Path, help="result file; left out = results/DATE-quality.json")
    parser.add_argument("--stop-after-s", type=float, default=math.inf, help="start no run after so many seconds")
    return parser.parse_args()


def _run(case: Case, *, seed: int, data: Path | None, smoke: bool) -> Run:
    """One job through the command line, in processes of its own; raises when it fails."""
    settings = [f"seed={seed}", *case.settings, *(SMOKE if smoke else ())]
    if case.example in FOLDERS:
        assert data is not None
        settings.append(f"data.root={(data / FOLDERS[case.example]).resolve()}")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "shardkeep", "train", str(ROOT / "examples" / f"{case.example}.yaml")]
        command += ["--run-dir", str(run), *(part for setting in settings for part in ("--set", setting))]
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))  # linear_model:Linear
        load, began = os.getloadavg()[0], time.monotonic()
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT_S, env={**os.environ, "PYTHONPATH": path}
        )
        seconds = time.monotonic() - began
        if done.returncode:
            raise SystemExit(f"{case.name}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        summary = json.loads((run / "summary.json").read_text())
    return _record(case, seed, summary, seconds) | {"load_before": round(load, 1)}


def _record(case: Case, seed: int, summary: dict[str, Any], seconds: float) -> Run:
    kept = ("steps", "samples", "samples_per_s", "staleness", "dropped_rows", "skipped_steps", "state_digest")
    return {
        "group": case.group,
        "name": case.name,
        "example": case.example,
        "settings": list(case.settings),
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "at_least": case.at_least,
        **{key: summary["eval"].get(key) for key in ("auc", "best_auc", "logloss", "calibration")},
        "seconds": round(seconds, 2),
        **{key: summary[key] for key in kept},
        "bytes_per_sample": summary["bytes"]["per_sample"],
        "versions": summary["versions"],
        "machine": summary["machine"],
    }


def misses(runs: Sequence[Run]) -> list[str]:
    """One line for each target of the issue that a run misses."""
    lines = [
        f"{_title(r)}: AUC {r['auc']:.4f} is below {r['at_least']}"
        for r in runs
        if r["at_least"] is not None and not r["auc"] >= r["at_least"]
    ]
    for run in (r for r in runs if r["group"] == "demo"):
        sync = next((r for r in runs if r["name"] == "demo sync" and r["seed"] == run["seed"]), None)
        lines += [f"{_title(run)}: {text}" for holds, text in _demo_targets(run, sync) if not holds]
    return lines


def _demo_targets(run: Run, sync: Run | None) -> list[tuple[bool, str]]:
    behind = run["best_auc"] - run["auc"]
    if run["name"] == "demo linear":
        return [(behind >= 0.02, f"only {behind:.4f} behind the teacher; a linear model stays 0.02 behind")]
    targets = [
        (behind <= 0.02, f"{behind:.4f} behind the teacher; allowed: 0.02"),
        (run["seconds"] <= 90.0, f"took {run['seconds']:.0f} s; allowed: 90 s"),
    ]
    if sync is not None:
        apart = sync["auc"] - run["auc"]
        targets.append((apart <= 0.003, f"{apart:.4f} behind sync; allowed: 0.003"))
    return targets


def _result(runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "question": "how well do the examples learn?",
        "missed": misses(runs),
        "summary": [_over_seeds(runs, name) for name in dict.fromkeys(run["name"] for run in runs)],
        "runs": list(runs),
    }


def _over_seeds(runs: Sequence[Run], name: str) -> dict[str, Any]:
    own = [run for run in runs if run["name"] == name]
    spread: dict[str, Callable[[list[float]], float]] = {"min": min, "median": statistics.median, "max": max}
    numbers = ("auc", "logloss", "samples_per_s", "seconds")
    return {"name": name} | {key: {k: f([run[key] for run in own]) for k, f in spread.items()} for key in numbers}


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _title(run: Run) -> str:
    return f"{run['name']}, seed {run['seed']}"


def _line(run: Run) -> str:
    best = f" of {run['best_auc']:.4f}" if run["best_auc"] is not None else ""
    speed = f"{run['samples_per_s']:,.0f} samples/s  {run['seconds']:.1f} s"
    return f"{_title(run):<40} AUC {run['auc']:.4f}{best}  logloss {run['logloss']:.4f}  {speed}"


if __name__ == "__main__":
    sys.exit(main())
