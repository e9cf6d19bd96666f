"""How many bytes does each table add to a step, if the largest one alone is compressed or frozen?

Counted by `shardkeep estimate`, which pulls and pushes some steps of the data in its own process. Trains nothing, so it
says nothing about AUC.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import harness

SIZES = (100, 10_000, 1_000_000)
"""Ids of the tables."""
LOSSY = {"values": "int8", "keep": 0.01}
POOL = {"pool_rows": 200_000}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "int8, keep 1 %": {"compression": {"push": {**LOSSY, **POOL}, "pull": {"values": "int8"}}},
    "the largest alone": {
        "compression": {"push": {**LOSSY, **POOL}, "pull": {"values": "int8"}},
        "tables": {f"C{number}": {"compression": "none"} for number in range(1, len(SIZES))},
    },
    "the largest frozen": {"tables": {f"C{len(SIZES)}": {"freeze": True}}},
}


def bytes_of(case: dict[str, Any], samples: int) -> dict[str, dict[str, float]]:
    """Bytes of a step, by table and direction."""
    from shardkeep.config import JobConfig
    from shardkeep.estimate.estimate import estimate

    data = {"synthetic": {"train_samples": samples, "eval_samples": 100, "num_dense": 2, "table_sizes": list(SIZES)}}
    job = {"name": "tables", "servers": 2, "workers": 2, "data": data, "train": {"batch_size": 1024}}
    found = estimate(JobConfig.model_validate({**job, **case}), gbit_per_s=1.0)
    return {
        table["name"]: {key: table[key] for key in ("pull_bytes", "push_bytes")} for table in found["step"]["tables"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="few samples: does it run at all")
    parser.add_argument("--json", type=Path, help="write the bytes to this file")
    options = parser.parse_args()
    found = {name: bytes_of(case, 10_000 if options.smoke else 200_000) for name, case in CASES.items()}
    for name, tables in found.items():
        shown = ", ".join(f"{t} {b['pull_bytes']:,.0f} + {b['push_bytes']:,.0f}" for t, b in tables.items())
        print(f"{name:20} bytes pulled + pushed a step: {shown}")
    harness.write(options.json, "table_bytes", {"sizes": SIZES, "bytes": found})


if __name__ == "__main__":
    main()
