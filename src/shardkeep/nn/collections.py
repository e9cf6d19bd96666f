"""EmbeddingBagCollection and EmbeddingCollection: `nn.Module`s whose rows are on a client's servers."""

# B = samples, N = ids of a feature, D = embedding dim

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from shardkeep.base.errors import UserError
from shardkeep.base.logs.log import EventLog
from shardkeep.loop.client import EmbeddingClient
from shardkeep.loop.steps import Pending
from shardkeep.nn.jagged import Jagged, Keyed, jagged_of
from shardkeep.nn.push import Scale, StepPush
from shardkeep.workers.data.schema import Feature
from shardkeep.workers.embeddings.bags import ALL, Bag, BagForm, KeyedBags
from shardkeep.workers.embeddings.loop_lookup import Lookup

Pooling = Literal["sum", "mean", "max"]
_log = EventLog("custom")


class Ahead:
    """Features whose rows are on their way; `forward` takes it in place of the features. `pending`: None where all
    rows are frozen, which are requested by `forward`."""

    def __init__(self, inputs: Mapping[str, Jagged], pending: Pending[Lookup] | None) -> None:
        self.inputs, self.pending = inputs, pending


class _WithoutRows(dict[str, Any]):
    """Metadata of a state dict. Warns when it is pickled, as by torch.save, of a client that has saved no rows."""

    def __init__(self, metadata: Mapping[str, Any], client: EmbeddingClient) -> None:
        super().__init__(metadata)
        self._client = client

    def __reduce_ex__(self, _protocol: object) -> tuple[Any, ...]:
        if not self._client.saved:
            _log.warning(
                "a state dict without rows was written, because they are on servers; client.checkpoint and client.save "
                "write them, and for a TorchRec model shardkeep.torchrec.save(model, FILE)",
                once="no rows",
            )
        return OrderedDict, (), None, None, iter(self.items())

    def __deepcopy__(self, memo: object) -> _WithoutRows:
        return self


def _mark(module: _Collection, state: Any, prefix: str, metadata: Mapping[str, Any]) -> None:
    """A hook of `state_dict`."""
    if hasattr(state, "_metadata"):
        state._metadata[prefix[:-1]] = _WithoutRows(metadata, module.client)


class _Collection(nn.Module):
    """What the two modules share. It has no parameters: the rows are on the servers.

    Args:
        client: Has the tables.
        features: Feature name to table name. Features that name one table share it.
        steps: backward = rows are pushed at the end of each backward pass; or the optimizer after whose `step` they
            are, so that several passes become one step.
        scale: Factor of row gradients: mean = 1 / number of trainers, as DDP averages; sum; a number, or a function
            that returns it, such as `lambda: 1 / scaler.get_scale()`.

    All modules over a client are one step and one push. Without gradients (`torch.no_grad`) rows are read, and no step
    is made. Rows of frozen tables need no gradient, and a backward pass that reaches no other rows ends no step.
    """

    def __init__(
        self,
        client: EmbeddingClient,
        features: Mapping[str, str],
        *,
        steps: Literal["backward"] | torch.optim.Optimizer = "backward",
        scale: Scale = "mean",
    ) -> None:
        super().__init__()
        dims = {table.name: table.dim for table in client.tables}
        for name, table in features.items():
            if table not in dims:
                raise UserError(f"feature {name}: unknown table {table}; the tables are {', '.join(dims)}")
        self.client = client
        self.features = dict(features)
        self.feature_dims = {name: dims[table] for name, table in features.items()}
        """Values of a row of each feature."""
        frozen = {table.name for table in client.tables if table.freeze}
        self._trains = not frozen.issuperset(self.features.values())
        self._push = StepPush.of(client, scale=scale, steps=steps)
        self._next = 0
        self.register_state_dict_post_hook(_mark)  # type: ignore[no-untyped-call]

    def prefetch(self, features: Any) -> Ahead:
        """Requests the rows of a later step, and returns at once; `forward` takes the result in place of the features.

        The first call is for the running step, each further one for the step after. So call it for every batch."""
        inputs = jagged_of(features, list(self.features))
        if not self._trains:
            return Ahead(inputs, None)
        step = max(self._next, self.client.step)
        self._next = step + 1
        return Ahead(inputs, self.client.prefetch(self._wanted(inputs), step=step))

    def _rows(self, features: Any) -> tuple[Mapping[str, Jagged], Mapping[str, torch.Tensor]]:
        """The input, and the rows under the keys of `_wanted`."""
        inputs = features.inputs if isinstance(features, Ahead) else jagged_of(features, list(self.features))
        if not torch.is_grad_enabled():
            return inputs, self.client.read(self._wanted(inputs))
        if not self._trains:  # no backward pass pushes them, so nothing waits for one
            return inputs, self.client.lookup(self._wanted(inputs))
        pending = features.pending if isinstance(features, Ahead) else None
        if pending is not None and pending.step == self.client.step:
            lookup = pending.result()
        else:  # also where an earlier step was left out, so that what was requested ahead is of another step
            self._next = self.client.step + 1
            lookup = self.client.lookup(self._wanted(inputs))
        self._push.add(lookup)
        return inputs, lookup

    def _wanted(self, inputs: Mapping[str, Jagged]) -> Any:
        """What the client looks up."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> _Collection:
        return self  # a copy of a model trains the same tables

    def extra_repr(self) -> str:
        return ", ".join(f"{name}: {table}" for name, table in self.features.items())


class EmbeddingBagCollection(_Collection):
    """Pooled rows: one row per sample and feature.

    Args:
        client, features, steps, scale: See `_Collection`.
        pooling: How the rows of a sample become one: sum, mean or max, of all features or by feature.
        weighted: The weights of the input multiply the rows (pooling: sum), and get gradients if they require them.
        joined: For `joined`, which then makes no copy.
    """

    def __init__(
        self,
        client: EmbeddingClient,
        features: Mapping[str, str],
        *,
        pooling: Pooling | Mapping[str, Pooling] = "sum",
        weighted: bool = False,
        joined: bool = False,
        steps: Literal["backward"] | torch.optim.Optimizer = "backward",
        scale: Scale = "mean",
    ) -> None:
        super().__init__(client, features, steps=steps, scale=scale)
        each: dict[str, Pooling] = {
            name: pooling if isinstance(pooling, str) else pooling.get(name, "sum") for name in features
        }
        self.pooling = each
        self.weighted = weighted
        self._form = BagForm(tuple(Feature(name, table, each[name]) for name, table in features.items()), joined)

    def forward(self, features: Any) -> dict[str, torch.Tensor]:
        """Per feature the pooled rows, float32 (B, D); of a sample without ids zeros.

        Args:
            features: A dict of feature name to a tensor (B,) or (B, K) or a jagged tensor (TorchRec's, or a nested
                tensor); or TorchRec's KeyedJaggedTensor; or what `prefetch` returned.
        """
        return self._by_feature(*self._rows(features))

    def joined(self, features: Any) -> torch.Tensor:
        """The pooled rows of all features side by side, float32 (B, sum of D). `features`: as of `forward`."""
        inputs, rows = self._rows(features)
        return rows[ALL] if ALL in rows else torch.cat(list(self._by_feature(inputs, rows).values()), dim=1)

    def _by_feature(self, inputs: Mapping[str, Jagged], rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if ALL in rows:
            return dict(
                zip(self.features, torch.split(rows[ALL], list(self.feature_dims.values()), dim=1), strict=True)
            )
        repeats = {} if isinstance(inputs, Keyed) else {name: inputs[name].inverse for name in self.features}
        return {
            name: rows[name] if (i := repeats.get(name)) is None else rows[name].index_select(0, i)
            for name in self.features
        }

    def _wanted(self, inputs: Mapping[str, Jagged]) -> dict[str, Bag] | KeyedBags:
        if isinstance(inputs, Keyed) and not self.weighted:
            return KeyedBags(self._form, inputs.ids, inputs.counts)
        most = max((len(jagged.lengths()) for jagged in inputs.values() if jagged.inverse is not None), default=0)
        for name, jagged in inputs.items():
            if self.weighted and jagged.weights_or_none() is None:
                raise UserError(f"feature {name}: has no weights, and the collection is weighted")
        return {
            name: Bag(
                jagged.values(),
                _with_empty_bags(jagged.lengths(), most),
                weights=jagged.weights_or_none() if self.weighted else None,
                table=self.features[name],
                pooling=self.pooling[name],
            )
            for name, jagged in inputs.items()
        }


class EmbeddingCollection(_Collection):
    """Rows of every id, unpooled: for sequences. Arguments: see `_Collection`."""

    def __init__(self, client: EmbeddingClient, features: Mapping[str, str], **push: Any) -> None:
        super().__init__(client, features, **push)
        self._form = BagForm(tuple(Feature(name, table, "none") for name, table in features.items()))

    def forward(self, features: Any) -> dict[str, Jagged]:
        """Per feature the rows of its ids, `values()` float32 (N, D), with the lengths of the input.

        Args:
            features: As of `EmbeddingBagCollection.forward`.
        """
        inputs, rows = self._rows(features)
        return {name: Jagged(rows[name], each.lengths(), each.weights_or_none()) for name, each in inputs.items()}

    def _wanted(self, inputs: Mapping[str, Jagged]) -> dict[str, Bag] | KeyedBags:
        if isinstance(inputs, Keyed):
            return KeyedBags(self._form, inputs.ids, inputs.counts)
        most = max((len(jagged.lengths()) for jagged in inputs.values()), default=0)
        return {
            name: Bag(
                jagged.values(), _with_empty_bags(jagged.lengths(), most), table=self.features[name], pooling="none"
            )
            for name, jagged in inputs.items()
        }


def _with_empty_bags(lengths: torch.Tensor, most: int) -> torch.Tensor:
    """The lengths of at least so many bags."""
    return nn.functional.pad(lengths, (0, max(0, most - len(lengths))))
