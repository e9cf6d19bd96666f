"""Clicks with several labels, and jobs that learn them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.click_files import COLUMNS, click_job, click_rows, write_csv

AFTER, NUMBER = {"column": "bought", "after": "clicked"}, {"column": "seconds", "loss": "huber", "missing": "mask"}
LABELS = ["clicked", AFTER, NUMBER]


def rows_of(count: int) -> list[dict[str, str]]:
    """Clicks, of which half are bought, and seconds that some rows lack."""
    random = np.random.default_rng(5)
    rows = click_rows(count)
    for row in rows:
        row["bought"] = str(int(row["clicked"] == "1" and random.random() < 0.3 + 0.4 * (int(row["item"]) % 2)))
        row["seconds"] = "" if random.random() < 0.3 else f"{int(row['user'][1:]) % 5 + random.normal(0, 0.1):.4f}"
    return rows


def job_of(folder: Path, rows: list[dict[str, str]], **changes: Any) -> dict[str, Any]:
    file = write_csv(folder / "train.csv", rows, (*COLUMNS, "bought", "seconds"))
    job = click_job(file) | {"model": {"name": "mmoe", "experts": 2, "hidden": [9], "task_hidden": [5]}} | changes
    job["data"] = {key: value for key, value in job["data"].items() if key != "label"} | {"labels": LABELS}
    return job
