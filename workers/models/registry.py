"""From a model's settings to the module: the models by name, and the user's own module:Class."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from torch import nn

from shardkeep.base.errors import UserError
from shardkeep.base.machine.memory import memory_errors, size_text
from shardkeep.base.modules import load_named
from shardkeep.workers.config import ModelConfig
from shardkeep.workers.models.dcn_v2 import DcnV2
from shardkeep.workers.models.deepfm import DeepFm
from shardkeep.workers.models.dlrm import Dlrm
from shardkeep.workers.models.wide_deep import WideDeep

MODELS: dict[str, type[nn.Module]] = {"dlrm": Dlrm, "dcn_v2": DcnV2, "deepfm": DeepFm, "wide_deep": WideDeep}

# What each model takes beyond top, dropout and activation_checkpointing.
_OPTIONS: dict[str, tuple[str, ...]] = {
    "dlrm": ("bottom",),
    "dcn_v2": ("cross_layers", "cross_rank"),
    "deepfm": (),
    "wide_deep": (),
}
_NEEDS_DEFAULT_DIM = ("dlrm", "deepfm")
_DEFAULT_WIDTHS = [512, 256]
FLOAT_BYTES = 4


def build_model(
    config: ModelConfig,
    *,
    num_dense: int,
    features: Mapping[str, int],
    default_dim: int,
    import_from: Path | None = None,
) -> nn.Module:
    """The module that `config` names, with start values from torch's global generator (the caller seeds it).

    Args:
        num_dense: dense columns; may be 0.
        features: name -> dim of its table, in the order of the data's schema.
        default_dim: the dim that models with dot products project every feature to.
        import_from: folder where a user's module:Class is looked for last, after the import path.

    Raises:
        UserError: an unknown model, an option the model does not use, or a class that cannot be built.
    """
    if num_dense == 0 and not features:
        raise UserError(f"model.name: {config.name} has no input: the data has no dense and no sparse columns")
    if ":" in config.name:
        return _own_model(config, num_dense=num_dense, features=features, import_from=import_from)
    if config.name not in MODELS:
        raise UserError(f"model.name: {config.name} is unknown; allowed: {', '.join(MODELS)}, or module:Class")
    _refuse_unused(config, {"top", "dropout", *_OPTIONS[config.name]})
    if config.bottom is not None and num_dense == 0:
        raise UserError("model.bottom: has no effect: the data has no dense columns")
    arguments = _arguments(config)
    if config.name in _NEEDS_DEFAULT_DIM:
        arguments["default_dim"] = default_dim
    _refuse_too_wide(config)
    with memory_errors("the layers of the model; allowed: narrower ones in model.bottom and model.top"):
        return MODELS[config.name](num_dense=num_dense, features=features, **arguments)


def _refuse_too_wide(config: ModelConfig) -> None:
    """Raises UserError for one layer that this machine has no memory for: a system that promises more kills later."""
    for key in ("bottom", "top"):
        widths = getattr(config, key) or []
        for inputs, outputs in itertools.pairwise(widths):
            asked, held = inputs * outputs * FLOAT_BYTES, psutil.virtual_memory().total
            if asked > held:
                raise UserError(
                    f"model.{key}: a layer from {inputs:,} to {outputs:,} asks for {size_text(asked)} of memory, "
                    f"this machine has {size_text(held)}; allowed: narrower layers"
                )


def _arguments(config: ModelConfig) -> dict[str, Any]:
    defaults: dict[str, Any] = {"bottom": _DEFAULT_WIDTHS, "cross_layers": 3, "cross_rank": None}
    arguments: dict[str, Any] = {
        "top": _DEFAULT_WIDTHS if config.top is None else config.top,
        "dropout": config.dropout or 0.0,
        "checkpointing": config.activation_checkpointing,
    }
    for key in _OPTIONS[config.name]:
        value = getattr(config, key)
        arguments[key] = defaults[key] if value is None else value
    return arguments


def _refuse_unused(config: ModelConfig, used: set[str]) -> None:
    for key in ("bottom", "top", "cross_layers", "cross_rank", "dropout"):
        if key not in used and getattr(config, key) is not None:
            allowed = ", ".join(sorted(used)) or "options"
            raise UserError(f"model.{key}: has no effect with model.name: {config.name}; it uses {allowed}")
    if config.options and "options" not in used:
        raise UserError(
            f"model.options: has no effect with model.name: {config.name}; it is for a module:Class of your own"
        )


def _own_model(
    config: ModelConfig, *, num_dense: int, features: Mapping[str, int], import_from: Path | None
) -> nn.Module:
    _refuse_unused(config, {"options"})
    if config.activation_checkpointing:
        raise UserError(f"model.activation_checkpointing: has no effect with model.name: {config.name}")
    own = load_named(config.name, setting="model.name", folder=import_from)
    try:
        with memory_errors(f"{config.name}; allowed: a smaller model"):
            model = own(num_dense=num_dense, features=dict(features), **config.options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"model.name: {config.name} could not be built with num_dense, features and "
            f"options {config.options}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model.name: {config.name} made a {type(model).__name__}; it must be an nn.Module")
    return model
