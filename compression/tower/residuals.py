"""Residuals of the tower's gradients: what a rank has not sent yet of each parameter's gradient.

In true units, for every loss scale. A step's residuals wait in a second buffer until the step is known to count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch


class Residuals:
    """One rank's residuals by the parameter's name, float32, flat.

    Attributes:
        scale: the loss scale of the gradients to come.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        self.scale = 1.0
        self.device = device
        self._kept = {name: torch.zeros(size, device=device) for name, size in sizes.items()}
        self._next: dict[str, torch.Tensor] = {}

    def add(self, names: Sequence[str], grads: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> list[bool]:
        """Writes gradient + residual into `out` (flat, float32), both in units of the loss scale.

        A parameter whose gradient is all zero here gets zeros, and its residual waits: perhaps no rank used the
        parameter, and DDP would throw away what is delivered for it. If a gradient is not finite, all of `out` is NaN.

        Returns:
            Which parameters wait; their residual is to stay what it was.
        """
        peaks = _largest(grads)
        if not all(map(math.isfinite, peaks)):
            for part in out:
                part.fill_(math.nan)
            return [False] * len(names)
        for name, grad, part, peak in zip(names, grads, out, peaks, strict=True):
            if peak:
                torch.add(grad.reshape(-1), self._kept[name], alpha=self.scale, out=part)
            else:
                part.zero_()
        return [peak == 0 for peak in peaks]

    def keep(self, names: Sequence[str], rests: Sequence[torch.Tensor], waits: Sequence[bool]) -> None:
        """Takes what was not sent, flat, in units of the loss scale, as the residuals of the next step: on probation
        until `settle`. What waited is added to it. The tensors belong to this object from now on."""
        for name, rest, wait in zip(names, rests, waits, strict=True):
            if self.scale != 1.0:
                rest.div_(self.scale)
            self._next[name] = rest.add_(self._kept[name]) if wait else rest

    def settle(self, applied: bool) -> None:
        """The step counts, or it never was."""
        if applied:
            self._kept.update(self._next)
        self._next = {}

    @property
    def norm(self) -> float:
        """L2 norm of all residuals together, summed in float64."""
        return math.sqrt(sum(float(kept.double().square().sum()) for kept in self._kept.values()))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The live tensors."""
        return dict(self._kept)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes a copy; a parameter that `state` does not name has no residual. Raises ValueError for one that does
        not fit."""
        self._next = {}
        for name, kept in state.items():
            if name not in self._kept or kept.numel() != self._kept[name].numel():
                raise ValueError(f"residual of {name}, {kept.numel()} values: does not fit the model")
        for name, kept in self._kept.items():
            stored = state.get(name)
            self._kept[name] = torch.zeros_like(kept) if stored is None else stored.to(kept.device, copy=True)


def merge_residuals(states: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The sum of several ranks' residuals: one rank with it sends what they all would have."""
    merged: dict[str, torch.Tensor] = {}
    for state in states:
        for name, kept in state.items():
            merged[name] = merged[name] + kept if name in merged else kept.clone()
    return merged


def _largest(grads: Sequence[torch.Tensor]) -> list[float]:
    """Each gradient's largest magnitude, NaN or infinite when it is not finite. One wait for the device."""
    ends = [torch.stack(torch.aminmax(g)) if g.numel() else g.new_zeros(2) for g in grads]
    return [max(-low, high) if low == low else low for low, high in torch.stack(ends).tolist()]
