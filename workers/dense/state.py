"""A model's state: its state dict, made once where nothing but values can change; its bytes; its
form for files; rank 0's for all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardkeep.workers.collectives.collective import Collective

_OWN_WAYS = ("state_dict", "_save_to_state_dict", "get_extra_state")


class ModelState:
    """`model.state_dict()` without walking through the modules each time, which takes longer than copying 2 MB.

    A model that has buffers, hooks or a state dict of its own making when it is given here is read every time: a
    buffer may be another tensor after each forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = list(model.parameters())
        self._plain = not any(map(_has_its_own, model.modules()))
        self._places: list[Any] = []
        self._state: dict[str, Any] = {}
        self._has_buffers = any(m._buffers.keys() - m._non_persistent_buffers_set for m in model.modules())
        self._kept: dict[str, torch.Tensor] | None = None

    def get(self) -> dict[str, Any]:
        """Live tensors by name; nobody changes the mapping."""
        if not self._plain:
            return self._model.state_dict()
        places = [(p.data_ptr(), p.shape, p.stride()) for p in self._parameters]
        if places != self._places or not self._state:
            self._places, self._state = places, self._model.state_dict()
        return self._state

    def keep_buffers(self) -> None:
        """Keeps the buffers for `settle`, unless this step's are kept already. Free without persistent buffers."""
        if self._has_buffers and self._kept is None:
            self._kept = {name: buffer.clone() for name, buffer in self._model.named_buffers()}

    def settle(self, *, applied: bool) -> None:
        """Ends a step: a skipped one takes its buffers back, such as the running statistics of batch norm."""
        if self._kept is not None and not applied:
            with torch.no_grad():
                for name, buffer in self._model.named_buffers():
                    buffer.copy_(self._kept[name])
        self._kept = None


def _has_its_own(module: nn.Module) -> bool:
    return bool(
        module._buffers.keys() - module._non_persistent_buffers_set
        or module._state_dict_hooks
        or module._state_dict_pre_hooks
        or any(
            name in vars(module) or getattr(type(module), name) is not getattr(nn.Module, name) for name in _OWN_WAYS
        )
    )


def broadcast(model: nn.Module, collective: Collective) -> None:
    """Sends rank 0's parameters and buffers to the other ranks. Every rank calls it; blocks."""
    if collective.world_size > 1:
        for tensor in [*model.parameters(), *model.buffers()]:
            collective.broadcast(tensor.detach(), purpose="agreements")


def share_buffers(model: nn.Module, collective: Collective) -> None:
    """Sends rank 0's floating-point buffers to the other ranks, in one call for each dtype. Blocks."""
    for buffers in floating_buffers(model):
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
        collective.broadcast(flat, purpose="buffers")
        if collective.rank:
            for buffer, part in zip(buffers, torch.split(flat, [b.numel() for b in buffers]), strict=True):
                buffer.detach().copy_(part.view(buffer.shape))


def floating_buffers(model: nn.Module) -> list[list[torch.Tensor]]:
    """The floating-point buffers by dtype, such as running statistics; [] = there are none."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in model.buffers():
        if buffer.is_floating_point():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
    return list(by_dtype.values())


def bytes_by_name(
    parameters: Mapping[str, nn.Parameter], model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[bytes]:
    """Yields name and bytes of every parameter, of a model's buffers and of an optimizer's values, in the order of the
    names; copies."""
    names = {id(p): name for name, p in parameters.items()}
    tensors: dict[str, torch.Tensor] = {**parameters, **dict(model.named_buffers())}
    for parameter, slots in optimizer.state.items():
        for key, value in slots.items():
            tensors[f"{names[id(parameter)]}/{key}"] = torch.as_tensor(value)
    for name in sorted(tensors):
        yield name.encode()
        yield _bytes_of(tensors[name])


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# A state dict as JSON types and a flat mapping of tensors, and back: for files and for other ranks.


def split(value: Any, tensors: dict[str, torch.Tensor], path: str = "") -> Any:
    """`value` as JSON types, its tensors put into `tensors`, each replaced by its key there. The keys of mappings keep
    their type: a list of pairs."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"pairs": [[key, split(part, tensors, f"{path}/{key}")] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"items": [split(part, tensors, f"{path}/{i}") for i, part in enumerate(value)]}
    return {"value": value}


def joined(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `split`; tuples come back as lists."""
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "pairs" in value:
        return {key: joined(part, tensors) for key, part in value["pairs"]}
    if "items" in value:
        return [joined(part, tensors) for part in value["items"]]
    return value["value"]
