"""Quality of predictions, metric by metric. Exact, in float64, on the CPU.

To add a metric, write a function of `Scored` and name it in `METRICS` and in the lists of workers/config.py.
"""

# N = samples, T = labels, G = groups

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkeep.base.arrays import Ints
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.config import BASELINE, DEFAULT_METRICS, ERRORS, EvalConfig, LossConfig

Floats = NDArray[np.floating[Any]]
BUCKETS = 10
"""Buckets of `calibration_buckets`."""
_CAUSES = {
    "precision": "no sample is predicted positive; precision needs one",
    "r2": "all labels are equal; R2 needs different ones",
    "gauc": "no group has labels of both classes; GAUC needs one",
}
"""Why a metric is undefined where the labels have both classes."""


@dataclass(frozen=True)
class Asked:
    """What to compute.

    Attributes:
        metrics: Keys of `METRICS`.
        threshold: Probability from which a sample counts as predicted positive.
        group_by: The feature whose ids group the samples of `gauc`; None = no metric needs groups.
        numbers: Predictions are values, not logits.
        label_means: Of the training labels that are numbers; () = not known.
    """

    metrics: tuple[str, ...] = DEFAULT_METRICS
    threshold: float = 0.5
    group_by: str | None = None
    numbers: bool = False
    label_means: tuple[float, ...] = ()

    @classmethod
    def by(cls, config: EvalConfig, loss: LossConfig, label_means: Sequence[float] = ()) -> Asked:
        """What a job's config asks for."""
        return cls(config.asked(loss), config.threshold, config.group_by, loss.of_numbers, tuple(label_means))


@dataclass(frozen=True)
class Scored:
    """Predictions of one label: logits, or values if `asked.numbers`, against labels; groups_N int64 or empty."""

    output_N: Floats
    label_N: Floats
    groups_N: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    asked: Asked = field(default_factory=Asked)

    @cached_property
    def predictions(self) -> Floats:
        """Probabilities, or values."""
        return self.output_N if self.asked.numbers else np.exp(-np.logaddexp(0.0, -self.output_N))

    @property
    def has_both_classes(self) -> bool:
        return bool(0 < self.label_N.sum() < len(self.label_N))


def evaluate_over_workers(
    logits_NT: Floats,
    labels_NT: Floats,
    groups_N: Ints | None = None,
    *,
    names: Sequence[str],
    collective: Collective,
    asked: Asked | None = None,
) -> dict[str, Any]:
    """The metrics of all workers' samples together, on every rank; exact, not an average of parts.

    Blocks until every rank has called it; a rank may come with no samples.

    Args:
        names: Of the T labels.
        asked: None = the metrics of classes.

    Returns:
        For one label what `evaluate_predictions` returns. For several the same of each, as METRIC/LABEL, and `samples`.
    """
    asked = asked or Asked()
    mine = [np.ascontiguousarray(values_NT, np.float32).reshape(-1) for values_NT in (logits_NT, labels_NT)]
    gathered = [np.concatenate(collective.gather_arrays(values, purpose="metrics")) for values in mine]
    logits, labels = (values.reshape(-1, len(names)) for values in gathered)
    groups = np.empty(0, np.int64)
    if asked.group_by is not None and groups_N is not None:
        groups = np.concatenate(collective.gather_arrays(groups_N, purpose="metrics"))
    if len(names) == 1:
        return evaluate_predictions(logits, labels, groups, asked)
    found: dict[str, Any] = {"samples": len(labels)}
    for t, name in enumerate(names):
        own = replace(asked, label_means=asked.label_means[t : t + 1])
        metrics = evaluate_predictions(logits[:, t], labels[:, t], groups, own)
        found |= {f"{metric}/{name}": value for metric, value in metrics.items() if metric != "samples"}
    return found


def evaluate_predictions(
    logits_N: Floats, labels_N: Floats, groups_N: Ints | None = None, asked: Asked | None = None
) -> dict[str, Any]:
    """Metrics of outputs (any real number) against labels.

    Returns:
        The metrics asked for, with the errors of the constant mean where that is known, and `samples`. A metric that is
        not defined is None, and `note` says why (no samples, one class only, predictions that are not finite, ...).
    """
    asked = asked or Asked()
    groups_N = np.empty(0, np.int64) if groups_N is None else groups_N
    logits_N = np.asarray(logits_N, np.float64).reshape(-1)
    labels_N = np.asarray(labels_N, np.float64).reshape(-1)
    if len(logits_N) != len(labels_N):
        raise ValueError(f"{len(logits_N)} predictions for {len(labels_N)} labels")
    scored = Scored(logits_N, labels_N, groups_N, asked)
    result: dict[str, Any] = dict.fromkeys(asked.metrics) | {"samples": len(labels_N)}
    note = _why_undefined(scored)
    if note is not None:
        result["note"] = note
    if len(labels_N) and np.isfinite(logits_N).all():
        result |= {name: METRICS[name](scored) for name in asked.metrics}
        for mean in asked.label_means:
            constant = replace(scored, output_N=np.full(len(labels_N), mean))
            result |= {BASELINE + name: METRICS[name](constant) for name in asked.metrics if name in ERRORS}
        causes = [_CAUSES[name] for name in asked.metrics if result[name] is None and name in _CAUSES]
        result = {**({"note": causes[0]} if causes else {}), **result}
    return result


def _why_undefined(scored: Scored) -> str | None:
    outputs_N, labels_N = scored.output_N, scored.label_N
    if len(labels_N) == 0:
        return "no samples"
    broken = int(np.count_nonzero(~np.isfinite(outputs_N)))
    if broken:
        return f"{broken} of {len(outputs_N)} predictions are not finite"
    if not scored.asked.numbers and labels_N.min() == labels_N.max():
        return f"all {len(labels_N)} labels are {labels_N[0]:g}; AUC needs both classes"
    return None


def auc(logits_N: Floats, labels_N: Floats) -> float:
    """Area under the ROC curve: the chance that a positive ranks above a negative, ties count one half.

    The Mann-Whitney rank statistic in integers, exact for any number of samples. (torchmetrics, which the
    tests compare with, squashes logits to float32 probabilities first: large logits become ties.)
    """
    order_N = np.argsort(logits_N, kind="stable")
    sorted_N, positive_N = logits_N[order_N], labels_N[order_N] > 0.5
    first = np.flatnonzero(np.concatenate(([True], sorted_N[1:] != sorted_N[:-1])))  # start of each run of ties
    positives = np.add.reduceat(positive_N.astype(np.int64), first)
    negatives = np.diff(np.append(first, len(sorted_N))) - positives
    below = np.cumsum(negatives) - negatives
    doubled = int((positives * (2 * below + negatives)).sum())
    return doubled / (2 * int(positives.sum()) * int(negatives.sum()))


def logloss(logits_N: Floats, labels_N: Floats) -> float:
    """Mean binary cross-entropy in nats, from logits: log(1 + e^x) - y x."""
    return float(np.mean(np.logaddexp(0.0, logits_N) - labels_N * logits_N))


def calibration(logits_N: Floats, labels_N: Floats) -> float:
    """Sum of predicted probabilities over the number of positives; 1 is right, above 1 over-predicts."""
    return float(np.exp(-np.logaddexp(0.0, -logits_N)).sum() / labels_N.sum())


def entropy(rate: float) -> float:
    """Entropy of a coin with this rate, in nats: the logloss of always predicting the base rate.

    Normalized entropy divides by it (He et al., "Practical Lessons from Predicting Clicks on Ads", 2014).
    """
    return -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def _auc(scored: Scored) -> float | None:
    return auc(scored.output_N, scored.label_N) if scored.has_both_classes else None


def _normalized_entropy(scored: Scored) -> float | None:
    if not scored.has_both_classes:
        return None
    return logloss(scored.output_N, scored.label_N) / entropy(float(scored.label_N.sum()) / len(scored.label_N))


def _gauc(scored: Scored) -> float | None:
    """The mean of the groups' AUCs, weighted by their numbers of samples, as FuxiCTR's gAUC. Groups with one class are
    left out."""
    order_N = np.lexsort((scored.output_N, scored.groups_N))
    groups_N, outputs_N = scored.groups_N[order_N], scored.output_N[order_N]
    positive_N = scored.label_N[order_N] > 0.5
    starts_G = np.flatnonzero(np.concatenate(([True], groups_N[1:] != groups_N[:-1])))
    total, samples = 0.0, 0
    for start, end in zip(starts_G.tolist(), [*starts_G[1:].tolist(), len(groups_N)], strict=True):
        positives = int(positive_N[start:end].sum())
        if 0 < positives < end - start:
            total += (end - start) * auc(outputs_N[start:end], positive_N[start:end].astype(np.float64))
            samples += end - start
    return total / samples if samples else None


def _counts(scored: Scored) -> tuple[int, int, int]:
    """Samples predicted positive, positives, and samples that are both."""
    predicted_N, positive_N = scored.predictions >= scored.asked.threshold, scored.label_N > 0.5
    return int(predicted_N.sum()), int(positive_N.sum()), int((predicted_N & positive_N).sum())


def _accuracy(scored: Scored) -> float:
    predicted, positive, both = _counts(scored)
    return 1.0 - (predicted + positive - 2 * both) / len(scored.label_N)


def _precision(scored: Scored) -> float | None:
    predicted, _, both = _counts(scored)
    return both / predicted if predicted else None


def _recall(scored: Scored) -> float | None:
    _, positive, both = _counts(scored)
    return both / positive if positive else None


def _mse(scored: Scored) -> float:
    return float(np.mean((scored.predictions - scored.label_N) ** 2))


def loses_to_the_mean(metrics: Mapping[str, Any]) -> bool:
    """Whether every error of an evaluation is above that of the constant mean."""
    pairs = [(metrics[name], metrics[BASELINE + name]) for name in metrics if BASELINE + name in metrics]
    return bool(pairs) and all(error > baseline for error, baseline in pairs)


def _r2(scored: Scored) -> float | None:
    """1 - the squared error / the variance of these labels (coefficient of determination)."""
    spread = float(np.var(scored.label_N))
    return 1.0 - _mse(scored) / spread if spread else None


def _buckets(scored: Scored) -> list[dict[str, float]]:
    """Samples in order of their prediction, in `BUCKETS` buckets of equal size: mean prediction and mean label."""
    order_N = np.argsort(scored.predictions, kind="stable")
    parts = [part for part in np.array_split(order_N, BUCKETS) if len(part)]
    return [
        {
            "prediction": float(scored.predictions[part].mean()),
            "label": float(scored.label_N[part].mean()),
            "samples": len(part),
        }
        for part in parts
    ]


METRICS: MappingProxyType[str, Callable[[Scored], Any]] = MappingProxyType(
    {
        "auc": _auc,
        "gauc": _gauc,
        "logloss": lambda scored: logloss(scored.output_N, scored.label_N),
        "normalized_entropy": _normalized_entropy,
        "calibration": lambda scored: calibration(scored.output_N, scored.label_N) if scored.label_N.any() else None,
        "calibration_buckets": _buckets,
        "accuracy": _accuracy,
        "precision": _precision,
        "recall": _recall,
        "mse": _mse,
        "rmse": lambda scored: math.sqrt(_mse(scored)),
        "r2": _r2,
        "mae": lambda scored: float(np.mean(np.abs(scored.predictions - scored.label_N))),
    }
)
"""Each returns None where it is not defined."""
