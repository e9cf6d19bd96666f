"""report.html of an experiment: one file that needs no network. Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from shardkeep.analysis.significance import Estimate
from shardkeep.base.files import atomic_write
from shardkeep.base.plugging.packages import missing
from shardkeep.config.overrides import flow
from shardkeep.experiments.journal import Ended
from shardkeep.page.document import document, wide_table


def write_report(out: Path, title: str, parts: Sequence[str]) -> str:
    """Writes the report. Returns the line about packages that are missing, or "". Raises OSError."""
    lacks = {"matplotlib": "plots", "scipy": "intervals and p values"}
    names = ", no ".join(text for module, text in lacks.items() if missing(module))
    words = f"the report has no {names}: it {missing(*lacks)}; the same command adds them" if names else ""
    head = f"<h1>{escape(title)}</h1>"
    atomic_write(out / "report.html", document(title, [head, *parts, f"<p>{escape(words)}</p>"]))
    return words


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of rows with the same keys, which are its head; "" = there are none."""
    head = [key.replace("_", " ") for key in rows[0]] if rows else []
    return wide_table(head, [list(map(_cell, row.values())) for row in rows]) if rows else ""


def outcome_text(ended: Ended) -> str:
    """The metric of a trial, or what became of it."""
    if ended.state == "failed":
        return f"failed: {ended.cause}"
    if ended.state == "completed":
        return f"{ended.value:.5f}"
    return f"stopped early at {f'{ended.values[-1]:.5f}' if ended.values else 'its start'}"


def _cell(value: object) -> str:
    """An estimate is its mean, standard deviation, and what else is known."""
    if isinstance(value, Estimate):
        spread = "" if value.deviation is None else f" \N{PLUS-MINUS SIGN} {value.deviation:.5f}"
        return f"{value.mean:.5f}{spread}" + ("" if value.low is None else f" ({value.low:.5f} .. {value.high:.5f})")
    if isinstance(value, Mapping):
        return flow(value).strip("{}")
    return "" if value is None else f"{value:,.5g}" if isinstance(value, float) else str(value)
