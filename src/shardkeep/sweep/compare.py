"""Recipes of a sweep against each other: paired differences of AUC by seed, and whether they are significant.

p values are two-sided, of Student's t on the paired differences, corrected by Holm's method over all comparisons of one
family: all recipes against fp32, or all pairs of recipes. Draws and formats nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardkeep.sweep.results import FP32, Results, paired
from shardkeep.sweep.student import CONFIDENCE, UNDEFINED, Estimate, estimate, holm, p_value

NO_LOSS = "cannot be distinguished from no loss"
ONE_SEED = "one seed: no conclusion"
UNTESTED = "not tested without scipy"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Recipe `first` against recipe `second`, over the seeds that both have completed."""

    first: str
    second: str
    difference: Estimate
    """AUC of `first` less that of `second`, with the same seed."""
    p: float | None
    """As if this were the only comparison; None with one seed, or without scipy."""
    p_holm: float | None
    """Corrected over the family."""

    @property
    def told(self) -> bool:
        """Whether the difference is significant after the correction."""
        return self.p_holm is not None and self.p_holm < 1.0 - CONFIDENCE

    @property
    def verdict(self) -> str:
        """In words."""
        if self.p is None:
            return ONE_SEED if self.difference.count == 1 else UNTESTED
        if not math.isfinite(self.difference.mean + self.p):
            return UNDEFINED
        return ("lower AUC" if self.difference.mean < 0 else "higher AUC") if self.told else NO_LOSS

    def as_json(self) -> dict[str, Any]:
        found = self.difference
        return {
            "recipe": self.first,
            "against": self.second,
            "seeds": found.count,
            "auc_difference": found.mean,
            "deviation": found.deviation,
            "low": found.low,
            "high": found.high,
            "p": self.p,
            "p_holm": self.p_holm,
            "told_from_no_difference": self.told,
        }


def against_fp32(results: Results) -> dict[str, Comparison]:
    """Every other recipe against fp32, by name; one family."""
    pairs = [(recipe.name, FP32) for recipe in results.recipes if recipe.name != FP32]
    return {comparison.first: comparison for comparison in _family(results, pairs)}


def all_pairs(results: Results) -> list[Comparison]:
    """Every recipe against every one after it in the plan; one family."""
    return _family(results, itertools.combinations([recipe.name for recipe in results.recipes], 2))


def _family(results: Results, pairs: Sequence[tuple[str, str]] | itertools.combinations[Any]) -> list[Comparison]:
    runs = {recipe.name: recipe.runs for recipe in results.recipes}
    found = [(first, second, estimate(list(paired(runs[first], runs[second]).values()))) for first, second in pairs]
    known = [(first, second, difference, p_value(difference)) for first, second, difference in found if difference]
    corrected = iter(holm([p for *_, p in known if p is not None]))
    return [
        Comparison(first, second, difference, p, None if p is None else next(corrected))
        for first, second, difference, p in known
    ]
