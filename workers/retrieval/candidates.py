"""Candidates: the items among which a micro-batch of a retrieval model finds the right ones."""

# C = candidates, Q = what is predicted: a query each, I = dense columns of an item

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardkeep.workers.embeddings.inputs import Inputs

CANDIDATES = "candidates"
"""The key under which a model gets them, beside the inputs of users; no column has this name."""


class ItemInputs(dict[str, Any]):
    """Inputs of items. A model of vectors tells them from those of users by their type."""


@dataclass(frozen=True)
class Candidates:
    """The items of one micro-batch, all distinct, and which of them each query looks for.

    Attributes:
        dense_CI: Dense columns of the items, float32.
        inputs: Their rows: feature -> (C, D).
        log_q_C: Logarithm of each item's chance to be a candidate, float32; zeros without a correction.
        shared: Candidates before this one are negatives of every query; those from it on of none.
        target_Q: The candidate that each query looks for, int64; -1 = none: the query has no loss.
    """

    dense_CI: torch.Tensor
    inputs: Inputs
    log_q_C: torch.Tensor
    shared: int
    target_Q: torch.Tensor
