"""What a sum of dense gradients keeps over steps: this rank's residuals, and tensors that are equal on all ranks.

A form has no other state. The changes of a step wait until the step is known to count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from shardkeep.compression.tower.exchange import Shapes

Tensors = Mapping[str, torch.Tensor]


class Memory:
    """The state of one rank's form. A form calls `add` and `keep`, `shared` and `share`; the training side the rest.

    A residual is what a rank has not sent yet of a parameter's gradient: float32, flat, in true units for every loss
    scale. A parameter has none before its first `add`.

    Attributes:
        device: where gradients are.
    """

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self.device = device
        self._scale = 1.0
        self._sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        self._residuals: dict[str, torch.Tensor] = {}
        self._shared: dict[str, torch.Tensor] = {}
        self._forget()

    def _forget(self) -> None:
        self._next_residuals: dict[str, torch.Tensor] = {}
        self._next_shared: dict[str, torch.Tensor] = {}
        self._waiting: set[str] = set()

    # For forms.

    def add(self, names: Sequence[str], grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradient + residual of each parameter: flat tensors of the caller's own, float32, in units of the loss scale.

        A parameter whose gradient is all zero here gets zeros, and its residual waits: perhaps no rank used the
        parameter, and DDP would throw away what is delivered for it. If a gradient is not finite, all are NaN."""
        peaks = _largest(grads)
        finite, added = all(map(math.isfinite, peaks)), []
        for name, grad, peak in zip(names, grads, peaks, strict=True):
            if name not in self._residuals:
                self._residuals[name] = grad.new_zeros(grad.numel())
            kept = self._residuals[name]
            if not finite:
                added.append(torch.full_like(kept, math.nan))
            elif peak:
                added.append(torch.add(grad.reshape(-1), kept, alpha=self._scale))
            else:
                added.append(torch.zeros_like(kept))
                self._waiting.add(name)
        return added

    def keep(self, names: Sequence[str], rests: Sequence[torch.Tensor]) -> None:
        """Takes what was not sent of what `add` gave, in its units, as residuals of the next step. The tensors belong
        to the memory from now on."""
        for name, rest in zip(names, rests, strict=True):
            rest = rest.view(-1)
            if self._scale != 1.0:
                rest.div_(self._scale)
            self._next_residuals[name] = rest.add_(self._residuals[name]) if name in self._waiting else rest

    @property
    def shared(self) -> Tensors:
        """A mapping of the shared tensors by name, as of the last step that counts; {} at first. Read-only."""
        return MappingProxyType(self._shared)

    def share(self, name: str, tensor: torch.Tensor) -> None:
        """Sets a shared tensor of the next step, under any name. Every rank sets the same bits; the tensor belongs to
        the memory. A count of steps, for example, is `share("steps", shared.get("steps", zero) + 1)`. `sum` is called
        once per group of parameters, and each call reads the count as it was before the step."""
        self._next_shared[name] = tensor

    # For the training side.

    def begin(self, scale: float = 1.0) -> None:
        """Begins a step with this loss scale. What a step before left unsettled is forgotten."""
        self._forget()
        self._scale = scale

    def settle(self, applied: bool) -> None:
        """Ends the step: if the dense update was made, its changes count; else it never was."""
        if applied:
            self._residuals |= self._next_residuals
            self._shared |= self._next_shared
        self._forget()

    @property
    def norm(self) -> float | None:
        """L2 norm of all residuals together, summed in float64; None where there are none."""
        squares = [float(kept.double().square().sum()) for kept in self._residuals.values()]
        return math.sqrt(sum(squares)) if squares else None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The shared tensors, live."""
        return dict(self._shared)

    def load_state_dict(self, state: Tensors) -> None:
        """Takes a copy; residuals become zero."""
        self._shared = {name: tensor.to(self.device, copy=True) for name, tensor in state.items()}
        self.load_local_state_dict({})

    def local_state_dict(self) -> dict[str, torch.Tensor]:
        """What belongs to this rank only: the residuals, live."""
        return dict(self._residuals)

    def load_local_state_dict(self, state: Tensors) -> None:
        """Takes a copy of a rank's residuals, or of several ranks' merged. Raises ValueError for one that does not
        fit."""
        self._forget()
        for name, kept in state.items():
            if kept.numel() != self._sizes.get(name):
                raise ValueError(f"residual of {name}, {kept.numel()} values: does not fit the model")
        self._residuals = {name: kept.to(self.device, copy=True) for name, kept in state.items()}


def merged(states: Iterable[Tensors]) -> dict[str, torch.Tensor]:
    """The sum of several ranks' residuals: one rank with it sends what they all would have."""
    found: dict[str, torch.Tensor] = {}
    for state in states:
        for name, kept in state.items():
            found[name] = found[name] + kept if name in found else kept.clone()
    return found


def _largest(grads: Sequence[torch.Tensor]) -> list[float]:
    """Each gradient's largest magnitude, NaN or infinite when it is not finite. One wait for the device."""
    ends = [torch.stack(torch.aminmax(g)) if g.numel() else g.new_zeros(2) for g in grads]
    return [max(-low, high) if low == low else low for low, high in torch.stack(ends).tolist()]
