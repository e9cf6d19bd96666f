"""TorchRec's table configs and in-backward optimizers as tables of a client."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim import optimizers as fused
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from shardkeep.base.errors import UserError
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.table.initializers.config import InitConfig
from shardkeep.ps.server.table.optimizers.adagrad import AdagradConfig
from shardkeep.ps.server.table.optimizers.adam import AdamConfig
from shardkeep.ps.server.table.optimizers.lamb import LambConfig
from shardkeep.ps.server.table.optimizers.lars_sgd import LarsSgdConfig
from shardkeep.ps.server.table.optimizers.partial_rowwise_adam import PartialRowwiseAdamConfig
from shardkeep.ps.server.table.optimizers.rowwise_adagrad import RowwiseAdagradConfig
from shardkeep.ps.server.table.optimizers.sgd import SgdConfig

KINDS = (EmbeddingBagCollection, EmbeddingCollection, FeatureProcessedEmbeddingBagCollection)
PROCESSED = "_embedding_bag_collection"
"""Where a collection with feature processors holds its own collection of bags."""


@dataclass(frozen=True)
class _Rule:
    """What servers do for an optimizer class of torch or TorchRec."""

    config: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings in which the class differs from the config's defaults."""
    fbgemm: bool = False
    """Whether the class only names an optimizer of FBGEMM, whose arguments and defaults it then has."""
    usual: Mapping[str, Any] = field(default_factory=dict)
    """Defaults that FBGEMM has in place of the class's own: TorchRec's sharding passes only what was given."""
    refused: frozenset[str] = frozenset()
    """Arguments that mean something else there than on servers."""


_DECOUPLED = frozenset({"weight_decay"})
"""FBGEMM's Adams decay weights apart from the gradient; servers add the decay to it."""
_RULES: Mapping[type[torch.optim.Optimizer], _Rule] = {
    torch.optim.SGD: _Rule(SgdConfig),
    torch.optim.Adagrad: _Rule(AdagradConfig, usual={"eps": 1e-8}),
    torch.optim.Adam: _Rule(AdamConfig, {"eps_after_correction": True}),
    torch.optim.SparseAdam: _Rule(AdamConfig),
    RowWiseAdagrad: _Rule(RowwiseAdagradConfig, usual={"eps": 1e-8}),
    fused.SGD: _Rule(SgdConfig, fbgemm=True),
    fused.Adagrad: _Rule(AdagradConfig, fbgemm=True),
    fused.Adam: _Rule(AdamConfig, {"eps_after_correction": True}, fbgemm=True, refused=_DECOUPLED),
    fused.PartialRowWiseAdam: _Rule(PartialRowwiseAdamConfig, fbgemm=True, refused=_DECOUPLED),
    fused.LarsSGD: _Rule(LarsSgdConfig, fbgemm=True),
    fused.LAMB: _Rule(LambConfig, fbgemm=True),
}
"""Optimizers of torch and TorchRec, and those of servers with the same rule."""
_RENAMED = {"initial_accumulator_value": "initial_accumulator", "learning_rate": "lr"}
_NOT_THEIRS = ("name", "schedule")
"""Settings of servers that no class has."""
_FBGEMM: Mapping[str, Any] = {
    "lr": 0.01,
    "eps": 1e-8,
    "betas": (0.9, 0.999),
    "eta": 0.001,
    "momentum": 0.9,
    "weight_decay": 0.0,
}
"""FBGEMM's defaults."""


def collections_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The embedding collections of a model by their names in it; "" = the model itself. One with feature processors
    comes in place of the bags that it holds."""
    for name, module in model.named_modules():
        if type(module) in KINDS and not name.endswith(PROCESSED):
            yield name, module


def bags_of(collection: Any) -> Any:
    """The collection that has the tables."""
    return getattr(collection, PROCESSED, collection)


def configs_of(collection: Any) -> list[Any]:
    """The configs of a collection's tables."""
    own = bags_of(collection)
    bags = isinstance(own, EmbeddingBagCollection)
    found: list[Any] = own.embedding_bag_configs() if bags else own.embedding_configs()
    return found


def specs_of(model: nn.Module, optimizer: Any) -> list[TableSpec]:
    """As `shardkeep.torchrec.tables_of`."""
    specs: dict[str, TableSpec] = {}
    for _, collection in collections_of(model):
        for config in configs_of(collection):
            if config.name in specs:
                raise UserError(f"table {config.name}: two collections of the model have it; allowed: different names")
            frozen = is_frozen(collection, config.name)
            specs[config.name] = _spec(config, optimizer_of(collection, config.name) or optimizer, frozen=frozen)
    if not specs:
        raise UserError("the model holds no EmbeddingBagCollection and no EmbeddingCollection")
    return list(specs.values())


def _spec(config: Any, optimizer: Any, *, frozen: bool) -> TableSpec:
    if config.data_type != DataType.FP32:
        raise UserError(f"table {config.name}: data_type {config.data_type.value}; allowed: FP32")
    if config.init_fn is not None and config.weight_init_min is None and _is_own(config.init_fn):
        raise UserError(f"table {config.name}: init_fn is a function; allowed: weight_init_min and weight_init_max")
    if optimizer is None and frozen:
        optimizer = SgdConfig()  # it has no state
    if optimizer is None:
        allowed = "tables_of(model, optimizer=AdagradConfig(lr=...))"
        raise UserError(f"table {config.name}: has no optimizer; allowed: apply_optimizer_in_backward, or {allowed}")
    init = InitConfig(low=config.get_weight_init_min(), high=config.get_weight_init_max())
    return TableSpec(name=config.name, dim=config.embedding_dim, optimizer=optimizer, init=init, freeze=frozen)


def _is_own(function: Any) -> bool:
    """Whether an `init_fn` is the user's; configs set one of their own that draws uniformly."""
    return not str(getattr(function, "func", function)).startswith("<function uniform_")


def optimizer_of(collection: nn.Module, table: str) -> Any:
    """The optimizer that `apply_optimizer_in_backward` gave a table; None = none."""
    weight = weight_of(collection, table)
    classes = getattr(weight, "_optimizer_classes", None)
    return _optimizer(table, classes[0], weight._optimizer_kwargs[0]) if classes else None


def is_frozen(collection: nn.Module, table: str) -> bool:
    """Whether a table's weight does not require grad."""
    return not weight_of(collection, table).requires_grad


def weight_of(collection: nn.Module, table: str) -> Any:
    """The weight of one of a collection's tables."""
    own = bags_of(collection)
    tables: Any = own.embedding_bags if isinstance(own, EmbeddingBagCollection) else own.embeddings
    return tables[table].weight


def _optimizer(table: str, kind: type[torch.optim.Optimizer], given: Mapping[str, Any]) -> Any:
    rule = _RULES.get(kind)
    if rule is None:
        allowed = ", ".join(dict.fromkeys(each.__name__ for each in _RULES))
        raise UserError(f"table {table}: optimizer {kind.__name__} has no rule on servers; allowed: {allowed}")
    usual = dict(_FBGEMM) if rule.fbgemm else {**_defaults_of(kind), **rule.usual}
    settings: dict[str, Any] = {}
    for name, value in (usual | _renamed(given)).items():
        unlike = value != usual.get(name)
        if name in _NOT_THEIRS or name not in rule.config.model_fields or (unlike and name in rule.refused):
            if unlike:
                raise UserError(
                    f"table {table}: optimizer {kind.__name__} with {name}={value}, which servers do not have"
                )
        else:
            settings[name] = value
    return rule.config(**settings, **rule.settings)


def _defaults_of(kind: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """The arguments of an optimizer class that have a default."""
    found = {name: each.default for name, each in inspect.signature(kind.__init__).parameters.items()}
    return _renamed({name: value for name, value in found.items() if value is not inspect.Parameter.empty})


def _renamed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by their names on servers; `beta1` and `beta2` of FBGEMM are one there."""
    renamed = {_RENAMED.get(name, name): value for name, value in arguments.items()}
    if "beta1" in renamed or "beta2" in renamed:
        first, second = _FBGEMM["betas"]
        renamed["betas"] = (renamed.pop("beta1", first), renamed.pop("beta2", second))
    return renamed
