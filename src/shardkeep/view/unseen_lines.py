"""The line about values without a row (workers/embeddings/unseen.py), by one rule for all commands."""

from __future__ import annotations

from collections.abc import Mapping

SHARE, SHOWN = 0.01, 3
"""The least share of a feature that counts, and the most features that the line names."""


def unseen_shares(counts: object) -> list[str]:
    """The features with a share of `SHARE` or more, the largest first. None where `counts` is a number: a loop may
    report a metric of that name."""
    found = counts.items() if isinstance(counts, Mapping) else ()
    shares = [(missing / values, name, missing, values) for name, (missing, values) in found if missing]
    shares = sorted((each for each in shares if each[0] >= SHARE), key=lambda each: (-each[0], each[1]))
    return [f"{name} {100 * share:.3g} % ({m:,} of {n:,})" for share, name, m, n in shares]


def unseen_lines(counts: object) -> list[str]:
    """One line with the first `SHOWN` features of `unseen_shares`; no line where there is none."""
    shares = unseen_shares(counts)
    more = [f"and {len(shares) - SHOWN:,} more (`unseen` has all)"] if len(shares) > SHOWN else []
    return [f"values without a row: {', '.join([*shares[:SHOWN], *more])}"] if shares else []
