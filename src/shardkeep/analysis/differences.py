"""Differences: the metrics of two models on the same rows, with intervals of what they differ by."""

# N = rows, K = resampled rows

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardkeep.analysis.delong import auc_difference
from shardkeep.base.arrays import Float64s, Ints
from shardkeep.base.errors import MissingPackage, UserError
from shardkeep.base.plugging.packages import missing
from shardkeep.inference.scoring import EvaluationScores
from shardkeep.sweep.student import CONFIDENCE
from shardkeep.view.screen import metric_name
from shardkeep.workers.config import BASELINE, sign_of
from shardkeep.workers.metrics.quality import COUNTS

RESAMPLES, RESAMPLED_ROWS = (100, 1000), 100_000_000
"""The fewest and the most resamples of a bootstrap, and the rows of all of them where that is between."""
COLUMNS = ("metric", "run", "difference", f"{CONFIDENCE:.0%} interval".replace("%", " %"), "says", "by")


@dataclass(frozen=True, slots=True)
class Difference:
    """What a metric of one model is above that of another one, and an interval that has the true value in 95 % of all
    cases. `by`: the method."""

    metric: str
    value: float
    low: float
    high: float
    by: str

    @property
    def says(self) -> str:
        """In words."""
        if self.low <= 0.0 <= self.high:
            return "no difference shown"
        sign = sign_of(self.metric)
        if sign is None:
            return "higher" if self.value > 0 else "lower"
        return "better" if sign * self.value > 0 else "worse"

    def texts(self, run: str) -> list[str]:
        """As `COLUMNS`."""
        interval = f"{self.low:+.5f} to {self.high:+.5f}"
        return [metric_name(self.metric), run, f"{self.value:+.5f}", interval, self.says, self.by]


def differences_of_runs(names: Sequence[str], scores: Sequence[EvaluationScores]) -> list[list[str]]:
    """Every run against the first one, as rows of `COLUMNS`. Raises as `differences`."""
    found = [(f"{name} - {names[0]}", differences(one, scores[0], (name, names[0])))
             for name, one in zip(names[1:], scores[1:], strict=True)]  # fmt: skip
    return [each.texts(pair) for pair, of_pair in found for each in of_pair]


def differences(first: EvaluationScores, second: EvaluationScores, names: tuple[str, str]) -> list[Difference]:
    """What the metrics of the first differ by, those that both have: of AUC by DeLong, of others, and of weighted
    samples, by a paired bootstrap with percentiles (Efron and Tibshirani, 1993).

    Raises:
        UserError: The rows are not the same.
        MissingPackage: scipy is not installed."""
    if need := missing("scipy"):
        raise MissingPackage(f"intervals of differences {need}")
    _check_rows(first, second, names)
    return [*_by_delong(first, second), *_by_bootstrap(first, second)]


def _check_rows(first: EvaluationScores, second: EvaluationScores, names: tuple[str, str]) -> None:
    """Labels and weights tell rows apart: what a model reads of them may differ."""
    counts = [len(one.labels_NT) for one in (first, second)]
    pairs = ((first.labels_NT, second.labels_NT), (first.weights_N, second.weights_N))
    if counts[0] != counts[1]:
        why = f"{counts[0]:,} and {counts[1]:,} rows"
    elif all(np.array_equal(one, other, equal_nan=True) for one, other in pairs):
        return
    else:
        why = f"{counts[0]:,} rows with other labels or weights"
    raise UserError(f"{names[0]} and {names[1]}: other evaluation rows ({why}); allowed: --data FILE, the same for all")


def _by_delong(first: EvaluationScores, second: EvaluationScores) -> Iterator[Difference]:
    from scipy.stats import norm

    positive_N = first.labels_NT[:, 0] > 0.5 if _has_auc(first, second) else np.empty(0, bool)
    if min(positive_N.sum(), (~positive_N).sum()) > 1:
        value, error = auc_difference(first.outputs_NT[:, 0], second.outputs_NT[:, 0], positive_N)
        half = float(norm.ppf(0.5 + CONFIDENCE / 2)) * error
        yield Difference("auc", value, value - half, value + half, "DeLong")


def _has_auc(*scores: EvaluationScores) -> bool:
    return all(one.binary and not len(one.weights_N) and np.isfinite(one.outputs_NT).all() for one in scores)


def _by_bootstrap(first: EvaluationScores, second: EvaluationScores) -> Iterator[Difference]:
    from scipy.stats import bootstrap

    without, count = ("auc",) if _has_auc(first, second) else (), len(first.labels_NT)
    whole = [one.metrics(without=without) for one in (first, second)]
    names = [name for name in whole[0] if all(isinstance(one.get(name), float) for one in whole)
             and name not in COUNTS and not name.startswith(BASELINE)]  # fmt: skip
    if not names:
        return

    def difference(rows_K: Ints) -> Float64s:
        both = [scores.metrics(rows_K, without=without) for scores in (first, second)]
        one, other = (np.array([found[name] for name in names], np.float64) for found in both)  # NaN = undefined
        return one - other

    few, most = RESAMPLES
    resamples = max(few, min(most, RESAMPLED_ROWS // count))
    settings = {"confidence_level": CONFIDENCE, "method": "percentile", "random_state": np.random.default_rng(0)}
    found = bootstrap((np.arange(count),), difference, n_resamples=resamples, batch=1, vectorized=False, **settings)
    ends = zip(names, *found.confidence_interval, strict=True)
    yield from (
        Difference(name, whole[0][name] - whole[1][name], float(low), float(high), "bootstrap")
        for name, low, high in ends
    )
