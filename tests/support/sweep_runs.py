"""Run folders as a sweep finds them, made by hand; as a script, a stand-in for `shardkeep train` that makes one.

A stand-in's run named in the file `fail` of its sweep fails, one named in `hang` waits until its stdin ends; every
start is a line of `started`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from shardkeep.config import parse_config
from shardkeep.run.origin.code import code_of

TRAIN = (sys.executable, "-m", "tests.support.sweep_runs")
"""The stand-in."""
BASE: dict[str, Any] = {
    "name": "tiny",
    "servers": 1,
    "workers": 2,
    "data": {"synthetic": {"train_samples": 1000, "eval_samples": 100, "table_sizes": [50], "num_dense": 2}},
    "train": {"batch_size": 50},
}
BYTES = {"fp32": 100_000, "fp16": 50_000}  # values per direction
STEPS, SAMPLES = 10, 1000


def write_sweep(folder: Path, **changes: Any) -> Path:
    """A sweep file of the tiny base with two recipes and two seeds, except `changes`; None leaves a key out."""
    keys = {"base": BASE, "recipes": ["fp32", "fp16"], "seeds": [1, 2], **changes}
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in keys.items() if v is not None}, sort_keys=False))
    return path


def write_run(
    folder: Path,
    config_yaml: str,
    *,
    auc: float,
    value_bytes: int = 100_000,
    status: str = "completed",
    code_folder: Path | None = None,
) -> None:
    """A run folder with two evaluations, 1,000 samples in ten steps, and bytes in every class."""
    folder.mkdir(parents=True)
    digests = code_of(parse_config(config_yaml), code_folder)
    (folder / "code.json").write_text(json.dumps({"digests": digests}))
    (folder / "config.yaml").write_text(config_yaml)
    counts = {
        "push": {"ids": 8000, "values": value_bytes, "framing": 500},
        "pull": {"ids": 8000, "values": value_bytes, "framing": 500},
        "tower": {"values": 20_000},
    }
    train_bytes = {direction: sum(parts.values()) for direction, parts in counts.items()}
    total = sum(train_bytes.values())
    with (folder / "metrics.jsonl").open("w") as file:
        for step, score in ((STEPS // 2, auc - 0.1), (STEPS, auc)):
            share = step / STEPS
            record = {
                "time": f"2026-11-22T10:00:{step:02d}.000",
                "kind": "eval",
                "step": step,
                "auc": score,
                "train_samples": int(share * SAMPLES),
                "train_bytes": {"total": int(share * total)},
            }
            file.write(json.dumps(record) + "\n")
    summary = {
        "status": status,
        "steps": STEPS,
        "samples": SAMPLES,
        "wall_s": 2.0,
        "samples_per_s": 500.0,
        "cpu_ms": {"steps": 8, "worker": 20.0, "server": 5.0},
        "eval": {"auc": auc, "logloss": 0.5, "normalized_entropy": 0.9, "samples": 100},
        "bytes": {
            **counts,
            "read": {"values": 7000},
            "control": 1000,
            "total": total + 8000,
            "per_sample": (total + 1000) / SAMPLES,
        },
        "tables": [{"name": "sparse0", "rows": 50, "bytes": 8192}],
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "machine": {"system": "Linux 6.18", "processor": "A CPU, family 25 model 17", "cores": 2, "memory_gb": 25.3},
        "commit": "0123456789abcdef",
    }
    (folder / "summary.json").write_text(json.dumps(summary))


def main() -> int:
    job, run = Path(sys.argv[1]), Path(sys.argv[3])
    sweep = run.parent.parent
    with (sweep / "started").open("a") as file:
        file.write(f"{run.name}\n")
    if run.name in _lines(sweep / "fail"):
        print("error: this run fails on purpose", file=sys.stderr)
        return 2 if (sweep / "as-user").exists() else 1
    if run.name in _lines(sweep / "hang"):
        run.mkdir()
        while os.read(0, 1024):
            pass
        (sweep / "orphan-ended").touch()
        return 1
    config = yaml.safe_load(job.read_text())
    push = config["compression"]["push"]
    lost = 0.01 if push["values"] == "fp16" else 0.0
    score, size = 0.8 + 0.001 * config["seed"] - lost, BYTES[push["values"]]
    code = Path(sys.argv[sys.argv.index("--code") + 1]) if "--code" in sys.argv else None
    write_run(run, job.read_text(), auc=score, value_bytes=size, code_folder=code)
    return 0


def script() -> None:
    sys.exit(main())


def _lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


if __name__ == "__main__":
    script()
