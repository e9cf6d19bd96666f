"""How many of a step's rows or elements are sent, by share and step. Plain numbers."""

from __future__ import annotations

import math


def num_kept(count: int, keep: float) -> int:
    """max(1, ceil(count * keep)), 0 of none. Rounded to 1e-9 first: 100 * 0.07 is a little above 7 in floating point.

    Raises ValueError for a `keep` outside (0, 1]."""
    if not 0.0 < keep <= 1.0:
        raise ValueError(f"keep: {keep}; allowed: above 0, up to 1")
    return min(count, max(1, math.ceil(round(count * keep, 9))))


def keep_at(step: int, keep: float, warmup_steps: int) -> float:
    """The share to keep in step `step` >= 0 while it falls geometrically from 1 to `keep`: step t < E keeps
    keep ** ((t + 1) / (E + 1)), later ones `keep` (the DGC schedule, in steps)."""
    return float(keep ** ((step + 1) / (warmup_steps + 1))) if step < warmup_steps else keep
