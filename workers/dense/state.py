"""A model's state dict, asked for after every step: made once where nothing but values can change."""

from __future__ import annotations

from typing import Any

from torch import nn

_OWN_WAYS = ("state_dict", "_save_to_state_dict", "get_extra_state")


class ModelState:
    """`model.state_dict()` without walking through the modules each time, which takes longer than copying 2 MB.

    A model that has buffers, hooks or a state dict of its own making when it is given here is asked every time: a
    buffer may be another tensor after each forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = list(model.parameters())
        self._plain = not any(map(_has_its_own, model.modules()))
        self._places: list[Any] = []
        self._state: dict[str, Any] = {}

    def get(self) -> dict[str, Any]:
        """Live tensors by name; nobody changes the mapping."""
        if not self._plain:
            return self._model.state_dict()
        places = [(p.data_ptr(), p.shape, p.stride()) for p in self._parameters]
        if places != self._places or not self._state:
            self._places, self._state = places, self._model.state_dict()
        return self._state


def _has_its_own(module: nn.Module) -> bool:
    return bool(
        module._buffers.keys() - module._non_persistent_buffers_set
        or module._state_dict_hooks
        or module._state_dict_pre_hooks
        or any(
            name in vars(module) or getattr(type(module), name) is not getattr(nn.Module, name) for name in _OWN_WAYS
        )
    )
