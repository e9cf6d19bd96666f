"""From a model's settings to the module: those that workers/model_config.py names, and the user's own module:Class."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import torch
from torch import nn

from shardkeep.base.errors import UserError
from shardkeep.base.machine.memory import memory_errors
from shardkeep.base.plugging.modules import load_named
from shardkeep.base.sizes import size_text
from shardkeep.workers.dense.amp import ENDS
from shardkeep.workers.embeddings.sequence import SequenceShape
from shardkeep.workers.encoder_config import Targets, encoder_of
from shardkeep.workers.label_config import TaskColumn
from shardkeep.workers.model_config import (
    MODELS,
    ONE_LABEL,
    DlrmConfig,
    HstuConfig,
    ModelConfig,
    OwnModelConfig,
    SasRecConfig,
    TwoTowerConfig,
    keys_of,
)
from shardkeep.workers.models.dnn import Dnn
from shardkeep.workers.models.encoders.encoded import Encoded, GroupEncoder
from shardkeep.workers.models.layers.hidden import HiddenOptions
from shardkeep.workers.models.retrieval.next_item import ItemList
from shardkeep.workers.models.retrieval.vectors import ItemShape, VectorModel

_NEEDS_DEFAULT_DIM = ("fm", "deepfm", "xdeepfm", "dlrm", "autoint", "fibinet", "finalmlp")
_OF_HIDDEN_LAYERS = ("dropout", "norm", "activation", "init", "activation_checkpointing")
FLOAT_BYTES = 4
_BIAS = re.compile(r"bias|(.+\.)?(logit|first|logits\.\d+)\.bias")
"""The biases of outputs."""
_LEAST_RATE = 1e-6
_TOO_WIDE = "the layers of the model; allowed: narrower ones in model.bottom and model.hidden"


def row_dim(name: str, dim: int) -> int:
    """Values of a row of a table of `dim` under a model: its vector, and one first-order weight where the model has it.

    `lr` has the weight alone."""
    model = MODELS[name].load() if name in MODELS else None
    return int(getattr(model, "row_dim", dim + getattr(model, "first_order_column", False)))


def adds_rows(name: str, num_dense: int) -> bool:
    """Whether a model adds rows, or products of rows, without a weight of its own."""
    return row_dim(name, 0) == 1 or (name == "dlrm" and not num_dense)


def build_model(
    config: ModelConfig,
    *,
    num_dense: int,
    features: Mapping[str, int],
    default_dim: int,
    labels: Sequence[str] = ("label",),
    sequences: Mapping[str, SequenceShape] = MappingProxyType({}),
    targets: Targets = MappingProxyType({}),
) -> nn.Module:
    """The module that `config` names, with start values from torch's global generator (the caller seeds it).

    Args:
        num_dense: dense columns; may be 0.
        features: name -> values of its row, in the order of the data's schema; see `row_dim`.
        default_dim: the dim that models with dot products project every feature to.
        labels: names of the labels: the model has an output for each.
        sequences: group -> what the model gets of it.
        targets: of `targets_of`.

    Raises:
        UserError: a model that does not fit the data or the machine.
    """
    _refuse_without_inputs(config.name, num_dense, features, sequences)
    if len(labels) > 1 and config.name in ONE_LABEL:
        raise UserError(f"model.name: {config.name} predicts one label; the data has {', '.join(labels)}")
    if isinstance(config, DlrmConfig) and config.bottom != DlrmConfig().bottom and num_dense == 0:
        raise UserError("model.bottom: has no effect: the data has no dense columns")
    arguments = _arguments(config, len(labels))
    if config.name in _NEEDS_DEFAULT_DIM:
        arguments["default_dim"] = default_dim
    _refuse_too_wide(config, sequences.values())
    with memory_errors(_TOO_WIDE):
        groups = _groups(config, arguments, sequences, targets)
        return _over(MODELS[config.name].load(), arguments, num_dense, features, groups)


def build_vector_model(
    config: TwoTowerConfig | SasRecConfig | HstuConfig,
    *,
    num_dense: int,
    features: Mapping[str, int],
    sequences: Mapping[str, SequenceShape],
    targets: Targets,
    items: ItemShape,
    temperature: float | None,
) -> VectorModel:
    """The model of vectors that `config` names, of `Sides`; start values as in `build_model`.

    Args:
        num_dense, features, sequences, targets: as in `build_model`, of the users' side alone.
        items: the columns of the items' side.
        temperature: of the softmax; None = 0.05 for cosines, 1 for dot products.

    Raises:
        UserError: a model that does not fit the data or the machine.
    """
    arguments = _arguments(config, 1)
    arguments["cosine"], _ = arguments.pop("similarity") == "cosine", arguments.pop("item")
    arguments["temperature"] = temperature or (0.05 if arguments["cosine"] else 1.0)
    if not (num_dense or features or sequences):
        raise UserError("model.item: lists all columns of the data; allowed: fewer, as all others are the user's")
    _refuse_too_wide(config, sequences.values())
    with memory_errors(_TOO_WIDE):
        if isinstance(config, TwoTowerConfig):
            layers = {"hidden": arguments.pop("hidden"), "options": arguments.pop("options")}
            layers["options"] = replace(layers["options"], outputs=arguments.pop("dim"))
            groups = _groups(config, layers, sequences, targets)
            arguments["user"] = _over(Dnn, layers, num_dense, features, groups)
            arguments["item"] = _over(Dnn, layers, items.num_dense, items.features, {})
        else:
            ((group, shape),) = sequences.items()
            arguments["entries"] = ItemList(group, shape, next(iter(items.features)))
        model: VectorModel = MODELS[config.name].load()(**arguments)
        return model


def _over(
    kind: Any,
    arguments: Mapping[str, Any],
    num_dense: int,
    features: Mapping[str, int],
    groups: Mapping[str, GroupEncoder],
) -> nn.Module:
    """A model over dense columns, features and what encoders make of groups."""
    columns = {column: dim + group.first_order for group in groups.values() for column, dim in group.dims.items()}
    num_dense += sum(group.num_dense for group in groups.values())
    model: nn.Module = kind(features={**features, **columns}, num_dense=num_dense, **arguments)
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


def start_at(model: nn.Module, values: Sequence[float]) -> None:
    """Lets a model of `MODELS` that begins put out about `values`, one for each label, by the biases of its outputs."""
    stock = model.model if isinstance(model, Encoded) else model
    biases = [value.data for name, value in stock.named_parameters() if _BIAS.fullmatch(name)]
    starts = torch.split(torch.tensor(values), [len(bias) for bias in biases])
    for bias, start in zip(biases, starts, strict=True):
        bias.copy_(start)


def start_values(tasks: Sequence[TaskColumn], means: Sequence[float]) -> list[float]:
    """What a model of several labels puts out at first: the mean of a number, the logit of the mean of 0 and 1."""
    rates = [min(max(mean, _LEAST_RATE), 1 - _LEAST_RATE) for mean in means]
    logits = [math.log(rate / (1 - rate)) for rate in rates]
    return [
        mean if task.objective.of_numbers else logit for task, mean, logit in zip(tasks, means, logits, strict=True)
    ]


def _refuse_without_inputs(name: str, *inputs: Any) -> None:
    if not any(inputs):
        raise UserError(f"model.name: {name} has no input: the data has no dense and no sparse columns")


def _refuse_too_wide(config: ModelConfig, sequences: Iterable[SequenceShape]) -> None:
    """Raises UserError for one layer that this machine has no memory for: a system that promises more kills later."""
    named = {key: getattr(config, key, None) for key in ("bottom", "hidden", "second_hidden", "task_hidden")}
    layers = [(key, widths) for key, widths in named.items() if isinstance(widths, list)]
    layers += [("encoder", encoder_of(config).widths(sum(shape.ids.values()))) for shape in sequences]
    for key, widths in layers:
        for inputs, outputs in itertools.pairwise(widths):
            asked, held = inputs * outputs * FLOAT_BYTES, psutil.virtual_memory().total
            if asked > held:
                raise UserError(
                    f"model.{key}: a layer from {inputs:,} to {outputs:,} asks for {size_text(asked)} of memory, "
                    f"this machine has {size_text(held)}; allowed: narrower layers"
                )


def _arguments(config: ModelConfig, outputs: int) -> dict[str, Any]:
    arguments = {key: getattr(config, key) for key in keys_of(config.name) if key != "encoder"}
    options = {key: arguments.pop(key) for key in _OF_HIDDEN_LAYERS if key in arguments}
    if options:
        options["checkpointing"] = options.pop("activation_checkpointing", False)
        arguments["options"] = HiddenOptions(**options, outputs=outputs)
    return arguments


def build_own_model(
    config: OwnModelConfig, arguments: Mapping[str, Any], *, import_from: Path | None = None
) -> nn.Module:
    """The module:Class of the user's own, built with `arguments` and the config's options.

    Args:
        import_from: folder where it is looked for last, after the import path.

    Raises UserError for a class that cannot be built."""
    _refuse_without_inputs(config.name, *arguments.values())
    own = load_named(config.name, setting="model.name", folder=import_from)
    try:
        with memory_errors(f"{config.name}; allowed: a smaller model"):
            model = own(**arguments, **config.options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"model.name: {config.name} could not be built with {', '.join(arguments)} and "
            f"options {config.options}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model.name: {config.name} made a {type(model).__name__}; it must be an nn.Module")
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.out_features in (1, len(arguments.get("labels", ("label",)))):
            vars(layer)[ENDS] = "forward"
    return model
