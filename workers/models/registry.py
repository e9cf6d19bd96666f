"""From a model's settings to the module: those that workers/model_config.py names, and the user's own module:Class."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
from torch import nn

from shardkeep.base.errors import UserError
from shardkeep.base.machine.memory import memory_errors
from shardkeep.base.plugging.modules import load_named
from shardkeep.base.sizes import size_text
from shardkeep.workers.embeddings.sequence import SequenceShape
from shardkeep.workers.encoder_config import Targets, encoder_of
from shardkeep.workers.model_config import MODELS, DlrmConfig, ModelConfig, OwnModelConfig, keys_of
from shardkeep.workers.models.encoders.encoded import Encoded, GroupEncoder
from shardkeep.workers.models.layers.hidden import HiddenOptions

_NEEDS_DEFAULT_DIM = ("fm", "deepfm", "xdeepfm", "dlrm", "autoint", "fibinet", "finalmlp")
_OF_HIDDEN_LAYERS = ("dropout", "norm", "activation", "init", "activation_checkpointing", "sync_norm")
FLOAT_BYTES = 4


def row_dim(name: str, dim: int) -> int:
    """Values of a row of a table of `dim` under a model: its vector, and one first-order weight where the model has it.

    `lr` has the weight alone."""
    model = MODELS[name].load() if name in MODELS else None
    return int(getattr(model, "row_dim", dim + getattr(model, "first_order_column", False)))


def build_model(
    config: ModelConfig,
    *,
    num_dense: int,
    features: Mapping[str, int],
    default_dim: int,
    sequences: Mapping[str, SequenceShape] = MappingProxyType({}),
    import_from: Path | None = None,
    targets: Targets = MappingProxyType({}),
) -> nn.Module:
    """The module that `config` names, with start values from torch's global generator (the caller seeds it).

    Args:
        num_dense: dense columns; may be 0.
        features: name -> values of its row, in the order of the data's schema; see `row_dim`.
        default_dim: the dim that models with dot products project every feature to.
        sequences: group -> what the model gets of it; a model of the user's own is given it only where there are some.
        import_from: folder where a user's module:Class is looked for last, after the import path.
        targets: of `targets_of`; a user's module:Class gets none.

    Raises:
        UserError: a model that does not fit the data or the machine, or a class that cannot be built.
    """
    if num_dense == 0 and not features and not sequences:
        raise UserError(f"model.name: {config.name} has no input: the data has no dense and no sparse columns")
    if isinstance(config, OwnModelConfig):
        inputs: dict[str, Any] = {"num_dense": num_dense, "features": dict(features)}
        return _own_model(config, inputs | ({"sequences": dict(sequences)} if sequences else {}), import_from)
    if isinstance(config, DlrmConfig) and config.bottom != DlrmConfig().bottom and num_dense == 0:
        raise UserError("model.bottom: has no effect: the data has no dense columns")
    arguments = _arguments(config)
    if config.name in _NEEDS_DEFAULT_DIM:
        arguments["default_dim"] = default_dim
    _refuse_too_wide(config)
    with memory_errors("the layers of the model; allowed: narrower ones in model.bottom and model.hidden"):
        groups = _groups(config, arguments, sequences, targets)
        arguments["num_dense"] = num_dense + sum(group.num_dense for group in groups.values())
        columns = {column: width for shape in sequences.values() for column, width in shape.ids.items()}
        model: nn.Module = MODELS[config.name].load()(features={**features, **columns}, **arguments)
        return Encoded(model, tuple(features), groups) if groups else model


def _groups(
    config: ModelConfig, arguments: Mapping[str, Any], sequences: Mapping[str, SequenceShape], targets: Targets
) -> dict[str, GroupEncoder]:
    """The encoder of each group, with the options of the model's hidden layers."""
    encoder, options = encoder_of(config), arguments.get("options", HiddenOptions())
    first_order = row_dim(config.name, 0) == 1
    return {
        group: GroupEncoder(shape, encoder, options, first_order=first_order, targets=targets.get(group, {}))
        for group, shape in sequences.items()
    }


def start_at(model: nn.Module, mean: float) -> None:
    """Lets a model of `MODELS` that begins predict about `mean`, by the bias of its output."""
    biases, stock = ("logit.bias", "bias", "first.bias"), model.model if isinstance(model, Encoded) else model
    next(value for name, value in stock.named_parameters() if name in biases).data.fill_(mean)


def _refuse_too_wide(config: ModelConfig) -> None:
    """Raises UserError for one layer that this machine has no memory for: a system that promises more kills later."""
    for key in ("bottom", "hidden", "second_hidden"):
        widths = getattr(config, key, None) or []
        for inputs, outputs in itertools.pairwise(widths):
            asked, held = inputs * outputs * FLOAT_BYTES, psutil.virtual_memory().total
            if asked > held:
                raise UserError(
                    f"model.{key}: a layer from {inputs:,} to {outputs:,} asks for {size_text(asked)} of memory, "
                    f"this machine has {size_text(held)}; allowed: narrower layers"
                )


def _arguments(config: ModelConfig) -> dict[str, Any]:
    arguments = {key: getattr(config, key) for key in keys_of(config.name) if key != "encoder"}
    options = {key: arguments.pop(key) for key in _OF_HIDDEN_LAYERS if key in arguments}
    if options:
        options["checkpointing"] = options.pop("activation_checkpointing")
        arguments["options"] = HiddenOptions(**options)
    return arguments


def _own_model(config: OwnModelConfig, inputs: Mapping[str, Any], import_from: Path | None) -> nn.Module:
    own = load_named(config.name, setting="model.name", folder=import_from)
    try:
        with memory_errors(f"{config.name}; allowed: a smaller model"):
            model = own(**inputs, **config.options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"model.name: {config.name} could not be built with {', '.join(inputs)} and "
            f"options {config.options}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model.name: {config.name} made a {type(model).__name__}; it must be an nn.Module")
    return model
