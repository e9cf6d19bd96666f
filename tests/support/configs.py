"""Configs of small jobs for tests of whole jobs."""

from __future__ import annotations

from typing import Any

TRAIN = {"batch_size": 50, "report_every_s": 0.1}
TINY: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "servers": 2,
    "workers": 2,
    "data": {"synthetic": {"train_samples": 1950, "eval_samples": 300, "num_dense": 3, "table_sizes": [50, 90, 3000]}},
    "model": {"bottom": [8], "hidden": [8]},
    "tower": {"compile": "off"},
    "train": TRAIN,
}
ALONE: dict[str, Any] = {
    "servers": 0,
    "workers": 1,
    "data": {"synthetic": {"train_samples": 1000, "eval_samples": 200, "num_dense": 3, "table_sizes": [50, 90]}},
    "model": {"bottom": [8], "hidden": [8]},
    "tower": {"compile": "off"},
    "train": {"batch_size": 25, "report_every_s": 0.1},
}
"""Forty steps in one process."""
ENDLESS = {
    **TINY,
    "servers": 1,
    "train": {**TRAIN, "epochs": 100_000},
    "eval": {"every_steps": 1_000_000},
    "recovery": {"restarts": 0},  # test_chaos.py has the jobs that recover
}
LASTING: dict[str, Any] = {
    **ENDLESS,
    "checkpoint": {"every_steps": 1_000_000},
    "recovery": {},
}
"""Recovers, and may write a checkpoint at its end: so it gets ten minutes to stop."""
