"""TorchRec models whose tables are on parameter servers: `shard(model, client)` in place of TorchRec's sharding.

Importing it needs no torchrec; calling it does. Works with torchrec 1.8 and torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import nn

from shardkeep.base.errors import MissingPackage, UserError
from shardkeep.base.files import local
from shardkeep.base.plugging.packages import missing
from shardkeep.nn.push import Scale
from shardkeep.ps.config import TableSpec

if TYPE_CHECKING:
    from shardkeep.loop.client import EmbeddingClient

__all__ = ["client_of", "load", "save", "shard", "tables_of", "unshard"]

M = TypeVar("M", bound=nn.Module)


def tables_of(model: nn.Module, *, optimizer: Any = None) -> list[TableSpec]:
    """The tables of a model's embedding collections, for `EmbeddingClient.local`, `serve` and `connect`.

    Names, dims and initial values (uniform from `weight_init_min` to `weight_init_max`) are those of the collections'
    configs. Optimizers are those of `apply_optimizer_in_backward`. A table whose weight has `requires_grad` False is
    frozen.

    Args:
        model: Holds EmbeddingBagCollections or EmbeddingCollections; may be on the device "meta".
        optimizer: Of tables without one: a config such as `AdagradConfig(lr=0.1)`; None = every table must have one.

    Raises UserError, which names what cannot be mapped.
    """
    _needed()
    from shardkeep.torchrec.configs import specs_of

    return specs_of(model, optimizer)


def shard(
    model: M,
    client: EmbeddingClient | None = None,
    *,
    tables: Mapping[str, str] | None = None,
    scale: Scale = "mean",
    steps: Literal["backward"] | torch.optim.Optimizer = "backward",
    scaler: Any = None,
) -> M:
    """Replaces the embedding collections of a model, in place, by modules whose rows are on the client's servers.

    The result works in TorchRec's DistributedModelParallel, which leaves it alone, in its pipelines, which pull ahead,
    and in any loop. Rows are pushed at the end of `backward`.

    Args:
        model: Holds EmbeddingBagCollections or EmbeddingCollections. If it is one itself, the result is another module.
        client: Its tables are those of `tables_of(model)`. One without tables gets them here (`client.declare`). None =
            that of the job which `shardkeep with` runs around this script, else one of two servers on this machine. It
            is closed when the script ends; `client_of(model)` returns it.
        tables: Table of the model to table of the client, where names differ.
        scale: Of row gradients: mean = 1 / number of trainers, as TorchRec; sum; a number; or a function.
        steps: backward, or the optimizer after whose `step` rows are pushed.
        scaler: A GradScaler, whose scale the row gradients have.

    Raises UserError, which names the table, feature or module that cannot be mapped.
    """
    _needed()
    from shardkeep.torchrec.modules import client_tables, own_client, refuse_sharded, sharded

    refuse_sharded(model)
    if client is None:
        client = own_client(model, tables or {})
    if not client.declared:
        client.declare(client_tables(model, tables or {}))
    return cast(M, sharded(model, client, tables or {}, scale=_unscaled(scale, client, scaler), steps=steps))


def client_of(model: nn.Module) -> EmbeddingClient:
    """The client on whose servers `shard` has put the tables of a model. Raises UserError if it has put none."""
    _needed()
    from shardkeep.torchrec.modules import on_servers

    for module in on_servers(model):
        return module.client
    raise UserError("the model holds no collection on servers; allowed: a model that shard(model) returned")


def unshard(model: M) -> M:
    """Replaces what `shard` made, in place, by TorchRec's own modules with the rows that the servers have now.

    Every table gets the `num_embeddings` rows of its config. Blocks while they are read."""
    _needed()
    from shardkeep.torchrec.modules import unsharded

    return cast(M, unsharded(model))


def load(
    checkpoint: nn.Module | Mapping[str, torch.Tensor] | str | Path,
    client: EmbeddingClient,
    *,
    tables: Mapping[str, str] | None = None,
) -> list[str]:
    """Gives the client's tables the weights of a TorchRec model that is not sharded. Returns the tables it found.

    All trainers call it before their first step. Optimizer state is new; tables that are not there keep their initial
    rows. Load the dense weights with `load_state_dict(..., strict=False)`.

    Args:
        checkpoint: A model, its state dict, or the file to which `torch.save` or `save` wrote that.
        tables: Table of the model to table of the client, where names differ.

    Raises UserError, which names the table that does not fit, and CheckpointError where nothing can be read or written.
    """
    from shardkeep.torchrec.weights import loaded

    return loaded(checkpoint, client, tables or {})


def save(model: nn.Module, path: str | Path) -> None:
    """Writes the state dict that the model would have without `shard`, by `torch.save`, for TorchRec and PyTorch.
    Names have no part of DistributedModelParallel or DistributedDataParallel.

    All trainers call it between the same two steps; the first one writes. Holds all rows in memory meanwhile. Raises
    CheckpointError where the file cannot be written."""
    _needed()
    from shardkeep.torchrec.weights import saved

    saved(model, Path(local(path)))


def _unscaled(scale: Scale, client: EmbeddingClient, scaler: Any) -> Scale:
    if scaler is None:
        return scale

    def factor() -> float:
        named = {"mean": 1.0 / client.num_trainers, "sum": 1.0}
        base = named[scale] if isinstance(scale, str) else scale() if callable(scale) else scale
        return float(base / scaler.get_scale())

    return factor


def _needed() -> None:
    if (need := missing("torchrec")) is not None:
        raise MissingPackage(f"shardkeep.torchrec {need}")
