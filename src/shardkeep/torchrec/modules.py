"""Sharded modules over a client: what TorchRec's DistributedModelParallel and pipelines find in a sharded model."""

# B = samples, D = embedding dim

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, JaggedTensor, KeyedTensor
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.types import LazyNoWait, NoWait, NullShardedModuleContext, ShardedModule
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.modules.feature_processor_ import FeatureProcessorsCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.fused import FusedOptimizer, FusedOptimizerModule

from shardkeep import nn as snn
from shardkeep.base.errors import UserError
from shardkeep.launch.machine import world_size
from shardkeep.loop.client import EmbeddingClient
from shardkeep.loop.connecting import connect
from shardkeep.nn.collections import Ahead
from shardkeep.nn.jagged import Jagged, jagged_of
from shardkeep.nn.push import Scale, StepPush
from shardkeep.ps.config import TableSpec
from shardkeep.torchrec.configs import (
    PROCESSED,
    collections_of,
    configs_of,
    is_frozen,
    optimizer_of,
    specs_of,
    weight_of,
)

BLOCK = 65_536
"""Rows that `unshard` reads at once."""


class RowOptimizer(FusedOptimizer):  # type: ignore[misc]
    """The row optimizers of servers, as TorchRec sees them: `step` does nothing here. The `lr` of its one group is that
    of the first table; a change of it changes all tables by the same factor."""

    def __init__(self, lrs: Mapping[str, float]) -> None:
        params = {table: nn.Parameter(torch.empty(0), requires_grad=False) for table in lrs}
        self._lr = next(iter(lrs.values()), 1.0)
        super().__init__(params, {}, [{"params": list(params.values()), "lr": self._lr}] if lrs else [])

    @property
    def factor(self) -> float:
        """What multiplies all tables' learning rates now."""
        (factor,) = [float(group["lr"]) / self._lr for group in self.param_groups] or [1.0]
        return max(factor, 2.0**-126)

    def step(self, closure: Any = None) -> None:
        pass

    def zero_grad(self, set_to_none: bool = False) -> None:
        pass


class _Splits(KJTListSplitsAwaitable):  # type: ignore[misc]
    """Features whose rows are on their way; nothing to wait for: `compute` does."""

    def __init__(self, found: Any, ctx: Any) -> None:
        super().__init__([NoWait(NoWait(found))], ctx)


class OnServers(ShardedModule, FusedOptimizerModule):  # type: ignore[misc]
    """A collection over a client."""

    def __init__(self, own: nn.Module, client: EmbeddingClient, tables: Mapping[str, str], **push: Any) -> None:
        super().__init__()
        self.configs = configs_of(own)
        self.kind = type(own)
        names = get_embedding_names_by_table(self.configs)
        self.names: list[str] = list(chain(*names))
        """Of the outputs: a feature, or FEATURE@TABLE for one that several tables have."""
        features = list(chain(*(config.feature_names for config in self.configs)))
        self._feature_of = dict(zip(self.names, features, strict=True))
        table_of = {
            name: tables.get(config.name, config.name)
            for config, some in zip(self.configs, names, strict=True)
            for name in some
        }
        self._inner = self._collection(own, client, table_of, **push)
        used = {spec.name: spec for spec in client.tables if spec.name in set(table_of.values())}
        lrs = {name: spec.optimizer.lr for name, spec in used.items() if not spec.freeze}
        self._frozen = {c.name for c in self.configs if used[tables.get(c.name, c.name)].freeze}
        self._optimizer = RowOptimizer(lrs)
        StepPush.of(client, **push).watch_lr(self._optimizer)
        self._table_names = tables

    def _collection(self, own: nn.Module, client: EmbeddingClient, table_of: Mapping[str, str], **push: Any) -> Any:
        raise NotImplementedError

    def _restored(self, device: torch.device) -> nn.Module:
        raise NotImplementedError

    @property
    def fused_optimizer(self) -> RowOptimizer:
        return self._optimizer

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return self.kind

    def create_context(self) -> Any:
        return NullShardedModuleContext()

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Requests the rows; does not wait for them."""
        given = jagged_of(features, list(dict.fromkeys(self._feature_of.values())))
        own = list(given) == self.names
        inputs = given if own else {name: given[feature] for name, feature in self._feature_of.items()}
        return _Splits(self._inner.prefetch(inputs) if torch.is_grad_enabled() else inputs, ctx)

    def output_dist(self, ctx: Any, output: Any) -> Any:
        return LazyNoWait(output)

    def freeze_tables(self, own: nn.Module) -> None:
        """Lets the frozen tables of a collection of TorchRec's need no gradient."""
        for table in self._frozen:
            weight_of(own, table).requires_grad_(False)

    @property
    def client(self) -> EmbeddingClient:
        found: EmbeddingClient = self._inner.client
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """The state that the collection has in TorchRec: the rows that the servers have now."""
        held = "embedding_bags" if isinstance(self, BagsOnServers) else "embeddings"
        return {f"{held}.{config.name}.weight": self._rows(config) for config in self.configs}

    def _rows(self, config: Any) -> torch.Tensor:
        """All rows of a table, float32 (num_embeddings, D)."""
        client, table = self._inner.client, self._table_names.get(config.name, config.name)
        starts = range(0, config.num_embeddings, BLOCK)
        ids = (torch.arange(start, min(start + BLOCK, config.num_embeddings)) for start in starts)
        return torch.cat([client.read({table: block})[table] for block in ids])


class BagsOnServers(OnServers):
    """An EmbeddingBagCollection over a client."""

    def _collection(self, own: nn.Module, client: EmbeddingClient, table_of: Mapping[str, str], **push: Any) -> Any:
        pooling = {
            name: config.pooling.value.lower()
            for config, some in zip(self.configs, get_embedding_names_by_table(self.configs), strict=True)
            for name in some
        }
        self._weighted = bool(own.is_weighted())  # type: ignore[operator]
        inner = snn.EmbeddingBagCollection(
            client, table_of, pooling=pooling, weighted=self._weighted, joined=True, **push
        )
        self._dims = list(inner.feature_dims.values())
        return inner

    def compute(self, ctx: Any, dist_input: Any) -> Any:
        return KeyedTensor(self.names, self._dims, self._inner.joined(dist_input[0]))

    def _restored(self, device: torch.device) -> nn.Module:
        found: nn.Module = EmbeddingBagCollection(self.configs, is_weighted=self._weighted, device=device)
        return found


class _Processed:
    """Features on their way to a collection with feature processors, whose weights `compute` sets."""

    def __init__(self, features: Any, names: Sequence[str]) -> None:
        self.features = features
        self.weights: dict[str, torch.Tensor] = {}
        self.inputs = {
            name: Jagged(each.values(), each.lengths(), partial(self.weights.__getitem__, name), each.inverse)
            for name, each in jagged_of(features, names).items()
        }


class ProcessedBagsOnServers(BagsOnServers):
    """A FeatureProcessedEmbeddingBagCollection over a client. The processors are part of the dense model: they run
    with the forward pass, so that rows requested ahead get the weights of their own step."""

    def __init__(self, own: Any, client: EmbeddingClient, tables: Mapping[str, str], **push: Any) -> None:
        super().__init__(own, client, tables, **push)
        self._feature_processors = own._feature_processors

    def input_dist(self, ctx: Any, features: Any) -> Any:
        given = _Processed(features, list(dict.fromkeys(self._feature_of.values())))
        inputs = {name: given.inputs[feature] for name, feature in self._feature_of.items()}
        return _Splits((given, self._inner.prefetch(inputs) if torch.is_grad_enabled() else inputs), ctx)

    def compute(self, ctx: Any, dist_input: Any) -> Any:
        given, inputs = dist_input[0]
        given.weights.update(self._weights(given))
        return super().compute(ctx, [inputs])

    def _weights(self, given: _Processed) -> dict[str, torch.Tensor]:
        if isinstance(self._feature_processors, FeatureProcessorsCollection):
            done = self._feature_processors(given.features).to_dict()
        else:
            parts = given.features.to_dict()
            done = {name: self._feature_processors[name](parts[name]) for name in given.inputs}
        return {name: done[name].weights() for name in given.inputs}

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        return iter(())  # so that DDP takes the processors' parameters

    def weights(self) -> dict[str, torch.Tensor]:
        return {f"{PROCESSED}.{name}": rows for name, rows in super().weights().items()}

    def _restored(self, device: torch.device) -> nn.Module:
        processors = self._feature_processors
        given = dict(processors.items()) if isinstance(processors, nn.ModuleDict) else processors
        found: nn.Module = FeatureProcessedEmbeddingBagCollection(super()._restored(device), given)
        return found


class RowsOnServers(OnServers):
    """An EmbeddingCollection over a client."""

    def _collection(self, own: nn.Module, client: EmbeddingClient, table_of: Mapping[str, str], **push: Any) -> Any:
        self._need_indices = bool(own.need_indices())  # type: ignore[operator]
        return snn.EmbeddingCollection(client, table_of, **push)

    def compute(self, ctx: Any, dist_input: Any) -> Any:
        found: Mapping[str, Jagged] = self._inner(dist_input[0])
        inputs = dist_input[0].inputs if isinstance(dist_input[0], Ahead) else dist_input[0]
        ids = {name: each.values() if self._need_indices else None for name, each in inputs.items()}
        return {
            name: JaggedTensor(values=each.values(), lengths=each.lengths(), weights=ids[name])
            for name, each in found.items()
        }

    def _restored(self, device: torch.device) -> nn.Module:
        found: nn.Module = EmbeddingCollection(self.configs, device=device, need_indices=self._need_indices)
        return found


_ON_SERVERS: Mapping[type[nn.Module], type[OnServers]] = {
    EmbeddingBagCollection: BagsOnServers,
    EmbeddingCollection: RowsOnServers,
    FeatureProcessedEmbeddingBagCollection: ProcessedBagsOnServers,
}


def sharded(
    model: Any,
    client: EmbeddingClient,
    tables: Mapping[str, str],
    *,
    scale: Scale,
    steps: Literal["backward"] | torch.optim.Optimizer,
) -> Any:
    """As `shardkeep.torchrec.shard`."""
    found = list(collections_of(model))
    if not found:
        raise UserError("the model holds no EmbeddingBagCollection and no EmbeddingCollection")
    for _, own in found:
        _check_tables(own, client, tables)
    for name, own in found:
        model = _replaced(model, name, _ON_SERVERS[type(own)](own, client, tables, scale=scale, steps=steps))
    return model


def on_servers(model: nn.Module) -> Iterator[OnServers]:
    """The collections that `shard` has put on servers."""
    yield from (module for module in model.modules() if isinstance(module, OnServers))


def refuse_sharded(model: nn.Module) -> None:
    """Raises UserError if `shard` was called with this model before."""
    if any(on_servers(model)):
        raise UserError("shard: the collections of this model are on servers already; client_of(model) is their client")


def own_client(model: nn.Module, tables: Mapping[str, str]) -> EmbeddingClient:
    """The client for a script that makes none: of the job around it, or of two servers on this machine."""
    if os.environ.get("SHARDKEEP_RUN") or (world_size() or 1) > 1:
        return connect()
    return EmbeddingClient.serve(client_tables(model, tables))


def client_tables(model: nn.Module, tables: Mapping[str, str]) -> list[TableSpec]:
    """The tables of a model, each once, under the names that a client has for them."""
    specs = {tables.get(spec.name, spec.name): spec for spec in specs_of(model, None)}
    return [spec.model_copy(update={"name": name}) for name, spec in specs.items()]


def unsharded(model: Any) -> Any:
    """As `shardkeep.torchrec.unshard`."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, OnServers)]
    for name, module in found:
        own = module._restored(torch.device("cpu"))
        own.load_state_dict(module.state_dict() | module.weights())
        module.freeze_tables(own)
        model = _replaced(model, name, own)
    return model


def _replaced(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    if not name:
        return module
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
    return model


def _check_tables(own: nn.Module, client: EmbeddingClient, tables: Mapping[str, str]) -> None:
    held = {spec.name: spec for spec in client.tables}
    for config in configs_of(own):
        spec = held.get(tables.get(config.name, config.name))
        if spec is None:
            allowed = "; allowed: the tables of tables_of(model), or shard(..., tables={NAME: ITS NAME THERE})"
            raise UserError(f"table {config.name}: the client has no such table; it has {', '.join(held)}{allowed}")
        if spec.dim != config.embedding_dim:
            dims = f"{config.embedding_dim} values, the client's {spec.dim}"
            raise UserError(f"table {config.name}: its rows have {dims}")
        if is_frozen(own, config.name) and not spec.freeze:
            raise UserError(
                f"table {config.name}: its weight has requires_grad False, and the client's table is trained; allowed: "
                "TableSpec(freeze=True), as tables_of(model) has it"
            )
        wanted = optimizer_of(own, config.name)
        if wanted is not None and wanted != spec.optimizer:
            raise UserError(
                f"table {config.name}: the model's optimizer is {wanted.name} with lr {wanted.lr:g}, the client's "
                f"{spec.optimizer.name} with lr {spec.optimizer.lr:g}; allowed: the same (tables_of(model))"
            )
