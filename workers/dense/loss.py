"""The losses of the dense tower, and the objective that they make: of one label, or of several.

To add one, write a function like `bce` and name it in `LOSSES` and in `LossConfig` in workers/label_config.py.
"""

# B = batch, T = labels

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from shardkeep.workers.config import TrainConfig
from shardkeep.workers.label_config import LOSSES, LossConfig, TaskColumn, afters


class Loss(Protocol):
    """A loss of a micro-batch."""

    def __call__(
        self, logits_BT: torch.Tensor, label_BT: torch.Tensor, factors_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The sum over samples and labels, a scalar of float32 with a graph. All inputs are float32.

        Args:
            factors_B: Multiplies each sample's loss; None = all 1.
        """
        ...


def bce(logits_BT: torch.Tensor, label_BT: torch.Tensor, factors_B: torch.Tensor | None = None) -> torch.Tensor:
    """Binary cross entropy of logits against labels in [0, 1]."""
    return _summed(partial(F.binary_cross_entropy_with_logits, logits_BT, label_BT), factors_B)


def mse(logits_BT: torch.Tensor, label_BT: torch.Tensor, factors_B: torch.Tensor | None = None) -> torch.Tensor:
    """Squared error of outputs against labels: they are values, not logits."""
    return _summed(partial(F.mse_loss, logits_BT, label_BT), factors_B)


def huber(
    logits_BT: torch.Tensor, label_BT: torch.Tensor, factors_B: torch.Tensor | None = None, *, delta: float = 1.0
) -> torch.Tensor:
    """Of outputs against labels: half the squared error up to `delta`, above it delta times (the absolute error less
    half of delta)."""
    return _summed(partial(F.huber_loss, logits_BT, label_BT, delta=delta), factors_B)


def weighted_sum(
    losses_BT: torch.Tensor, label_BT: torch.Tensor, factors_B: torch.Tensor | None = None
) -> torch.Tensor:
    """Of a retrieval model, whose outputs are losses already: their sum over the samples of label 1."""
    own_BT = losses_BT * label_BT
    return (own_BT if factors_B is None else own_BT * factors_B[:, None]).sum()


def _summed(loss: Callable[..., torch.Tensor], factors_B: torch.Tensor | None) -> torch.Tensor:
    if factors_B is None:
        return loss(reduction="sum")
    return (loss(reduction="none") * factors_B[:, None]).sum()


def loss_of(config: LossConfig) -> Loss:
    """The loss that a config names."""
    loss = LOSSES[config.name]
    options = config.model_dump(include={*loss.config}, exclude_none=True)
    return partial(loss.load(), **options) if options else loss.load()


class TaskLoss:
    """The loss of several labels: the sum over samples and labels of weight x loss. NaN = a sample has no such label,
    which adds zero and has no gradient."""

    def __init__(self, tasks: Sequence[TaskColumn]) -> None:
        self._losses = [(loss_of(task.objective), task.weight) for task in tasks]
        self._afters = afters(tasks)

    def __call__(
        self, logits_BT: torch.Tensor, label_BT: torch.Tensor, factors_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `Loss`."""
        missing_BT = label_BT.isnan()
        output_BT = joint_logits(logits_BT, self._afters).masked_fill(missing_BT, 0.0)
        known_BT, parts = label_BT.masked_fill(missing_BT, 0.0), []
        for t, (loss, weight) in enumerate(self._losses):
            own = slice(t, t + 1)
            own_B = weight * (~missing_BT[:, t]).to(output_BT.dtype)
            parts.append(loss(output_BT[:, own], known_BT[:, own], own_B if factors_B is None else own_B * factors_B))
        return torch.stack(parts).sum()


def joint_logits(logits_BT: torch.Tensor, afters: Sequence[int | None]) -> torch.Tensor:
    """The logits of labels over all samples, from logits of P(label | the label before it). To be called in float32,
    outside autocast.

    With p = sigmoid(a) sigmoid(b), the product of ESMM (Ma et al., arXiv:1804.07931), whose logarithm is
    logsigmoid(a) + logsigmoid(b), the odds against it are (1 - p) / p = e^-a + e^-b + e^-(a + b). The sum of positive
    terms loses no digits where p is close to 1.

    Args:
        afters: Of each label the index of the label before it; None = there is none."""
    if not any(after is not None for after in afters):
        return logits_BT
    joint: list[torch.Tensor] = []
    for t, after in enumerate(afters):
        own_B = logits_BT[:, t]
        if after is not None:
            before_B = joint[after]
            own_B = -torch.stack([-before_B, -own_B, -before_B - own_B]).logsumexp(0)
        joint.append(own_B)
    return torch.stack(joint, dim=1)


@dataclass(frozen=True)
class Objective:
    """What a tower minimizes.

    Attributes:
        clip_norm: Largest norm of the dense gradient; None = no clipping.
        batch_size: Samples of a full micro-batch; only those are compiled."""

    loss: Loss
    clip_norm: float | None
    batch_size: int

    @classmethod
    def of(cls, train: TrainConfig, tasks: Sequence[TaskColumn] = ()) -> Objective:
        """Of a job. `tasks`: its labels where it lists several, which have losses of their own."""
        return cls(TaskLoss(tasks) if tasks else loss_of(train.loss), train.clip_norm, train.batch_size)
