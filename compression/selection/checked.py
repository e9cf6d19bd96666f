"""CheckedSelector: a selector of the user's own, whose results have the types and shapes that `Selector` states."""
# V = rows of a step, W = values of a row's state, D = embedding dim

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Bools, Floats
from shardkeep.base.errors import ConfigError, UserError
from shardkeep.compression.selection.selector import Selector, Step


class CheckedSelector(Selector):
    """Calls `selector`, and raises UserError, which begins with `name`, for a result of another form.

    Raises ConfigError for a selector without `choose`, or that sends neither rows nor values."""

    def __init__(self, selector: Selector, name: str) -> None:
        self._selector, self._name = selector, name
        self.sends = getattr(selector, "sends", None)  # type: ignore[assignment]
        if self.sends not in ("rows", "values"):
            raise ConfigError(f"{name}: sends is {self.sends!r}; expected 'rows' or 'values'")
        if getattr(type(selector), "choose", None) is Selector.choose:
            raise ConfigError(f"{name} has no method choose; expected choose(step, values_VD) -> Bools")

    def state_values(self, dim: int) -> int:
        found = self._selector.state_values(dim)
        if not isinstance(found, int) or found < dim:
            raise self._wrong("state_values", repr(found), f"a whole number of at least dim, {dim}")
        return found

    def accumulate(self, step: Step, state_VW: Floats, grad_VD: Floats) -> Floats:
        found = self._selector.accumulate(step, state_VW, grad_VD)
        values_VD: Floats = self._array("accumulate", found, np.float32, grad_VD.shape)
        return values_VD.copy() if np.may_share_memory(values_VD, grad_VD) else values_VD

    def choose(self, step: Step, values_VD: Floats) -> Bools:
        shape = (len(values_VD),) if self.sends == "rows" else values_VD.shape
        chosen: Bools = self._array("choose", self._selector.choose(step, values_VD), np.bool_, shape)
        return chosen

    def settle(self, state_VW: Floats, values_VD: Floats, sent_VD: Bools, decoded_VD: Floats) -> None:
        found: Any = self._selector.settle(state_VW, values_VD, sent_VD, decoded_VD)  # type: ignore[func-returns-value]
        if found is not None:
            raise self._wrong("settle", type(found).__name__, "None: it changes state_VW in place")

    def _array(self, method: str, found: Any, dtype: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        if not isinstance(found, np.ndarray) or found.dtype != dtype or found.shape != shape:
            came = f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else type(found).__name__
            raise self._wrong(method, came, f"{np.dtype(dtype)} {shape}")
        return np.ascontiguousarray(found)

    def _wrong(self, method: str, found: str, expected: str) -> UserError:
        return UserError(f"{self._name}: {method} returned {found}; expected {expected}")
