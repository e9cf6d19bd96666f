"""Metrics of a stream of samples in memory that does not grow: counts of predictions in bins, and sums."""

# B = samples, T = labels

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardkeep.base.arrays import Float64s, Floats
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.operations import gather_arrays
from shardkeep.workers.label_config import TaskColumn
from shardkeep.workers.metrics.outputs import joint_outputs
from shardkeep.workers.metrics.quality import entropy, unweighted

BINS = 16384
_RANGE = 16.0
"""Logits from -16 to 16 have bins of 1/512, others the first or the last. Two logits in one bin are a tie for AUC: of
logits with a standard deviation of 1 that changes it by less than 1e-5."""
_SUMS = 10
_SAMPLES, _BROKEN, _LABELS, _LOGLOSS, _PREDICTIONS, _SQUARES, _ABSOLUTE, _WEIGHTS, _POSITIVES, _EXPECTED = range(_SUMS)
"""The first two are counts, the last two those of positive samples and of predicted ones; the others are weighted."""
_LATER = (_WEIGHTS, _SAMPLES), (_POSITIVES, _LABELS), (_EXPECTED, _PREDICTIONS)
"""Sums that earlier versions lack, and those that they take in their place."""


class BinnedScores:
    """Scores of one rank. All of it are sums: the state of two ranks together is the sum of their states.

    Args:
        labels: Names of the T labels.
        numbers: Outputs are values, not logits, and labels any numbers.
        tasks: The settings of several labels, each a number or not.
    """

    def __init__(self, labels: Sequence[str], *, numbers: bool, tasks: Sequence[TaskColumn] = ()) -> None:
        self._names = tuple(labels)
        self._tasks = tuple(tasks)
        self._numbers = [task.objective.of_numbers for task in tasks] or [numbers] * len(self._names)
        self._width = _SUMS + (0 if all(self._numbers) else 2 * BINS)
        self._parts = np.zeros((2, len(self._names), self._width))  # since `close`, and before it

    def add(self, outputs_BT: Floats, labels_BT: Floats, weight_B: Floats | None = None) -> None:
        """Adds samples, float32 (B, T) each. `weight_B`: None = all 1."""
        weights_B = np.ones(len(labels_BT)) if weight_B is None else weight_B.astype(np.float64)
        joint_BT = joint_outputs(outputs_BT, self._tasks)
        for t, part in enumerate(self._parts[0]):
            has_B = ~np.isnan(labels_BT[:, t])
            finite_B = np.isfinite(joint_BT[:, t]) & has_B
            part[_BROKEN] += int(has_B.sum()) - int(finite_B.sum())
            own = (joint_BT[finite_B, t], labels_BT[finite_B, t].astype(np.float64))
            self._add(part, *own, weights_B[finite_B], numbers=self._numbers[t])

    def _add(self, part: Float64s, output_B: Float64s, label_B: Float64s, weight_B: Float64s, *, numbers: bool) -> None:
        prediction_B = output_B
        if not numbers:
            softplus_B = np.logaddexp(0.0, output_B)
            prediction_B = np.exp(output_B - softplus_B)
            part[_LOGLOSS] += (weight_B * (softplus_B - label_B * output_B)).sum()
            bins_B = np.clip((output_B + _RANGE) * (BINS / 2 / _RANGE), 0, BINS - 1).astype(np.int64)
            part[_SUMS:] += np.bincount(bins_B + BINS * (label_B > 0.5), weight_B, 2 * BINS)
        part[_SAMPLES] += len(output_B)
        part[_WEIGHTS] += weight_B.sum()
        part[_POSITIVES] += label_B.sum()
        part[_EXPECTED] += prediction_B.sum()
        part[_LABELS] += (weight_B * label_B).sum()
        part[_PREDICTIONS] += (weight_B * prediction_B).sum()
        part[_SQUARES] += (weight_B * (prediction_B - label_B) ** 2).sum()
        part[_ABSOLUTE] += (weight_B * np.abs(prediction_B - label_B)).sum()

    def close(self, collective: Collective) -> dict[str, Any]:
        """The metrics of all ranks' samples since the last `close`; blocks until every rank has called it."""
        metrics = self._metrics(_together(self._parts[0], collective))
        self._parts[1] += self._parts[0]
        self._parts[0] = 0.0
        return metrics

    def total(self, collective: Collective) -> dict[str, Any]:
        """The metrics of all samples of all ranks; blocks until every rank has called it."""
        return self._metrics(_together(self._parts.sum(axis=0), collective))

    def state(self) -> torch.Tensor:
        """All of it, float64; shares memory."""
        return torch.from_numpy(self._parts)

    def load(self, states: Sequence[torch.Tensor]) -> None:
        """Takes the sum of states; none = no samples."""
        self._parts[:] = 0.0
        for part in (state.numpy() for state in states):
            for at, like in _LATER[len(_LATER) - (self._width - part.shape[-1]) :]:
                part = np.insert(part, at, part[..., like], axis=-1)
            self._parts += part

    def _metrics(self, sums_TK: Float64s) -> dict[str, Any]:
        """Keys as of `evaluate_predictions`; with several labels METRIC/LABEL."""
        pairs = zip(sums_TK, self._numbers, strict=True)
        per_label = [_of_numbers(sums) if numbers else _of_classes(sums) for sums, numbers in pairs]
        if len(per_label) == 1:
            return per_label[0]
        each = {
            f"{key}/{name}": value
            for name, metrics in zip(self._names, per_label, strict=True)
            for key, value in metrics.items()
            if key != "samples"
        }
        return {"samples": max(metrics["samples"] for metrics in per_label)} | each


def _together(sums_TK: Float64s, collective: Collective) -> Float64s:
    parts = gather_arrays(collective, np.ascontiguousarray(sums_TK).reshape(-1), purpose="metrics")
    together: Float64s = np.sum(parts, axis=0)
    return together.reshape(sums_TK.shape)


def _of_numbers(sums: Float64s) -> dict[str, Any]:
    weights = float(sums[_WEIGHTS])
    metrics: dict[str, Any] = dict.fromkeys(("mse", "rmse", "mae")) | _counts(sums)
    if weights and not sums[_BROKEN]:
        mse = float(sums[_SQUARES]) / weights
        metrics |= {"mse": mse, "rmse": math.sqrt(mse), "mae": float(sums[_ABSOLUTE]) / weights}
    return metrics


def _of_classes(sums: Float64s) -> dict[str, Any]:
    weights, positives = float(sums[_WEIGHTS]), float(sums[_LABELS])
    metrics: dict[str, Any] = dict.fromkeys(("auc", "logloss", "normalized_entropy", "calibration")) | _counts(sums)
    if weights and not sums[_BROKEN]:
        metrics["logloss"] = logloss = float(sums[_LOGLOSS]) / weights
        if positives:
            metrics["calibration"] = float(sums[_PREDICTIONS]) / positives
            metrics |= unweighted(float(sums[_EXPECTED] / sums[_POSITIVES]), metrics["calibration"])
        if 0 < positives < weights:
            metrics["normalized_entropy"] = logloss / entropy(positives / weights)
            metrics["auc"] = _auc(sums[_SUMS:].reshape(2, BINS))
    return metrics


def _counts(sums: Float64s) -> dict[str, Any]:
    broken = int(sums[_BROKEN])
    total = int(sums[_SAMPLES]) + broken
    note = {"note": f"{broken} of {total} predictions are not finite"} if broken else {}
    return {"samples": total} | note


def _auc(counts: Float64s) -> float | None:
    """Area under the ROC curve of negatives and positives by bin, ties one half."""
    negatives, positives = counts
    pairs = float(positives.sum() * negatives.sum())
    below = np.cumsum(negatives) - negatives
    return min(1.0, float((positives * (below + negatives / 2)).sum()) / pairs) if pairs else None
