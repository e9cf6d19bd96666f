"""Shards: a dense model whose parameters, gradients and optimizer state are split over the ranks, by FSDP2.

torch's `fully_shard` gathers the parameters of one block at a time and spreads its gradients. All bytes go through our
Collective: they are counted, and the model outlives the process group of a generation. The optimizer sees plain
tensors, this rank's parts.
"""

# W = ranks, N = values that a rank sends each other rank

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from shardkeep.base.errors import UserError
from shardkeep.compression.tower.exchange import Exchange
from shardkeep.workers.collectives.collective import Collective, Solo
from shardkeep.workers.collectives.operations import all_gather, all_reduce_sum, exchange_packets
from shardkeep.workers.dense.amp import ENDS

BLOCK_VALUES = 1 << 16
"""The least values of a block: below, two more calls among the ranks cost more than the memory is worth."""


def blocks_of(model: nn.Module, least: int = BLOCK_VALUES) -> list[nn.Module]:
    """The modules that are gathered one at a time, inner ones first: each `nn.Linear` and each entry of a
    `nn.ModuleList` that has `least` values beside those of blocks inside it.

    A module that shares a parameter with a module outside is none. All other parameters are gathered with the model."""
    listed = {id(entry) for each in model.modules() if isinstance(each, nn.ModuleList) for entry in each}
    uses, taken, blocks = _uses(model), set[nn.Parameter](), list[nn.Module]()
    for module in reversed(list(model.modules())):
        callable_entry = id(module) in listed and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if module is model or not (type(module) is nn.Linear or callable_entry):
            continue
        own = [p for p in module.parameters() if p not in taken]
        inside = _uses(module)
        if sum(p.numel() for p in own) >= least and all(uses[p] == inside[p] for p in own):
            taken.update(own)
            blocks.append(module)
    return blocks


def _uses(model: nn.Module) -> Counter[nn.Parameter]:
    """How many modules have each parameter."""
    return Counter(p for module in model.modules() for p in module.parameters(recurse=False))


class Shards:
    """The parts of one rank. Every rank makes the same calls; all but `joined` may block.

    Args:
        model: Is sharded in place. Equal on all ranks.
        mesh: Of the ranks; nothing is sent over it.
        half: The dtype in which linear layers compute, and are gathered; None = float32.
        least: The least values of a block.

    Attributes:
        local: This rank's part of each trained parameter, by name: with shape (rows, ...), maybe no rows. Shares memory
            with the model.

    Raises:
        UserError: The model cannot be sharded over so many ranks.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, *, half: torch.dtype | None = None, least: int = BLOCK_VALUES
    ) -> None:
        self._mesh, self._began = mesh, False
        self._collective: Collective = Solo()
        if max((p.shape[0] for p in model.parameters() if p.ndim), default=0) < mesh.size():
            raise UserError(
                f"tower.parallel: fsdp: no parameter has a row for each of {mesh.size()} workers; allowed: ddp"
            )
        in_half = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
        self._blocks = blocks_of(model, least)
        try:
            for block in self._blocks:
                halves = isinstance(block, nn.Linear) and not hasattr(block, ENDS)
                policy = in_half if halves else MixedPrecisionPolicy(cast_forward_inputs=False)
                fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
            fully_shard(model, mesh=mesh)
            model.register_forward_pre_hook(self._begins, prepend=True)
        except ValueError as error:  # a parameter without a dimension
            raise UserError(f"tower.parallel: fsdp: {error}; allowed: ddp") from error
        self._model: Any = model
        for module in self._modules():
            module.set_custom_all_gather(_Gather(self))
            module.set_custom_reduce_scatter(_Spread(self))
            module.set_gradient_divide_factor(1.0)  # a sum, as of DDP's hook
            module.set_force_sum_reduction_for_comms(True)
        trained: list[tuple[str, Any]] = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.local = {name: nn.Parameter(p.detach().to_local()) for name, p in trained}

    def _modules(self) -> Iterator[Any]:
        return (module for module in self._model.modules() if isinstance(module, FSDPModule))

    @property
    def collective(self) -> Collective:
        """The ranks of this generation."""
        return self._collective

    def join(self, collective: Collective) -> None:
        """Takes the ranks of another generation, as many as before. What a step left unfinished is dropped."""
        self._collective = collective
        self._let_go()
        self._model.zero_grad(set_to_none=True)

    def _let_go(self) -> None:
        """Ends what is under way, and frees the gathered parameters."""
        for module in self._modules():
            module.reshard()
        if self._began:  # else torch's call fails
            self._model.reset_iter_state()

    def _begins(self, *_: Any) -> None:
        self._began = True

    def take_gradients(self) -> None:
        """Gives the summed gradients of a step to the parameters in `local`."""
        for name, p in self._model.named_parameters():
            if p.requires_grad:
                self.local[name].grad = None if p.grad is None else p.grad.to_local()
            p.grad = None

    @property
    def finite(self) -> bool:
        """Whether this rank's gradients are finite."""
        return all(bool(p.grad.isfinite().all()) for p in self.local.values() if p.grad is not None)

    def norm(self, own: torch.Tensor) -> torch.Tensor:
        """The norm over all ranks of what has the norm `own` on this one: the same bits on all."""
        square = own.detach().double().square().reshape(1)
        all_reduce_sum(self._collective, square, purpose="gradients")
        return square.sqrt()[0].to(own.dtype)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Around forward passes without gradients, of which ranks may make different numbers: the parameters are
        gathered once."""
        for module in self._modules():
            module.unshard()
        for block in self._blocks:
            block.set_reshard_after_forward(False, recurse=False)  # type: ignore[operator]
        try:
            yield
        finally:
            for block in self._blocks:
                block.set_reshard_after_forward(True, recurse=False)  # type: ignore[operator]
            self._let_go()

    # The state: tensors that are split over the ranks are DTensors.

    def gathered(self, value: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor of the state, on every rank."""
        if not isinstance(value, DTensor):
            return value.detach()
        part, rows = value.to_local().detach(), -(-value.shape[0] // self._mesh.size())
        if len(part) < rows:
            part = torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])
        return all_gather(self._collective, part, purpose="agreements").flatten(0, 1)[: value.shape[0]]

    def split(self, whole: torch.Tensor) -> DTensor:
        """A copy of this rank's part of a whole tensor of at least one dimension. Sends nothing."""
        if isinstance(whole, DTensor):
            return whole
        parts, rank = whole.chunk(self._mesh.size()), self._mesh.get_local_rank()
        return self._labelled((parts[rank] if rank < len(parts) else whole[:0]).clone(), whole)

    def _labelled(self, part: torch.Tensor, whole: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            part, self._mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def labelled_slots(self, state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """An optimizer's state of the parameters in `local`, by number, as parts of whole tensors."""
        wholes = [p for p in self._model.parameters() if p.requires_grad]
        return {
            i: {key: self._labelled(t, wholes[i]) if _is_part(t, wholes[i]) else t for key, t in slots.items()}
            for i, slots in state.items()
        }

    def own_slots(self, state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """An optimizer's state for the parameters in `local`, of one whose tensors are whole or parts; copies."""

        def own(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return self.split(value).to_local() if value.ndim else value.clone()

        return {i: {key: own(value) for key, value in slots.items()} for i, slots in state.items()}


def sharded(
    model: nn.Module, device: torch.device, collective: Collective, *, half: torch.dtype | None
) -> Shards | None:
    """The shards of a model over the ranks, if these are processes; as of `Shards`."""
    mesh = collective.mesh(device)
    return None if mesh is None else Shards(model, mesh, half=half)


def _is_part(value: Any, whole: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[1:] == whole.shape[1:]


class _Call:
    """A call among the ranks as FSDP makes it."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Call):
    """Fills `output_tensor` (W N) with the ranks' parts (N)."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        parts_WN = all_gather(self._shards.collective, input_tensor, purpose="parameters")
        output_tensor.view(parts_WN.shape).copy_(parts_WN)


class _Spread(_Call):
    """Fills `output_tensor` (N) with this rank's part of the sum of the ranks' gradients (W N), in rank order."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        collective = self._shards.collective
        packets = input_tensor.view(collective.world_size, -1).view(torch.uint8)
        first_N, *others = exchange_packets(collective, Exchange(packets), purpose="gradients").view(
            output_tensor.dtype
        )
        output_tensor.copy_(first_N)
        for part_N in others:
            output_tensor += part_N
