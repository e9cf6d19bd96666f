"""Quality of predictions, metric by metric. Exact, in float64, on the CPU.

To add a metric, write a function NAME_of(scored) and name it in the lists of workers/config.py.
"""

# N = samples, T = labels, G = groups

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkeep.base.arrays import Ints
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.operations import gather_arrays
from shardkeep.workers.config import (
    BASELINE,
    DEFAULT_METRICS,
    ERRORS,
    METRICS,
    UNWEIGHTED,
    EvalConfig,
    LossConfig,
    asked_of,
)
from shardkeep.workers.label_config import TaskColumn
from shardkeep.workers.metrics.outputs import joint_outputs

Floats = NDArray[np.floating[Any]]
Weights = Floats | Ints
BUCKETS = 10
"""Buckets of `calibration_buckets`."""
COUNTS = ("samples", "weights")
"""Keys beside the metrics: of several labels, they are of all, and COUNT/LABEL of a label that some samples lack."""
FAR = 0.1
"""The difference of two calibrations from which both are shown."""
_CAUSES = {
    "precision": "no sample is predicted positive; precision needs one",
    "r2": "all labels are equal; R2 needs different ones",
    "gauc": "no group has labels of both classes; GAUC needs one",
}
"""Why a metric is undefined where the labels have both classes."""


@dataclass(frozen=True)
class MetricSettings:
    """What to compute.

    Attributes:
        metrics: Keys of `METRICS`.
        threshold: Probability from which a sample counts as predicted positive.
        group_by: The feature whose ids group the samples of `gauc`; None = no metric needs groups.
        numbers: Predictions are values, not logits.
        label_means: Of the training labels that are numbers; () = not known.
        tasks: The labels where a config lists several; `metrics` are then those that it names.
    """

    metrics: tuple[str, ...] = DEFAULT_METRICS
    threshold: float = 0.5
    group_by: str | None = None
    numbers: bool = False
    label_means: tuple[float, ...] = ()
    tasks: tuple[TaskColumn, ...] = ()

    @classmethod
    def by(
        cls, config: EvalConfig, loss: LossConfig, label_means: Sequence[float] = (), tasks: Sequence[TaskColumn] = ()
    ) -> MetricSettings:
        """What a job's config asks for."""
        metrics = tuple(config.metrics or ()) if tasks else config.asked(loss)
        return cls(metrics, config.threshold, config.group_by, loss.of_numbers, tuple(label_means), tuple(tasks))

    def of(self, t: int) -> MetricSettings:
        """Those of label t alone."""
        means = self.label_means[t : t + 1]
        if not self.tasks:
            return replace(self, label_means=means)
        numbers = self.tasks[t].objective.of_numbers
        metrics = asked_of(self.metrics, numbers=numbers)
        return replace(self, metrics=metrics, numbers=numbers, label_means=means if numbers else (), tasks=())


@dataclass(frozen=True)
class Predictions:
    """Predictions of one label: logits, or values if `asked.numbers`, against labels; groups_N int64 or empty.

    weight_N: float64, or ones in int64: the metrics count a sample so many times."""

    output_N: Floats
    label_N: Floats
    weight_N: Weights
    groups_N: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    asked: MetricSettings = field(default_factory=MetricSettings)

    @cached_property
    def predictions(self) -> Floats:
        """Probabilities, or values."""
        return self.output_N if self.asked.numbers else np.exp(-np.logaddexp(0.0, -self.output_N))

    @property
    def has_both_classes(self) -> bool:
        return bool(min(self.sum(self.label_N), self.sum(1.0 - self.label_N)) > 0)

    @cached_property
    def total(self) -> float:
        """Sum of the weights: the number of samples without any."""
        return float(self.weight_N.sum())

    def sum(self, values_N: NDArray[Any]) -> Any:
        """The weighted sum: int of truth values without weights, else float."""
        return (self.weight_N * values_N).sum().item()

    def mean(self, values_N: NDArray[Any]) -> float:
        """The weighted mean; of weights 1 the bits of `np.mean`."""
        return float(self.sum(values_N) / self.total)


def evaluate_over_workers(
    logits_NT: Floats,
    labels_NT: Floats,
    groups_N: Ints | None = None,
    weights_N: Floats | None = None,
    *,
    names: Sequence[str],
    collective: Collective,
    asked: MetricSettings | None = None,
) -> dict[str, Any]:
    """The metrics of all workers' samples together, on every rank; exact, not an average of parts.

    Blocks until every rank has called it; a rank may come with no samples.

    Args:
        weights_N: Of the samples; None or empty = all 1. Every rank that has samples has weights, or none has.
        names: Of the T labels.
        asked: None = the metrics of classes.

    Returns:
        For one label what `evaluate_predictions` returns. For several the same of each, as METRIC/LABEL, and `samples`.
    """
    asked = asked or MetricSettings()
    own_parts = [np.ascontiguousarray(values_NT, np.float32).reshape(-1) for values_NT in (logits_NT, labels_NT)]
    if weights_N is not None:  # travel behind the labels
        own_parts[1] = np.concatenate([own_parts[1], weights_N])
    outputs_R, truths_R = (gather_arrays(collective, values, purpose="metrics") for values in own_parts)
    parts_R = [np.split(truth, [output.size]) for output, truth in zip(outputs_R, truths_R, strict=True)]
    labels, weights = (np.concatenate(parts) for parts in zip(*parts_R, strict=True))
    logits, labels = (values.reshape(-1, len(names)) for values in (np.concatenate(outputs_R), labels))
    groups = np.empty(0, np.int64)
    if asked.group_by is not None and groups_N is not None:
        groups = np.concatenate(gather_arrays(collective, groups_N, purpose="metrics"))
    return evaluate_labels(names, logits, labels, groups, weights, asked)


def evaluate_labels(
    names: Sequence[str], logits: Floats, labels: Floats, groups: Ints, weights: Floats, asked: MetricSettings
) -> dict[str, Any]:
    """As `evaluate_over_workers`, of one worker's samples: the metrics of each label, on the samples that have it."""
    if len(names) == 1:
        return evaluate_predictions(logits, labels, groups, asked, weights)
    metrics: dict[str, Any] = {}
    outputs = joint_outputs(logits, asked.tasks) if asked.tasks else logits
    for t, name in enumerate(names):
        has_N = ~np.isnan(labels[:, t])
        own_groups = groups[has_N] if len(groups) else groups
        own_weights = weights[has_N] if len(weights) else weights
        own = evaluate_predictions(outputs[has_N, t], labels[has_N, t], own_groups, asked.of(t), own_weights)
        metrics |= _labelled(name, own, lacks=not has_N.all())
    return (
        metrics
        | {"samples": len(labels)}
        | ({"weights": float(weights.astype(np.float64).sum())} if len(weights) else {})
    )


def _labelled(name: str, metrics: Mapping[str, Any], *, lacks: bool) -> dict[str, Any]:
    """`lacks`: some samples have no such label, so that it has counts of its own."""
    return {key if key in COUNTS and not lacks else f"{key}/{name}": value for key, value in metrics.items()}


def evaluate_predictions(
    logits_N: Floats,
    labels_N: Floats,
    groups_N: Ints | None = None,
    asked: MetricSettings | None = None,
    weights_N: Floats | None = None,
) -> dict[str, Any]:
    """Metrics of outputs (any real number) against labels. A sample of weight w counts as w samples; `weights_N`: None
    or empty = all 1.

    Returns:
        The metrics asked for, with the errors of the constant mean where that is known, `samples`, and with weights
        their sum as `weights`, and the calibration without them where it is a tenth off. A metric that is not defined
        is None, and `note` says why (no samples, one class only, no weight, predictions that are not finite, ...).
    """
    asked = asked or MetricSettings()
    groups_N = np.empty(0, np.int64) if groups_N is None else groups_N
    logits_N = np.asarray(logits_N, np.float64).reshape(-1)
    labels_N = np.asarray(labels_N, np.float64).reshape(-1)
    if len(logits_N) != len(labels_N):
        raise ValueError(f"{len(logits_N)} predictions for {len(labels_N)} labels")
    weighted = weights_N is not None and len(weights_N)
    weight_N = np.asarray(weights_N, np.float64) if weighted else np.ones(len(labels_N), np.int64)
    if len(weight_N) != len(labels_N):
        raise ValueError(f"{len(weight_N)} weights for {len(labels_N)} labels")
    scored = Predictions(logits_N, labels_N, weight_N, groups_N, asked)
    result: dict[str, Any] = dict.fromkeys(asked.metrics) | {"samples": len(labels_N)}
    if weighted:
        result["weights"] = float(weight_N.sum())
    if (note := _why_undefined(scored)) is not None:
        result["note"] = note
    if weight_N.any() and np.isfinite(logits_N).all():
        result |= {name: _value(name, scored) for name in asked.metrics}
        for mean in asked.label_means:
            constant = replace(scored, output_N=np.full(len(labels_N), mean))
            result |= {BASELINE + name: _value(name, constant) for name in asked.metrics if name in ERRORS}
        result |= _unweighted(scored, result.get("calibration"))
        causes = [_CAUSES[name] for name in asked.metrics if result[name] is None and name in _CAUSES]
        result = {**({"note": causes[0]} if causes else {}), **result}
    return result


def _value(metric: str, scored: Predictions) -> Any:
    return METRICS[metric].load()(scored)


def _unweighted(scored: Predictions, weighted: float | None) -> dict[str, float]:
    return unweighted(calibration_of(replace(scored, weight_N=np.ones(len(scored.label_N), np.int64))), weighted)


def unweighted(plain: float | None, weighted: float | None) -> dict[str, float]:
    """The calibration of samples that all weigh the same, where it is far from that by their weights."""
    if weighted is None or plain is None or 1 - FAR <= plain / (weighted or math.inf) <= 1 + FAR:
        return {}
    return {f"{UNWEIGHTED}calibration": plain}


def _why_undefined(scored: Predictions) -> str | None:
    outputs_N, labels_N = scored.output_N, scored.label_N
    if len(labels_N) == 0:
        return "no samples"
    broken = int(np.count_nonzero(~np.isfinite(outputs_N)))
    if broken:
        return f"{broken} of {len(outputs_N)} predictions are not finite"
    counted_N = labels_N[scored.weight_N > 0]
    if not len(counted_N):
        return f"the weights of all {len(labels_N)} samples are 0"
    if not scored.asked.numbers and counted_N.min() == counted_N.max():
        rest = "" if len(counted_N) == len(labels_N) else " whose weight is above 0"
        return f"all {len(counted_N)} labels{rest} are {counted_N[0]:g}; AUC needs both classes"
    return None


def auc(logits_N: Floats, labels_N: Floats, weight_N: Weights | None = None) -> float:
    """Area under the ROC curve: the chance that a positive ranks above a negative, ties count one half.

    The Mann-Whitney rank statistic; without weights in integers, exact for any number of samples. With weights a pair
    counts the product of its two. (torchmetrics, which the tests compare with, squashes logits to float32 probabilities
    first: large logits become ties.)
    """
    order_N = np.argsort(logits_N, kind="stable")
    sorted_N, positive_N = logits_N[order_N], labels_N[order_N] > 0.5
    sorted_weight_N = np.ones(len(order_N), np.int64) if weight_N is None else weight_N[order_N]
    first = np.flatnonzero(np.concatenate(([True], sorted_N[1:] != sorted_N[:-1])))  # start of each run of ties
    positives, negatives = (np.add.reduceat(sorted_weight_N * own_N, first) for own_N in (positive_N, ~positive_N))
    below = np.cumsum(negatives) - negatives
    doubled = (positives * (2 * below + negatives)).sum().item()
    return float(min(1.0, doubled / (2 * positives.sum().item() * negatives.sum().item())))  # floats are rounded


def entropy(rate: float) -> float:
    """Entropy of a coin with this rate, in nats: the logloss of always predicting the base rate.

    Normalized entropy divides by it (He et al., "Practical Lessons from Predicting Clicks on Ads", 2014).
    """
    return -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def auc_of(scored: Predictions) -> float | None:
    return auc(scored.output_N, scored.label_N, scored.weight_N) if scored.has_both_classes else None


def normalized_entropy_of(scored: Predictions) -> float | None:
    rate = scored.mean(scored.label_N)
    return logloss_of(scored) / entropy(rate) if 0 < rate < 1 else None


def logloss_of(scored: Predictions) -> float:
    """Mean binary cross-entropy in nats, from logits: log(1 + e^x) - y x."""
    return scored.mean(np.logaddexp(0.0, scored.output_N) - scored.label_N * scored.output_N)


def calibration_of(scored: Predictions) -> float | None:
    """Sum of predicted probabilities over the number of positives; 1 is right, above 1 over-predicts."""
    positives = scored.sum(scored.label_N)
    return float(scored.sum(scored.predictions) / positives) if positives else None


def gauc_of(scored: Predictions) -> float | None:
    """The mean of the groups' AUCs, weighted by their numbers of samples, as FuxiCTR's gAUC, or their sums of weights.
    Groups with one class are left out."""
    order_N = np.lexsort((scored.output_N, scored.groups_N))
    groups_N, outputs_N = scored.groups_N[order_N], scored.output_N[order_N]
    labels_N, weight_N = scored.label_N[order_N], scored.weight_N[order_N]
    starts_G = np.flatnonzero(np.concatenate(([True], groups_N[1:] != groups_N[:-1])))
    weight_G = np.add.reduceat(weight_N, starts_G).tolist()
    own_N = (weight_N * (labels_N > 0.5), weight_N * (labels_N <= 0.5))
    positive_G, negative_G = (np.add.reduceat(weights, starts_G) > 0 for weights in own_N)
    ends_G, total, weights = [*starts_G[1:].tolist(), len(groups_N)], 0.0, 0.0
    for g in np.flatnonzero(positive_G & negative_G).tolist():
        group = slice(starts_G[g], ends_G[g])
        total += weight_G[g] * auc(outputs_N[group], labels_N[group], weight_N[group])
        weights += weight_G[g]
    return total / weights if weights else None


def _counts(scored: Predictions) -> tuple[float, float, float]:
    """Weights of samples predicted positive, of positives, and of samples that are both."""
    predicted_N, positive_N = scored.predictions >= scored.asked.threshold, scored.label_N > 0.5
    return scored.sum(predicted_N), scored.sum(positive_N), scored.sum(predicted_N & positive_N)


def accuracy_of(scored: Predictions) -> float:
    predicted, positive, both = _counts(scored)
    return 1.0 - (predicted + positive - 2 * both) / scored.total


def precision_of(scored: Predictions) -> float | None:
    predicted, _, both = _counts(scored)
    return both / predicted if predicted else None


def recall_of(scored: Predictions) -> float | None:
    _, positive, both = _counts(scored)
    return both / positive if positive else None


def mse_of(scored: Predictions) -> float:
    return scored.mean((scored.predictions - scored.label_N) ** 2)


def rmse_of(scored: Predictions) -> float:
    return math.sqrt(mse_of(scored))


def mae_of(scored: Predictions) -> float:
    return scored.mean(np.abs(scored.predictions - scored.label_N))


def loses_to_the_mean(metrics: Mapping[str, Any]) -> bool:
    """Whether every error of an evaluation is above that of the constant mean."""
    pairs = [(metrics[name], metrics[BASELINE + name]) for name in metrics if BASELINE + name in metrics]
    return bool(pairs) and all(None not in pair and pair[1] < pair[0] < math.inf for pair in pairs)


def r2_of(scored: Predictions) -> float | None:
    """1 - the squared error / the variance of these labels (coefficient of determination)."""
    spread = scored.mean((scored.label_N - scored.mean(scored.label_N)) ** 2)
    return 1.0 - mse_of(scored) / spread if spread else None


def calibration_buckets_of(scored: Predictions) -> list[dict[str, float]]:
    """Samples in order of their prediction, in `BUCKETS` buckets of equal size: weighted mean prediction and label.
    Buckets of weight 0 are left out."""
    order_N = np.argsort(scored.predictions, kind="stable")
    buckets = []
    for part in np.array_split(order_N, BUCKETS):
        own = replace(
            scored, output_N=scored.output_N[part], label_N=scored.label_N[part], weight_N=scored.weight_N[part]
        )
        if own.total:
            means = {"prediction": own.mean(own.predictions), "label": own.mean(own.label_N)}
            buckets.append(means | {"samples": len(part)})
    return buckets
