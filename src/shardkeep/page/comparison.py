"""Comparison: results and settings of several runs side by side, as texts. The page and `shardkeep compare` show it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from shardkeep.base.sizes import size_text
from shardkeep.page.records import Json
from shardkeep.page.state import RunState
from shardkeep.view.run_view import clock_text

DASH = "\N{EN DASH}"
OF_SPEED = re.compile(r"(model|tables|tower|compression|consistency|threads|train\.batch_size|train\.accumulate)\b")
"""Settings that decide what a step does."""
OWN = ("name", "data.root")
"""Settings that differ without a meaning."""
Rows = list[list[str]]
"""Each a name and a text for each run."""


def compared(runs: Sequence[RunState], sections: Sequence[Json]) -> dict[str, Rows]:
    """`results`, and the `settings` that differ, with the values of defaults. `sections`: of each run."""
    settings = [run.settings for run in runs]
    keys = [key for key in dict.fromkeys(key for one in settings for key in one) if key not in OWN]
    rows = [[key, *(one.get(key, DASH) for one in settings)] for key in keys]
    return {"results": _results(sections), "settings": [row for row in rows if len(set(row[1:])) > 1]}


def _results(sections: Sequence[Json]) -> Rows:
    views = [run["overview"] for run in sections]

    def row(name: str, text: Callable[[Json], str | None]) -> list[str]:
        return [name, *(text(run) or DASH for run in sections)]

    def count(key: str) -> Callable[[Json], str | None]:
        return lambda run: None if run["overview"][key] is None else f"{run['overview'][key]:,.0f}"

    scores = {(part, m["key"]): m["name"] for part in ("evaluation", "test") for one in views for m in one[part]}
    return [
        row("state", lambda run: run["overview"]["state"]),
        row("steps", count("step")),
        row("samples", count("samples")),
        row("speed, samples/s", count("samples_per_s")),
        *_scaling(sections),
        *([f"{'test ' * (part == 'test')}{name}", *(_score(one[part], key) for one in views)]
          for (part, key), name in scores.items()),
        row("sent for training", lambda run: _sent(run, run["overview"]["bytes"])),
        row("bytes a sample", lambda run: _sent(run, run["bytes"]["per_sample"])),
        row("longest own work of a step", lambda run: f"{run['steps'][0]['own']:,.1f} ms" if run["steps"] else None),
        row("rows", lambda run: f"{sum(table.get('rows') or 0 for table in run['tables']['rows']):,}"),
        row("recoveries", count("recoveries")),
        row("time, all starts", _time),
    ]  # fmt: skip


def _score(metrics: Sequence[Json], key: str) -> str:
    return next((f"{one['value']:.4f}" for one in metrics if one["key"] == key), DASH)


def _sent(run: Json, size: float | None) -> str | None:
    """A job of one process sends nothing."""
    return size_text(size) if size and run["overview"]["servers"] != 0 else None


def _time(run: Json) -> str | None:
    view = run["overview"]
    seconds = view["wall_s"] or (view["newest"] or 0.0) - (view["began"] or 0.0)
    return clock_text(seconds) if seconds else None


def _scaling(sections: Sequence[Json]) -> Rows:
    """How fast a worker of each run is, beside the run with one worker whose steps do the same. Empty where no run with
    several workers has such a run."""
    kinds = [json.dumps([pair for pair in one["config"]["changed"] or () if OF_SPEED.match(pair[0])])
             for one in sections]  # fmt: skip
    views = [one["overview"] for one in sections]
    known = zip(kinds, views, sections, strict=True)
    alone = {kind: v["samples_per_s"] for kind, v, one in known if v["workers"] == 1 and one["config"]["changed"]}
    shares = [
        view["samples_per_s"] / view["workers"] / alone[kind]
        if view["samples_per_s"] and view["workers"] and alone.get(kind)
        else None
        for kind, view in zip(kinds, views, strict=True)
    ]
    if not any(share and view["workers"] > 1 for share, view in zip(shares, views, strict=True)):
        return []
    return [["a worker's speed, beside one alone", *(DASH if s is None else f"{100 * s:.0f} %" for s in shares)]]
