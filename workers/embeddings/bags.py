"""Bags: jagged ids, pooled to one row a sample or each with its row, for loops of the user's own. By the kernels of
jobs.
"""

# B = bags, N = ids of all of them, U = unique ids of a table, D = embedding dim

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.base.arrays import Ids, Rows
from shardkeep.base.errors import DataError, UserError
from shardkeep.ps.client.row_client import PullHandle
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import JaggedRows
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature, Schema
from shardkeep.workers.embeddings import kernels
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.embeddings.loop_lookup import Lookup, flat_ids
from shardkeep.workers.embeddings.plan import FeaturePlan, Plan
from shardkeep.workers.embeddings.transfers import to_device


@dataclass(frozen=True)
class Bag:
    """The ids of B bags of one feature, as torch.nn.EmbeddingBag and TorchRec's JaggedTensor have them.

    Args:
        values: Ids of all bags, one after the other: whole numbers (N,), a tensor or a numpy array.
        lengths: Ids of each bag (B,). Give either these or `offsets`.
        offsets: Where each bag begins, and the end of the last one (B + 1,).
        weights: A weight for each id, float32 (N,); they get gradients if they require them. None = all 1. Or a
            function that returns them, called when the rows are there: for weights that depend on trained parameters.
        table: The table; None = the name under which the bag is given.
        pooling: How the rows of a bag become one; "none" = they stay as they are. Only "sum" takes weights.
    """

    values: Any
    lengths: Any = None
    offsets: Any = None
    weights: Any = None
    table: str | None = None
    pooling: Literal["sum", "mean", "max", "none"] = "sum"


@dataclass(frozen=True, eq=False)
class BagForm:
    """What the bags of some features have in common in every step. `joined`: their pooled rows become one matrix."""

    features: tuple[Feature, ...]
    joined: bool = False


@dataclass(frozen=True)
class KeyedBags:
    """The bags of several features in two tensors, as TorchRec's KeyedJaggedTensor has them. Without weights.

    Args:
        form: The features in their order; the tables are those of the client.
        values: Ids of all bags of the first feature, then of the next one (N,).
        lengths: Ids of each bag (F, B).
    """

    form: BagForm
    values: torch.Tensor
    lengths: torch.Tensor


ALL = "all features"
"""What `Pooled` has instead of features where they are joined: their pooled rows side by side, (B, sum of D)."""


@dataclass(frozen=True, slots=True)
class BagPlan:
    """What some bags need, before their rows are there. `bags`: none where they were keyed."""

    embeddings: Embeddings
    plan: Plan
    bags: Mapping[str, Bag]
    device: torch.device
    joined: bool = False

    def with_weights(self) -> BagPlan:
        """Calls what returns weights; the plan itself where no bag has such a function. Raises UserError."""
        called = {name: replace(bag, weights=bag.weights()) for name, bag in self.bags.items() if callable(bag.weights)}
        if not called:
            return self
        weights = self.plan.weights.copy()
        for name, bag in called.items():
            weights_N, ours_N = _numbers(name, bag.weights, np.float32), _weights_of(self.plan, name, weights)
            if weights_N.size != ours_N.size:
                raise UserError(f"feature {name}: {weights_N.size} weights for {ours_N.size} ids")
            ours_N[:] = weights_N
        return replace(self, plan=replace(self.plan, weights=weights), bags={**self.bags, **called})


class BagPlanner:
    """Plans bags over a client's tables. Keeps what depends on the features alone."""

    def __init__(self, tables: Mapping[str, TableSpec]) -> None:
        self._tables = tables
        self._known: dict[tuple[Feature, ...] | BagForm, Embeddings] = {}

    def _embeddings(self, key: tuple[Feature, ...] | BagForm, features: tuple[Feature, ...]) -> Embeddings:
        if key not in self._known:
            self._known[key] = Embeddings(Schema((), features), self._tables)
        return self._known[key]

    def plan_keyed(self, bags: KeyedBags) -> BagPlan:
        """As `plan`, in one pass over all features."""
        embeddings = self._embeddings(bags.form, bags.form.features)
        values_N, lengths = flat_ids("features", bags.values)[0], _numbers("of all", bags.lengths, np.int32)
        plan = embeddings.plan_keyed(values_N, lengths.reshape(bags.lengths.shape))
        return BagPlan(embeddings, plan, {}, bags.values.device, bags.form.joined and not embeddings.frozen_features)

    def plan(self, bags: Mapping[str, Bag]) -> BagPlan:
        """Checks and deduplicates the ids of some features. Raises UserError and DataError."""
        ragged = {name: _ragged(name, bag) for name, bag in bags.items()}
        sizes = {name: len(each) for name, each in ragged.items()}
        if len(set(sizes.values())) > 1:
            counts = ", ".join(f"{size} of {name}" for name, size in list(sizes.items())[:4])
            raise DataError(f"the features have different numbers of bags: {counts}; allowed: the same of all")
        features = tuple(_feature(name, bag) for name, bag in bags.items())
        embeddings = self._embeddings(features, features)
        count = next(iter(sizes.values()), 0)
        batch = Batch(np.empty((count, 0), np.float32), ragged, np.empty((count, 0), np.float32))
        device = next((bag.values.device for bag in bags.values() if isinstance(bag.values, torch.Tensor)), _CPU)
        return BagPlan(embeddings, embeddings.plan(batch), bags, device)


class Pooled(Lookup):
    """What `EmbeddingClient.pool` returns: per feature a tensor, float32 (B, D), that requires grad; of `pooling: none`
    (N, D).

    Read it like a dict. Good for one `apply`, in the step it was made in.
    """

    def __init__(self, owner: object, pull: PullHandle, planned: BagPlan, rows: JaggedRows) -> None:
        planned = planned.with_weights()
        self.owner, self.pull, self.step = owner, pull, pull.fetch.step
        self._planned, self._rows = planned, rows
        if planned.joined:
            self._leaves = {ALL: planned.embeddings.lookup_joined(planned.plan, rows, planned.device)}
        else:
            self._leaves = planned.embeddings.lookup(planned.plan, rows, device=planned.device)
        self._outputs = self._leaves | {
            name: self._with_weights(name, bag.weights) for name, bag in planned.bags.items() if bag.weights is not None
        }

    def _with_weights(self, name: str, weights: Any) -> torch.Tensor:
        leaf = self._leaves[name]
        if not (isinstance(weights, torch.Tensor) and weights.requires_grad):
            return leaf
        feature = self._planned.plan.feature(name)
        weighted = _OfWeights.apply(leaf, weights, feature, self._rows[feature.table])  # type: ignore[no-untyped-call]
        return cast(torch.Tensor, weighted)

    def __getitem__(self, name: str) -> torch.Tensor:
        super().__getitem__(name)
        return self._outputs[name]

    @property
    def reaches_all(self) -> bool:
        """Whether `backward` has reached every feature whose rows are trained."""
        return all(leaf.grad is not None for leaf in self.leaves())

    def collect(self, grads: JaggedRows) -> None:
        """Adds the gradients of the features that `backward` has reached to zeros of the request's rows."""
        embeddings, plan = self._planned.embeddings, self._planned.plan
        if self._planned.joined:
            embeddings.collect_joined(plan, self._leaves[ALL], grads, self._rows)
        else:
            embeddings.collect(plan, self._leaves, grads, rows=self._rows)

    def gradients(self) -> dict[str, tuple[Ids, Rows]]:
        reached = {name for name, leaf in self._leaves.items() if leaf.grad is not None}
        self._check_reached(reached=bool(reached))
        unique = self._planned.plan.unique
        grads = JaggedRows.zeros(unique)
        self.collect(grads)
        table_of = self._planned.embeddings.table_of
        tables = set(table_of.values() if ALL in reached else (table_of[name] for name in reached))
        return {table: (unique[table], grad_UD) for table, grad_UD in grads.items() if table in tables}


class _OfWeights(torch.autograd.Function):
    """Passes pooled rows on. In backward each weight gets the dot product of its row and its bag's gradient."""

    @staticmethod
    def forward(
        ctx: Any, leaf: torch.Tensor, weights: torch.Tensor, feature: FeaturePlan, rows_UD: Rows
    ) -> torch.Tensor:
        ctx.feature, ctx.rows_UD, ctx.shape = feature, rows_UD, weights.shape
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, grad_BD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        feature: FeaturePlan = ctx.feature
        rows_UD = to_device(ctx.rows_UD, grad_BD.device)
        row_ND = rows_UD.index_select(0, to_device(feature.inverse_N, grad_BD.device))
        grad_ND = grad_BD
        if feature.offsets_B1 is not None:
            lengths_B = to_device(np.diff(feature.offsets_B1), grad_BD.device)
            grad_ND = grad_BD.repeat_interleave(lengths_B, dim=0, output_size=feature.inverse_N.size)
        return grad_BD, (row_ND * grad_ND).sum(dim=1).reshape(ctx.shape), None, None


_CPU = torch.device("cpu")


def _feature(name: str, bag: Bag) -> Feature:
    if bag.pooling not in ("sum", "mean", "max", "none"):
        raise UserError(f"feature {name}: pooling {bag.pooling!r}; allowed: sum, mean, max, none")
    if bag.weights is not None and bag.pooling != "sum":
        raise UserError(f"feature {name}: pooling {bag.pooling} takes no weights; allowed: sum")
    return Feature(name, bag.table or name, bag.pooling if bag.weights is None else "weighted")


def _ragged(name: str, bag: object) -> Ragged:
    if not isinstance(bag, Bag):
        raise UserError(f"feature {name}: is given a {type(bag).__name__}; allowed: a Bag")
    if (bag.lengths is None) == (bag.offsets is None):
        raise UserError(f"feature {name}: a Bag takes lengths or offsets, one of the two")
    values_N = flat_ids(f"feature {name}", bag.values)[0]
    weights_N = _weights(name, bag, values_N.size)
    if bag.offsets is None:
        return Ragged(values_N, _numbers(name, bag.lengths, np.int32), weights_N)
    offsets_B1 = _numbers(name, bag.offsets, np.int64)
    if not offsets_B1.size or offsets_B1[0] != 0 or (np.diff(offsets_B1) < 0).any():
        raise UserError(f"feature {name}: offsets begin at 0, do not fall, and end with the number of ids")
    return Ragged(values_N, np.diff(offsets_B1).astype(np.int32), weights_N)


def _weights(name: str, bag: Bag, num_ids: int) -> npt.NDArray[np.float32] | None:
    """The weights; ones where a function returns them later."""
    if callable(bag.weights):
        return np.ones(num_ids, np.float32)
    return None if bag.weights is None else _numbers(name, bag.weights, np.float32)


def _weights_of(plan: Plan, name: str, weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The part of a plan's weights that a feature has."""
    columns = plan.features_FK[plan.names.index(name)]
    first = max(int(columns[kernels.WEIGHTS_AT]), 0)  # -1 for a feature without ids
    return weights[first : first + int(columns[kernels.NUM_IDS])]


def _numbers(name: str, values: Any, dtype: Any) -> npt.NDArray[Any]:
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if np.issubdtype(dtype, np.integer) and array.dtype.kind not in "iu":
        raise UserError(f"feature {name}: lengths or offsets are {array.dtype}; allowed: whole numbers")
    if array.dtype.kind not in "iuf":
        raise UserError(f"feature {name}: weights are {array.dtype}; allowed: numbers")
    return np.ascontiguousarray(array.reshape(-1), dtype=dtype)
