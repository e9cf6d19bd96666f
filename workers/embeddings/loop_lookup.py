"""Lookup: rows of any ids as leaves of autograd, and their gradients summed back per row. For loops of the user's
own; batches of a job go through layer.py. Holds rows of one step only, knows no server.
"""
# N = ids of one table in one lookup, U = unique ids, D = embedding dim

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.base.array_kernels import all_finite
from shardkeep.base.arrays import Ids, Rows
from shardkeep.base.errors import DataError, UserError
from shardkeep.ps.client.row_client import PullHandle
from shardkeep.workers.embeddings import kernels
from shardkeep.workers.embeddings.layer import non_finite_rows
from shardkeep.workers.embeddings.plan import dedupe


@dataclass(frozen=True, slots=True)
class DedupedIds:
    """Ids of one table in the shape the user gave them, and the unique ones among them."""

    shape: tuple[int, ...]
    device: torch.device
    unique_U: Ids
    """Ascending."""
    inverse_N: npt.NDArray[np.int32]
    """Where each id's row is among the unique ones."""

    def gather(self, rows_UD: Rows) -> torch.Tensor:
        """The rows, a fresh float32 tensor (*shape, D) on the ids' device."""
        size, dim = self.inverse_N.size, rows_UD.shape[1]
        host_ND = torch.empty((size, dim), dtype=torch.float32, pin_memory=self.device.type == "cuda")
        kernels.gather_rows(rows_UD, self.inverse_N, host_ND.numpy())
        return host_ND.to(self.device, non_blocking=True).view(*self.shape, dim)

    def sum_per_row(self, grad: torch.Tensor) -> Rows:
        """The gradient (*shape, D) summed per unique row, float32 (U, D), in the order of the ids."""
        grad_ND = grad.detach().reshape(-1, grad.shape[-1])
        grad_UD = np.zeros((self.unique_U.size, grad_ND.shape[1]), dtype=np.float32)
        kernels.add_gathered(grad_ND.cpu().contiguous().numpy(), self.inverse_N, grad_UD)
        return grad_UD


class Lookup(Mapping[str, torch.Tensor]):
    """What `EmbeddingClient.lookup` returns: per table a leaf, float32 (*shape of the ids, D), that requires grad
    unless the table is frozen.

    Read it like a dict. Good for one `apply`, in the step it was made in.
    """

    def __init__(
        self,
        owner: object,
        pull: PullHandle,
        ids: Mapping[str, DedupedIds],
        rows: Mapping[str, Rows],
        frozen: frozenset[str] = frozenset(),
    ) -> None:
        self.owner, self.pull, self.step = owner, pull, pull.fetch.step
        self._ids = ids
        self._leaves = {t: each.gather(rows[t]).requires_grad_(t not in frozen) for t, each in ids.items()}

    def __getitem__(self, table: str) -> torch.Tensor:
        try:
            return self._leaves[table]
        except KeyError:
            raise KeyError(f"no rows of {table!r} in this lookup; it has {', '.join(self) or 'none'}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{table}: {tuple(leaf.shape)}" for table, leaf in self._leaves.items())
        return f"Lookup(step {self.step}; {shapes})"

    def leaves(self) -> list[torch.Tensor]:
        """The tensors whose gradients `apply` pushes."""
        return [leaf for leaf in self._leaves.values() if leaf.requires_grad]

    def gradients(self) -> dict[str, tuple[Ids, Rows]]:
        """Per table that the loss depends on: its ids, sorted and unique, and their summed gradients (U, D).

        Raises UserError when `backward` has reached none of the rows."""
        summed_grads = {
            table: (ids.unique_U, ids.sum_per_row(grad))
            for table, ids in self._ids.items()
            if (grad := self._leaves[table].grad) is not None
        }
        self._check_reached(reached=bool(summed_grads))
        return summed_grads

    def _check_reached(self, *, reached: bool) -> None:
        if not reached and any(leaf.numel() for leaf in self.leaves()):
            raise UserError(
                f"apply: the rows of {', '.join(self)} have no gradients; call loss.backward() first, on a loss that "
                "is computed from them"
            )


def read_ids(table: str, ids: object) -> DedupedIds:
    """Checks and deduplicates ids of any shape; a tensor or a numpy array of whole numbers. Any 64-bit pattern is an
    id, the negative ones too. Raises DataError."""
    flat_N, shape = flat_ids(f"table {table}", ids)
    _, unique_U, inverse_N = dedupe(flat_N, np.array([0, flat_N.size]))
    return DedupedIds(shape, ids.device if isinstance(ids, torch.Tensor) else torch.device("cpu"), unique_U, inverse_N)


def flat_ids(whose: str, ids: object) -> tuple[Ids, tuple[int, ...]]:
    """Ids of any shape as int64 (N,), C-contiguous, and their shape. Raises DataError, with `whose` before."""
    if not isinstance(ids, torch.Tensor | np.ndarray):
        raise DataError(f"{whose}: ids are a {type(ids).__name__}; allowed: a tensor or numpy array of whole numbers")
    array: npt.NDArray[Any] = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else ids
    if array.dtype.kind not in "iu":
        raise DataError(f"{whose}: ids are {array.dtype}; allowed: whole numbers (int64)")
    if array.size >= 2**31:
        raise DataError(f"{whose}: {array.size} ids in one lookup; allowed: fewer than 2**31")
    flat_N = np.ascontiguousarray(array.reshape(-1)).astype(np.int64, copy=False)  # uint64 keeps its bits
    return flat_N, tuple(array.shape)


def check_lookups(lookups: Sequence[object], *, owner: object, step: int, applied: Sequence[Lookup]) -> None:
    """Raises UserError unless these are different lookups of this owner and step that were not applied yet."""
    for lookup in lookups:
        if not isinstance(lookup, Lookup):
            raise UserError(f"apply: is given a {type(lookup).__name__}; allowed: what lookup returned")
        if lookup.owner is not owner:
            raise UserError("apply: the rows were looked up by another client")
        if any(lookup is earlier for earlier in applied):
            raise UserError(f"apply: the rows of step {lookup.step} were applied already; look up again")
        if lookup.step != step:
            raise UserError(f"apply: the rows are of step {lookup.step}, this is step {step}; look up again")
    if len({id(lookup) for lookup in lookups}) < len(lookups):
        raise UserError("apply: the same lookup twice")


def summed(parts: Sequence[Mapping[str, tuple[Ids, Rows]]]) -> dict[str, tuple[Ids, Rows]]:
    """The gradients of several lookups as those of one: per table the sorted unique ids and the summed rows, added
    in the order of the parts."""
    total: dict[str, tuple[Ids, Rows]] = {}
    for table in dict.fromkeys(table for part in parts for table in part):
        having = [part[table] for part in parts if table in part]
        total[table] = having[0] if len(having) == 1 else _merged(having)
    return total


def _merged(parts: Sequence[tuple[Ids, Rows]]) -> tuple[Ids, Rows]:
    ids_N = np.concatenate([ids for ids, _ in parts])
    _, ids_U, inverse_N = dedupe(ids_N, np.array([0, ids_N.size]))
    grad_UD = np.zeros((ids_U.size, parts[0][1].shape[1]), dtype=np.float32)
    kernels.add_gathered(np.concatenate([grads for _, grads in parts]), inverse_N, grad_UD)
    return ids_U, grad_UD


def finite_only(ids_U: Ids, grad_UD: Rows) -> tuple[Ids, Rows]:
    """Without the rows whose gradient holds an infinity or a NaN; the inputs themselves when there are none."""
    if all_finite(np.ascontiguousarray(grad_UD).reshape(-1).view(np.uint32)):
        return ids_U, grad_UD
    bad_U = non_finite_rows(grad_UD)
    return ids_U[~bad_U], np.ascontiguousarray(grad_UD[~bad_U])
