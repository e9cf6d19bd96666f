"""Axes: widths that name what stands at each place. A model that is built of them, without values, finds its parameters
in a model of other columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

Parameter = TypeVar("Parameter", bound=torch.Tensor)
Name = tuple[Any, ...]
"""The columns that a place is of, and numbers."""
Names = Callable[[], Sequence[Name]]


class Axis(int):
    """A width with the names of its places. Sums and products have the names of what stands side by side."""

    names: Names

    @staticmethod
    def of(width: int, names: Names) -> Axis:
        axis = Axis(width)
        axis.names = names
        return axis

    def __add__(self, other: int) -> Axis:
        return Axis.of(int(self) + int(other), lambda: [*self.names(), *names_of(other)])

    def __radd__(self, other: int) -> Axis:
        return Axis.of(int(self) + int(other), lambda: [*names_of(other), *self.names()])

    def __sub__(self, other: int) -> Axis:
        return Axis.of(left := int(self) - int(other), lambda: self.names()[:left])

    def __mul__(self, other: Any) -> Any:
        return _product(self, other) if isinstance(other, int) else int(self) * other

    def __rmul__(self, other: int) -> Axis:
        return _product(other, self)


def _product(a: int, b: int) -> Axis:
    return Axis.of(int(a) * int(b), lambda: [x + y for x in names_of(a) for y in names_of(b)])


def names_of(width: int) -> Sequence[Name]:
    """Of an axis its names, of a plain width numbers."""
    return width.names() if isinstance(width, Axis) else [(i,) for i in range(width)]


def columns(names: Sequence[str], width: int) -> Axis:
    """The axis of several columns, or of the values of one."""
    return Axis.of(width, lambda: [(name, i) for name in names for i in range(width // len(names))])


def named(width: int, like: int, names: Callable[[Sequence[Name]], Sequence[Name]]) -> int:
    """A width, with names that follow from those of `like` where that is an axis."""
    return Axis.of(width, lambda: names(names_of(like))) if isinstance(like, Axis) else width


def laid_out(parameter: Parameter, *axes: int, inputs: int | None = None) -> Parameter:
    """Keeps the axes of a parameter of a model without values. `inputs`: the axis by which it reads inputs."""
    if parameter.is_meta:
        vars(parameter)["axes"] = axes, inputs
    return parameter


class ByInput(nn.ModuleList):
    """Modules of an input each. (A column's name may hold dots, which nn.ModuleDict refuses.)"""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__(modules.values())
        self.inputs = tuple(modules)


@dataclass(frozen=True)
class Match:
    """Where a tensor of a model has its values in a model of other columns.

    Attributes:
        name: Of the tensor there.
        same: All values are there, in the same places.
    """

    name: str
    same: bool
    kept: Sequence[Sequence[int]] = ()
    source: Sequence[Sequence[int]] = ()
    zeros: Sequence[Sequence[int]] = ()

    def moved(self, theirs: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Takes `theirs`; the weights of new inputs are 0, so that they change nothing at first. The rest is `own`."""
        moved = own.detach().clone()
        if self.zeros:
            moved[_grid(self.zeros)] = 0
        moved[_grid(self.kept)] = theirs[_grid(self.source)].to(moved)
        return moved


def _grid(places: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
    ranges = [torch.tensor(axis, dtype=torch.int64) for axis in places]
    return tuple(axis.view(-1, *[1] * (len(ranges) - 1 - i)) for i, axis in enumerate(ranges))


def matches(old: nn.Module, new: nn.Module, silent: Set[str]) -> dict[str, Match | None]:
    """Each tensor of `new` that is one of `old`, both built of axes without values. None = it lies otherwise there.

    Args:
        silent: Inputs that are 0 at first: with weights of 0 they would never learn.
    """
    found: dict[str, Match | None] = {}
    before, by_input = _tensors(old), [module for module in new.modules() if isinstance(module, ByInput)]
    for key, (name, axes, reads) in _tensors(new).items():
        if key not in before:
            if not any(set(module.inputs) & set(key) for module in by_input):
                found[name] = None
            continue
        theirs, others, _ = before[key]
        at = [{place: i for i, place in enumerate(axis)} for axis in others]
        kept = [[i for i, place in enumerate(axis) if place in there] for axis, there in zip(axes, at, strict=True)]
        source = [[there[axis[i]] for i in own] for axis, there, own in zip(axes, at, kept, strict=True)]
        zeros = list(kept)
        if reads is not None:
            zeros[reads] = [i for i, p in enumerate(axes[reads]) if p not in at[reads] and not silent & set(p)]
        same = kept == source and list(map(len, axes)) == list(map(len, others)) == list(map(len, kept))
        found[name] = Match(theirs, same, kept, source, zeros if reads is not None else ()) if all(kept) else None
    return found


def changes(model: nn.Module, found: Mapping[str, Match | None]) -> list[str]:
    """Why columns that are new, missing or in another order change the first scores of a model with `matches`."""
    moved = [match for match in found.values() if match is not None and not match.same]
    turned = any(list(axis) != sorted(axis) for match in moved for axis in match.source)
    marks = {
        "among_columns": "weighs all columns together, so new or missing ones change the first scores" if moved else "",
        "in_order": "multiplies columns in their order, so another order changes the first scores" if turned else "",
    }
    lines = [(type(m).__name__, text) for m in model.modules() for mark, text in marks.items() if getattr(m, mark, "")]
    return [f"{name} {text}" for name, text in dict.fromkeys(lines) if text]


def _tensors(model: nn.Module) -> dict[tuple[str, ...], tuple[str, list[Sequence[Name]], int | None]]:
    """Name, places and reading axis of each tensor, by its name with inputs in place of numbers."""
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        axes, reads = vars(tensor).get("axes", (tensor.shape, None))
        module, key = model, list[str]()
        for part in name.split("."):
            key.append(module.inputs[int(part)] if isinstance(module, ByInput) else part)
            module = getattr(module, part)
        found[tuple(key)] = name, [names_of(axis) for axis in axes], reads
    return found
