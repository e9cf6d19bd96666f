"""Comparison: results and settings of several runs side by side, as texts. The page and `shardkeep compare` show it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from shardkeep.base.sizes import size_text
from shardkeep.page.records import Json
from shardkeep.page.state import RunState
from shardkeep.view.run_view import clock_text

DASH = "\N{EN DASH}"
OF_SPEED = re.compile(r"(model|tables|tower|compression|consistency|threads|train\.batch_size|train\.accumulate)\b")
"""Settings that decide what a step does."""
OWN = ("name", "data.root")
"""Settings that differ without a meaning."""
WIDEST = 60
"""Characters of a setting's value."""
Rows = list[list[str]]
"""Each a name and a text for each run."""


def compared(runs: Sequence[RunState], sections: Sequence[Json]) -> dict[str, Rows]:
    """`results`, and the `settings` that differ, with the values of defaults. `sections`: of each run."""
    settings = [run.settings for run in runs]
    keys = [key for key in dict.fromkeys(key for one in settings for key in one) if key not in OWN]
    rows = {key: [one.get(key, DASH) for one in settings] for key in keys}
    differ = [[key, *_from_where_they_differ(texts)] for key, texts in rows.items() if len(set(texts)) > 1]
    return {"results": _results(sections), "settings": differ}


def _from_where_they_differ(texts: Sequence[str]) -> list[str]:
    """Values; of long ones, such as lists of columns, what is around the first difference."""
    if max(map(len, texts)) <= WIDEST:
        return list(texts)
    letters = enumerate(zip(*texts, strict=False))
    same = next((at for at, each in letters if len(set(each)) > 1), min(map(len, texts)))
    start = max(0, same - WIDEST // 3)
    parts = [text[start : start + WIDEST] for text in texts]
    return [
        f"{'...' * bool(start)}{part}{'...' * (start + WIDEST < len(text))}"
        for part, text in zip(parts, texts, strict=True)
    ]


def _results(sections: Sequence[Json]) -> Rows:
    views = [run["overview"] for run in sections]

    def row(name: str, text: Callable[[Json], object], form: str = "") -> list[str]:
        return [name, *(DASH if (value := text(run)) is None else format(value, form) for run in sections)]

    def count(name: str, key: str) -> list[str]:
        return row(name, lambda run: run["overview"][key], ",.0f")

    names = {(part, m["key"]): m["name"] for part in ("evaluation", "best", "test") for one in views for m in one[part]}
    return [
        row("state", lambda run: run["overview"]["state"]),
        count("steps", "step"),
        count("samples", "samples"),
        count("speed, samples/s", "samples_per_s"),
        *_scaling(sections),
        *(row(f"{part.removeprefix('evaluation')} {name}".strip(), partial(_score, part, key), ".4f")
          for (part, key), name in names.items()),
        row("sent for training", lambda run: _sent(run, run["overview"]["bytes"])),
        row("bytes a sample", lambda run: _sent(run, run["bytes"]["per_sample"])),
        row("longest own work of a step, ms", lambda run: run["steps"][0]["own"] if run["steps"] else None, ",.1f"),
        row("rows", lambda run: sum(table.get("rows") or 0 for table in run["tables"]["rows"]), ",.0f"),
        count("recoveries", "recoveries"),
        row("time, all starts", lambda run: _time(run["overview"])),
    ]  # fmt: skip


def _score(part: str, key: str, run: Json) -> float | None:
    return next((one["value"] for one in run["overview"][part] if one["key"] == key), None)


def _sent(run: Json, size: float | None) -> str | None:
    """A job of one process sends nothing."""
    return size_text(size) if size and run["overview"]["servers"] != 0 else None


def _time(view: Json) -> str | None:
    seconds = view["wall_s"] or (view["newest"] or 0.0) - (view["began"] or 0.0)
    return clock_text(seconds) if seconds else None


def _scaling(sections: Sequence[Json]) -> Rows:
    """How fast a worker of each run is, beside the run with one worker whose steps do the same, where there is one."""
    kinds = [str([pair for pair in run["config"]["changed"] or () if OF_SPEED.match(pair[0])]) for run in sections]
    rates = [(view["samples_per_s"] or 0.0) / (view["workers"] or 1) for run in sections for view in [run["overview"]]]
    workers = [run["overview"]["workers"] or 0 for run in sections]
    alone = {kind: rate for kind, rate, count in zip(kinds, rates, workers, strict=True) if count == 1 and rate}
    shares = [rate / alone.get(kind, float("inf")) for kind, rate in zip(kinds, rates, strict=True)]
    if not any(share and count > 1 for share, count in zip(shares, workers, strict=True)):
        return []
    return [["a worker's speed, beside one alone", *(f"{100 * share:.0f} %" if share else DASH for share in shares)]]
