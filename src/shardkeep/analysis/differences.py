"""Differences: the metrics of two models on the same rows, with intervals of what they differ by."""

# N = rows, K = resampled rows

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from shardkeep.analysis.delong import auc_difference
from shardkeep.analysis.significance import CONFIDENCE, UNDEFINED
from shardkeep.base.arrays import Float64s, Ints
from shardkeep.base.errors import MissingPackage, UserError
from shardkeep.base.plugging.packages import missing
from shardkeep.inference.scoring import EvaluationScores
from shardkeep.view.screen import metric_name
from shardkeep.workers.config import BASELINE, UNWEIGHTED, sign_of
from shardkeep.workers.evaluation.retrieval import RankSettings
from shardkeep.workers.metrics.outputs import joint_outputs
from shardkeep.workers.metrics.quality import COUNTS, MetricSettings

RESAMPLES, RESAMPLED_ROWS = (100, 1000), 50_000_000
"""The fewest and the most resamples of a bootstrap, and the rows of all of them where that is between."""
COLUMNS = ("metric", "run", "difference", "95 % interval", "says", "by")


class Difference(NamedTuple):
    """What a metric of one model is above that of another one, with a 95 % confidence interval. `by`: the method."""

    metric: str
    value: float
    low: float
    high: float
    by: str

    def texts(self, run: str) -> list[str]:
        """As `COLUMNS`."""
        gain = self.value * (sign_of(self.metric) or 0)
        says = ("higher" if self.value > 0 else "lower") if not gain else "better" if gain > 0 else "worse"
        says = "no difference shown" if self.low <= 0.0 <= self.high else says
        says = says if np.isfinite([self.value, self.low, self.high]).all() else UNDEFINED
        interval = f"{self.low:+z.5f} to {self.high:+z.5f}"
        return [metric_name(self.metric), run, f"{self.value:+z.5f}", interval, says, self.by]


def differences(scores: Sequence[EvaluationScores], names: Sequence[str]) -> Iterator[tuple[str, Difference]]:
    """Each model's metrics less those of the first one, by names of both: of AUC by DeLong, of others, and of weighted
    samples, by a paired bootstrap with percentiles (Efron and Tibshirani, 1993).

    Raises:
        UserError: The rows are not the same: labels, weights and the targets of retrieval tell them apart.
        MissingPackage: scipy is not installed."""
    if need := missing("scipy"):
        raise MissingPackage(f"an interval of a difference {need}")
    first = scores[0]
    targets = isinstance(first.asked, RankSettings)
    for other, name in zip(scores, names, strict=True):
        pairs: list[Any] = [(first.labels_NT, other.labels_NT), (first.weights_N, other.weights_N)]
        pairs += [(first.groups_N, other.groups_N)] if targets else []
        if not all(np.array_equal(one, two, equal_nan=True) for one, two in pairs):
            counts = f"{len(first.labels_NT):,} and {len(other.labels_NT):,} rows"
            why = f"{counts}, or other {'targets' if targets else 'labels'}); allowed: the same --data FILE for all"
            raise UserError(f"{names[0]} and {name} have other evaluation rows ({why}")
    for other, name in zip(scores[1:], names[1:], strict=True):
        yield from ((f"{name} - {names[0]}", found) for by in (_by_delong, _by_bootstrap) for found in by(other, first))


def _by_delong(*pair: EvaluationScores) -> Iterator[Difference]:
    from scipy.stats import norm

    positive_N = pair[0].labels_NT[:, 0] > 0.5
    if _has_auc(*pair) and min(positive_N.sum(), (~positive_N).sum()) > 1:
        first_N, second_N = (one.outputs_NT[:, 0] for one in pair)
        value, error = auc_difference(first_N, second_N, positive_N)
        half = float(norm.ppf(0.5 + CONFIDENCE / 2)) * error
        yield Difference("auc", value, value - half, value + half, "DeLong")


def _has_auc(*pair: EvaluationScores) -> bool:
    return all(one.binary and "auc" in one.asked.metrics and not len(one.weights_N) for one in pair)


def _labels(scores: EvaluationScores) -> list[EvaluationScores]:
    """The scores of each label, on the rows that have it: classes of several labels at once have few rows."""
    asked = scores.asked
    if len(scores.names) == 1 or isinstance(asked, RankSettings):
        return [scores]
    outputs_NT = joint_outputs(scores.outputs_NT, asked.tasks) if asked.tasks else scores.outputs_NT
    parts = []
    for t, name in enumerate(scores.names):
        has_N = ~np.isnan(scores.labels_NT[:, t])
        groups_N = scores.groups_N[has_N] if len(scores.groups_N) else scores.groups_N
        weights_N = scores.weights_N[has_N] if len(scores.weights_N) else scores.weights_N
        own_N1, label_N1 = (x_NT[has_N, t : t + 1].astype(np.float32) for x_NT in (outputs_NT, scores.labels_NT))
        parts.append(EvaluationScores(own_N1, label_N1, groups_N, weights_N, asked.of(t), (name,)))
    return parts


def _classes(scores: EvaluationScores) -> list[Ints]:
    """The rows of each class of a label: a resample has as many of each as the data."""
    classes = isinstance(scores.asked, MetricSettings) and not scores.asked.numbers
    index_N = np.unique(scores.labels_NT[:, 0] * classes, return_inverse=True)[1]
    return np.split(np.argsort(index_N, kind="stable"), np.cumsum(np.bincount(index_N))[:-1])


def _by_bootstrap(*pair: EvaluationScores) -> Iterator[Difference]:
    if _has_auc(*pair):
        others = [tuple(name for name in one.asked.metrics if name != "auc") for one in pair]
        pair = tuple(replace(one, asked=replace(one.asked, metrics=own)) for one, own in zip(pair, others, strict=True))
    for own in zip(*map(_labels, pair), strict=True):
        label = f"/{own[0].names[0]}" if len(pair[0].names) > 1 else ""
        yield from (found._replace(metric=found.metric + label) for found in _resampled(*own))


def _resampled(*pair: EvaluationScores) -> Iterator[Difference]:
    from scipy.stats import bootstrap

    first, second = (one.metrics() for one in pair)
    names = [name for name, value in first.items() if isinstance(value, float) and isinstance(second.get(name), float)
             and name not in COUNTS and not name.startswith((BASELINE, UNWEIGHTED))]  # fmt: skip

    def difference(*parts: Ints) -> Float64s:
        rows_K = np.concatenate([alone_K, *parts])
        found = [[metrics[name] for name in names] for metrics in (one.metrics(rows_K) for one in pair)]
        change: Float64s = -np.diff(np.array(found, np.float64), axis=0)[0]  # NaN = undefined
        return change

    rows_N = np.arange(len(pair[0].labels_NT))
    strata = _classes(pair[0])
    alone_K = np.concatenate([rows_N[:0], *(part for part in strata if len(part) == 1)])
    strata = [part for part in strata if len(part) > 1]
    settings = {"method": "percentile", "confidence_level": CONFIDENCE, "random_state": np.random.default_rng(0)}
    count = max(RESAMPLES[0], min(RESAMPLES[1], RESAMPLED_ROWS // max(1, len(rows_N))))
    if names and strata:
        found = bootstrap(strata, difference, n_resamples=count, batch=1, vectorized=False, **settings)
        for name, low, high in zip(names, *found.confidence_interval, strict=True):
            yield Difference(name, first[name] - second[name], float(low), float(high), "bootstrap")
