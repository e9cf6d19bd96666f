"""Small files of clicks with everything that a file may have: texts, lists, gaps, numbers of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = ("clicked", "user", "item", "tags", "price", "age")


def click_rows(count: int, *, seed: int = 7) -> list[dict[str, str]]:
    """Rows as a CSV has them. The label follows the user and the price."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        user, item = int(random.zipf(1.5)) % 200, int(random.integers(0, 50))
        tags = "|".join(f"t{t}" for t in random.integers(0, 9, random.integers(0, 4)))
        price = float(np.round(random.lognormal(2, 1), 2))
        chance = 1 / (1 + np.exp(-(user % 5 - 2) - (price < 8)))
        row = {"clicked": str(int(random.random() < chance)), "user": f"u{user}", "item": str(item), "tags": tags}
        rows.append(row | {"price": "" if random.random() < 0.1 else str(price), "age": str(random.integers(18, 80))})
    return rows


def write_csv(path: Path, rows: list[dict[str, str]], columns: tuple[str, ...] = COLUMNS) -> Path:
    lines = [",".join(columns), *(",".join(row[name] for name in columns) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def click_job(train: Path, **changes: Any) -> dict[str, Any]:
    """A job in one process that takes about a second."""
    job: dict[str, Any] = {
        "servers": 0,
        "workers": 1,
        "seed": 3,
        "data": {
            "train": str(train),
            "split": {"by": "random", "eval": 0.2, "test": 0.0},
            "label": "clicked",
            "dense": ["price", "age"],
            "sparse": ["user", "item", {"column": "tags", "separator": "|", "pooling": "mean"}],
        },
        "model": {"name": "dlrm", "bottom": [7], "hidden": [9, 5]},
        "tables": {"default": {"dim": 4}},
        "tower": {"amp": "off", "compile": "off"},
        "train": {"batch_size": 32},
        "eval": {"batch_size": 50},
    }
    return job | changes
