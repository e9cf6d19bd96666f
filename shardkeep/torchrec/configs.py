"""TorchRec's table configs and in-backward optimizers as tables of a client."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from shardkeep.base.errors import UserError
from shardkeep.ps.config import AdagradConfig, AdamConfig, InitConfig, RowwiseAdagradConfig, SgdConfig, TableSpec

KINDS = (EmbeddingBagCollection, EmbeddingCollection)
_RENAMED = {"initial_accumulator_value": "initial_accumulator"}
_CONFIGS: Mapping[type[torch.optim.Optimizer], Any] = {
    torch.optim.SGD: SgdConfig,
    torch.optim.Adagrad: AdagradConfig,
    torch.optim.Adam: AdamConfig,
    RowWiseAdagrad: RowwiseAdagradConfig,
}
"""Optimizers of torch and TorchRec, and those of servers with the same rule."""


def collections_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The embedding collections of a model by their names in it; "" = the model itself."""
    for name, module in model.named_modules():
        if type(module) in KINDS:
            yield name, module


def configs_of(collection: Any) -> list[Any]:
    """The configs of a collection's tables."""
    bags = isinstance(collection, EmbeddingBagCollection)
    found: list[Any] = collection.embedding_bag_configs() if bags else collection.embedding_configs()
    return found


def specs_of(model: nn.Module, optimizer: Any) -> list[TableSpec]:
    """As `shardkeep.torchrec.tables_of`."""
    specs: dict[str, TableSpec] = {}
    for _, collection in collections_of(model):
        for config in configs_of(collection):
            if config.name in specs:
                raise UserError(f"table {config.name}: two collections of the model have it; allowed: different names")
            specs[config.name] = _spec(config, optimizer_of(collection, config.name) or optimizer)
    if not specs:
        raise UserError("the model holds no EmbeddingBagCollection and no EmbeddingCollection")
    return list(specs.values())


def _spec(config: Any, optimizer: Any) -> TableSpec:
    if config.data_type != DataType.FP32:
        raise UserError(f"table {config.name}: data_type {config.data_type.value}; allowed: FP32")
    if config.init_fn is not None and config.weight_init_min is None and _is_own(config.init_fn):
        raise UserError(f"table {config.name}: init_fn is a function; allowed: weight_init_min and weight_init_max")
    if optimizer is None:
        allowed = "tables_of(model, optimizer=AdagradConfig(lr=...))"
        raise UserError(f"table {config.name}: has no optimizer; allowed: apply_optimizer_in_backward, or {allowed}")
    init = InitConfig(low=config.get_weight_init_min(), high=config.get_weight_init_max())
    return TableSpec(name=config.name, dim=config.embedding_dim, optimizer=optimizer, init=init)


def _is_own(function: Any) -> bool:
    """Whether an `init_fn` is the user's; configs set one of their own that draws uniformly."""
    return not str(getattr(function, "func", function)).startswith("<function uniform_")


def optimizer_of(collection: nn.Module, table: str) -> Any:
    """The optimizer that `apply_optimizer_in_backward` gave a table; None = none."""
    tables: Any = collection.embedding_bags if isinstance(collection, EmbeddingBagCollection) else collection.embeddings
    weight = tables[table].weight
    classes = getattr(weight, "_optimizer_classes", None)
    return _optimizer(table, classes[0], weight._optimizer_kwargs[0]) if classes else None


def _optimizer(table: str, kind: type[torch.optim.Optimizer], given: Mapping[str, Any]) -> Any:
    config = _CONFIGS.get(kind)
    if config is None:
        allowed = ", ".join(each.__name__ for each in _CONFIGS)
        raise UserError(f"table {table}: optimizer {kind.__name__} has no rule on servers; allowed: {allowed}")
    usual = {name: each.default for name, each in inspect.signature(kind.__init__).parameters.items()}
    settings: dict[str, Any] = {}
    for name, value in (usual | dict(given)).items():
        key = _RENAMED.get(name, name)
        if key in config.model_fields and value is not inspect.Parameter.empty:
            settings[key] = value
        elif name in given and value != usual.get(name):
            raise UserError(f"table {table}: optimizer {kind.__name__} with {name}={value}, which servers do not have")
    return config(**{key: value for key, value in settings.items() if key not in ("name", "schedule")})
