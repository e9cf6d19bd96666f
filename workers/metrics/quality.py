"""Quality of predictions: AUC, logloss, normalized entropy, calibration. Exact, in float64, on the CPU."""

# N = samples, T = labels

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkeep.workers.collectives.collective import Collective

Floats = NDArray[np.floating[Any]]


def evaluate_over_workers(
    logits_NT: Floats, labels_NT: Floats, *, names: Sequence[str], collective: Collective
) -> dict[str, Any]:
    """The metrics of all workers' samples together, on every rank; exact, not an average of parts.

    Blocks until every rank has called it; a rank may come with no samples.

    Args:
        names: Of the T labels.

    Returns:
        For one label what `evaluate_predictions` returns. For several the same of each, as METRIC/LABEL, and `samples`.
    """
    mine = [np.ascontiguousarray(values_NT, np.float32).reshape(-1) for values_NT in (logits_NT, labels_NT)]
    gathered = [np.concatenate(collective.gather_arrays(values, purpose="metrics")) for values in mine]
    logits, labels = (values.reshape(-1, len(names)) for values in gathered)
    if len(names) == 1:
        return evaluate_predictions(logits, labels)
    found: dict[str, Any] = {"samples": len(labels)}
    for t, name in enumerate(names):
        metrics = evaluate_predictions(logits[:, t], labels[:, t])
        found |= {f"{metric}/{name}": value for metric, value in metrics.items() if metric != "samples"}
    return found


def evaluate_predictions(logits_N: Floats, labels_N: Floats) -> dict[str, Any]:
    """Metrics of logits (any real number) against labels (0 or 1).

    Returns:
        auc, logloss (nats per sample), normalized_entropy, calibration, samples. A metric that is not
        defined is None, and `note` says why (no samples, one class only, predictions that are not finite).
    """
    logits_N = np.asarray(logits_N, np.float64).reshape(-1)
    labels_N = np.asarray(labels_N, np.float64).reshape(-1)
    if len(logits_N) != len(labels_N):
        raise ValueError(f"{len(logits_N)} predictions for {len(labels_N)} labels")
    result: dict[str, Any] = {
        "auc": None,
        "logloss": None,
        "normalized_entropy": None,
        "calibration": None,
        "samples": len(labels_N),
    }
    note = _why_undefined(logits_N, labels_N)
    if note is not None:
        result["note"] = note
    if len(labels_N) == 0 or not np.isfinite(logits_N).all():
        return result
    positives = float(labels_N.sum())
    result["logloss"] = logloss(logits_N, labels_N)
    if positives > 0:
        result["calibration"] = calibration(logits_N, labels_N)
    if 0 < positives < len(labels_N):
        result["auc"] = auc(logits_N, labels_N)
        result["normalized_entropy"] = result["logloss"] / entropy(positives / len(labels_N))
    return result


def _why_undefined(logits_N: Floats, labels_N: Floats) -> str | None:
    if len(labels_N) == 0:
        return "no samples"
    broken = int(np.count_nonzero(~np.isfinite(logits_N)))
    if broken:
        return f"{broken} of {len(logits_N)} predictions are not finite"
    if labels_N.min() == labels_N.max():
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
