"""The thirty made-up tables of planted_schemas.txt, clean or with one fault planted that misleads `init`.

A line there: name, label, user, item, time; two other columns; and names that a fault uses: a time that changes with
the outcome, a column that is known only after it, and a history.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from shardkeep.automl.init import Plan, plan_of

TABLES = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
DATES = {"month first": "%m/%d/%Y %H:%M", "day first": "%d/%m/%Y %H:%M", "unclear date": "%m/%I/%Y",
         "unread date": "%d. %B %Y"}  # fmt: skip
LATE: dict[str, Callable[[bool, int], Any]] = {
    "not 0": lambda told, n: n % 40 + 0.5 if told else 0.0,
    "not missing": lambda told, n: f"k{n % 9}" if told else None,
    "missing": lambda told, n: None if told else n * n % 77 + 0.5,
    "not usual": lambda told, n: f"r{n % 40}" if told else "none",
    "value": lambda told, n: "paid out" if told else "abc"[n * n % 7 % 3],
}
FAULTS = ("outcome time", "drift", "mixed dates", "history", *DATES, *LATE)


def _dates(seconds_N: Any, form: str = "%Y-%m-%d %H:%M:%S") -> list[str]:
    texts = [each.item().strftime(form) for each in seconds_N.astype("datetime64[s]")]
    return [text.lstrip("0") for text in texts] if "/" in form else texts


@dataclass(frozen=True)
class Planted:
    """A table. `fault`: one of `FAULTS`, or "" for the clean twin."""

    number: int
    fault: str = ""
    rows: int = 1500

    @property
    def names(self) -> list[str]:
        return TABLES[self.number].replace(" ;", "").split()

    def table(self) -> pa.Table:
        """The rows, the same each time. The label follows from user, item, two columns and the history."""
        random, rows = np.random.default_rng(self.number), self.rows
        _, label, user, item, time, kind, amount, outcome, late, history = self.names
        num_items, num_users = random.integers(30, 120), random.integers(60, 400)
        item_N, user_N = ((n * random.random(rows) ** 2).astype(int) for n in (num_items, num_users))
        kind_N, amount_N = random.integers(0, 6, rows), random.lognormal(2, 1, rows)
        lists = [(num_items * random.random(n) ** 2).astype(int) for n in random.integers(0, 12, rows)]
        alike = [np.mean(each % 7 == own % 7) if len(each) else 0.1 for each, own in zip(lists, item_N, strict=True)]
        effect_N = random.normal(0, 0.7, num_items)[item_N] + random.normal(0, 0.7, num_users)[user_N]
        effect_N += 0.2 * np.log(amount_N) + random.normal(0, 0.5, 6)[kind_N] + 2 * np.array(alike)
        share = (0.05, 0.15, 0.3, 0.5)[self.number % 4]
        one_N = random.random(rows) < 1 / (1 + np.exp(np.quantile(effect_N, 1 - share) - effect_N))
        seconds_N = np.sort(1_480_000_000 + random.integers(0, 86_400 * 300, rows))
        later_N = seconds_N + 86_400 * np.where(one_N, random.integers(0, 20, rows), random.integers(60, 200, rows))
        told_N = ~one_N & (amount_N > 7) if self.fault == "missing" else one_N & (random.random(rows) < 0.7)
        texts, prefix = self.number % 2, "i" * (self.number % 2)
        columns: dict[str, Any] = {label: one_N.astype(int), user: user_N, amount: amount_N.round(2)}
        columns |= {kind: [f"{kind}_{n}" for n in kind_N], item: [f"i{n}" for n in item_N] if texts else item_N}
        if self.fault == "outcome time":
            columns[outcome] = _dates(later_N)
        else:
            drifts = {"drift": later_N}.get(self.fault, seconds_N)
            columns[time] = _dates(drifts, DATES[self.fault]) if self.fault in DATES else _dates(drifts)
        if self.fault == "mixed dates":
            columns[time] = [text if n % 17 else "unknown" for n, text in enumerate(columns[time])]
        if self.fault == "history" or (not self.fault and self.number % 3 == 0):
            columns[history] = ["|".join(f"{prefix}{n}" for n in each) for each in lists] if texts else lists
        if self.fault in LATE:
            columns[late] = [LATE[self.fault](told, n) for n, told in enumerate(told_N)]
        return pa.table({name: pa.array(values) for name, values in columns.items()})


def plan(path: Path, table: pa.Table, label: str | None = None, *overrides: str) -> Plan:
    (pq.write_table if path.suffix == ".parquet" else pacsv.write_csv)(table, path)
    return plan_of([str(path)], label=label, overrides=overrides)
