"""Weights of TorchRec models that are not sharded: into the servers' tables, and from them."""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardkeep.base.errors import CheckpointError, UserError
from shardkeep.base.files import local, replacing
from shardkeep.loop.client import EmbeddingClient

TABLE = re.compile(r"(?:.*\.)?(?:embedding_bags|embeddings)\.([^.]+)\.weight")
"""The name of a table's weight in a state dict."""


def loaded(
    checkpoint: nn.Module | Mapping[str, torch.Tensor] | str | Path, client: EmbeddingClient, tables: Mapping[str, str]
) -> list[str]:
    """As `shardkeep.torchrec.load`."""
    if isinstance(checkpoint, nn.Module):
        checkpoint = checkpoint.state_dict()
    state = checkpoint if isinstance(checkpoint, Mapping) else _read(Path(local(checkpoint)))
    names = {name: found[1] for name in state if (found := TABLE.fullmatch(name))}
    if not names:
        raise UserError("load: no table; allowed: the state of a model with EmbeddingBagCollection.embedding_bags.*")
    rows: dict[str, torch.Tensor] = {}
    for name, table in names.items():
        weight = state[name]
        if type(weight) not in (torch.Tensor, nn.Parameter):
            kind = type(weight).__name__
            raise UserError(f"load: {name} is a {kind}; allowed: a whole tensor, as of a model that is not sharded")
        rows[tables.get(table, table)] = weight
    client.fill(rows)
    return list(names.values())


def saved(model: nn.Module, path: Path) -> None:
    """As `shardkeep.torchrec.save`."""
    from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

    from shardkeep.torchrec.modules import OnServers

    sharded = [module for module in model.modules() if isinstance(module, OnServers)]
    if not sharded:
        raise UserError("save: no module of the model is on servers")
    if any(module.client.rank for module in sharded):
        return
    with contextlib.ExitStack() as restoring:
        for own in sharded:
            restoring.callback(own.register_state_dict_post_hook(_add_rows).remove)
        for module in model.modules():
            if isinstance(module, (DistributedDataParallel, DistributedModelParallel)):  # without its part of the names
                module.__dict__["state_dict"] = get_unwrapped_module(module).state_dict
                restoring.callback(module.__dict__.pop, "state_dict")
        state = dict(model.state_dict())
    try:
        with replacing([path]) as (partial,):
            torch.save(state, partial)
    except (OSError, RuntimeError) as error:  # torch raises the second where there is no folder
        raise CheckpointError(f"save: {path}: {getattr(error, 'strerror', None) or error}") from error


def _add_rows(module: Any, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    state |= {f"{prefix}{key}": rows for key, rows in module.weights().items()}


def _read(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise CheckpointError(f"load: {path}: {why}") from error
    if not isinstance(found, Mapping):
        raise CheckpointError(f"load: {path}: holds a {type(found).__name__}; allowed: a state dict")
    return found
