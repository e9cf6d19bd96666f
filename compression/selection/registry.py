"""The registry of selectors: the words of `compression.push.select`, and the function that chooses rows for each.

To add a selector, write a function and add a plug to `SELECTORS`: the config takes the name, and every place that
selects rows looks there, with a row pool or without one. Imports neither torch nor numba, nor any selector before it
is used.
"""
# U = a step's unique rows, D = embedding dim, K = chosen rows

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from shardkeep.base.errors import ConfigError
from shardkeep.base.plugging.plugs import Plug, by_name

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
    """What is known of a selector."""

    pool_chooses: bool = False
    """Whether a row pool chooses on its own, by the norm of gradient and residual. The function then serves jobs that
    have no pool."""


_TOPK = ("shardkeep.compression.selection.threshold_kernels",)

SELECTORS: dict[str, Plug[Selector, Choose]] = by_name(
    Plug("largest", Selector(pool_chooses=True), "shardkeep.compression.selection.largest_rows:largest_rows", _TOPK),
    Plug("random", Selector(), "shardkeep.compression.selection.random_rows:random_rows"),
)

if TYPE_CHECKING:
    SelectorName = str
else:
    SelectorName = Literal[tuple(SELECTORS)]  # what the config takes


def selector(name: str) -> Plug[Selector, Choose]:
    """The plug of a name. Raises ConfigError for an unknown name."""
    if name not in SELECTORS:
        raise ConfigError(f"compression.push.select: {name!r} is no selector; allowed: {', '.join(SELECTORS)}")
    return SELECTORS[name]
