"""The registry of selectors: the words of `compression.push.select`, and the function that chooses rows for each.

To add a selector, write a function and add a line to `SELECTORS`: the config takes the name, and every place that
selects rows looks there, with a row pool or without one. Imports neither torch nor numba, nor any selector before it
is used.
"""
# U = a step's unique rows, D = embedding dim, K = chosen rows

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from shardkeep.base.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Choose(Protocol):
    """Chooses rows of one step."""

    def __call__(self, grad_UD: npt.NDArray[np.float32], keep: float, key: int) -> npt.NDArray[np.int64]:
        """Positions of `num_kept(U, keep)` rows, int64 (K,), ascending, none twice: a function of the arguments alone.

        Args:
            grad_UD: The step's gradients, float32, without what a pool still holds of these rows.
            keep: Share to choose, above 0, below 1.
            key: Names the step's random numbers, 0 <= key < 2**128; different for each group of tables."""
        ...


@dataclass(frozen=True, slots=True)
class Selector:
    """A line of the registry."""

    chooser: str
    """module:function of a `Choose`."""
    pool_chooses: bool = False
    """Whether a row pool chooses on its own, by the norm of gradient and residual. The function then serves jobs that
    have no pool."""
    kernels: tuple[str, ...] = ()
    """Modules of kernels that the function imports."""

    def choose(self) -> Choose:
        """The function; loads its module."""
        module, _, function = self.chooser.partition(":")
        found: Choose = getattr(importlib.import_module(module), function)
        return found


_TOPK = ("shardkeep.compression.selection.threshold_kernels",)

SELECTORS: dict[str, Selector] = {
    "largest": Selector("shardkeep.compression.selection.largest_rows:largest_rows", pool_chooses=True, kernels=_TOPK),
    "random": Selector("shardkeep.compression.selection.random_rows:random_rows"),
}

if TYPE_CHECKING:
    SelectorName = str
else:
    SelectorName = Literal[tuple(SELECTORS)]  # what the config takes


def selector(name: str) -> Selector:
    """The line of a name. Raises ConfigError for an unknown name."""
    if name not in SELECTORS:
        raise ConfigError(f"compression.push.select: {name!r} is no selector; allowed: {', '.join(SELECTORS)}")
    return SELECTORS[name]
