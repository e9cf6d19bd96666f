"""Vectors: what retrieval models have in common, from the vectors of users and items to the loss of each sample."""

# B = samples, C = candidates, Q = queries, I = dense columns, E = width of a vector

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardkeep.workers.embeddings.inputs import Inputs
from shardkeep.workers.retrieval.candidates import CANDIDATES, Candidates, ItemInputs


@dataclass(frozen=True)
class ItemShape:
    """What a model knows of items before it sees one.

    Attributes:
        num_dense: Their dense columns.
        features: Name -> values of its row; the first names the item.
    """

    num_dense: int
    features: Mapping[str, int]


class VectorModel(nn.Module, ABC):
    """A model of users and items.

    Args:
        cosine: Vectors are compared by their angle; else by their dot product.
        temperature: Divides the similarities in the loss.
    """

    def __init__(self, *, cosine: bool, temperature: float) -> None:
        super().__init__()
        self.cosine, self.temperature = cosine, temperature

    @abstractmethod
    def users(self, dense_BI: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """The vector of each sample's user, (B, E), from which the item is predicted that comes next."""

    @abstractmethod
    def items(self, dense_CI: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """The vector of each item, (C, E)."""

    def queries(self, dense_BI: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """The vectors from which training predicts, (Q, E): one a sample, or one an entry of its list."""
        return self.users(dense_BI, inputs)

    def of_samples(self, loss_Q1: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """The sum of the losses of each sample's queries, (B, 1)."""
        return loss_Q1

    def compared(self, x_NE: torch.Tensor) -> torch.Tensor:
        """Vectors whose dot products are the similarities, (N, E) of float32 or more."""
        x_NE = x_NE.to(torch.promote_types(x_NE.dtype, torch.float32))
        return F.normalize(x_NE, dim=1) if self.cosine else x_NE

    def forward(self, dense_BI: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The loss of each sample, (B, 1), in float32: their sum is B times the mean of the queries that have a target.

        Without candidates the vectors (B, E), in float32, whose dot products are the similarities.

        Args:
            inputs: Of users, and under `CANDIDATES` the items. Of items alone: `ItemInputs`."""
        if CANDIDATES not in inputs:
            side = self.items if isinstance(inputs, ItemInputs) else self.users
            return self.compared(side(dense_BI, inputs))
        candidates: Candidates = inputs[CANDIDATES]
        queries_QE = self.queries(dense_BI, inputs)
        items_CE = self.items(candidates.dense_CI, candidates.inputs)
        with torch.autocast(queries_QE.device.type, enabled=False):
            queries_QE, items_CE = self.compared(queries_QE) / self.temperature, self.compared(items_CE)
            loss_Q = softmax_losses(queries_QE, items_CE, candidates)
            count = (candidates.target_Q >= 0).sum().clamp(min=1)
            return self.of_samples(loss_Q[:, None], inputs) * (dense_BI.shape[0] / count)


def softmax_losses(queries_QE: torch.Tensor, items_CE: torch.Tensor, candidates: Candidates) -> torch.Tensor:
    """The sampled softmax of each query, (Q,): with scores s = q i - log q_i it is -s_target + log(sum of exp(s)) over
    the shared candidates and the target; 0 for a query without a target.

    Subtracting the logarithm of each item's chance to be a candidate makes the sum one over all items, in expectation
    (Bengio and Senecal, 2008; Yi et al., RecSys 2019).
    """
    shared, target_Q = candidates.shared, candidates.target_Q
    none_Q = target_Q < 0
    scores_QC = torch.addmm(-candidates.log_q_C[:shared], queries_QE, items_CE[:shared].T)
    row_Q = target_Q.masked_fill(none_Q, len(items_CE))  # a further row, of zeros
    own_QE, log_q_Q = F.embedding(row_Q, F.pad(items_CE, (0, 0, 0, 1))), F.pad(candidates.log_q_C, (0, 1))[row_Q]
    own_Q = (queries_QE * own_QE).sum(1) - log_q_Q
    among_Q = ~none_Q & (target_Q < shared)
    sum_Q = torch.logaddexp(scores_QC.logsumexp(1), own_Q.masked_fill(among_Q, -torch.inf))
    return (sum_Q - own_Q).masked_fill(none_Q, 0.0)
