"""Lines about values without a row (workers/embeddings/unseen.py), by one rule for all commands."""

from __future__ import annotations

from collections.abc import Mapping

SHARE, MOST_LINES = 0.01, 10
"""The least share of a feature that has a line, and the most features."""


def unseen_lines(counts: object) -> list[str]:
    """A line for each feature with a share of `SHARE` or more, the largest first. After `MOST_LINES` comes the number
    of the others. No line where `counts` is a number: a loop may report a metric of that name."""
    found = counts.items() if isinstance(counts, Mapping) else ()
    told = [(missing / values, name, missing, values) for name, (missing, values) in found if missing]
    told = sorted((each for each in told if each[0] >= SHARE), key=lambda each: (-each[0], each[1]))
    lines = [f"{name}: {m:,} of {n:,} values ({100 * share:.3g} %) have no row" for share, name, m, n in told]
    return lines if len(lines) <= MOST_LINES else [*lines[:MOST_LINES], f"and {len(lines) - MOST_LINES:,} more"]
