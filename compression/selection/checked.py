"""CheckedSelector: a selector of the user's own, whose results have the types and shapes that `Selector` states."""
# V = rows of a step, W = values of a row's state, D = embedding dim

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Bools, Floats
from shardkeep.base.errors import ConfigError
from shardkeep.base.plugging.own import Own, words
from shardkeep.compression.selection.selector import Selector, Step


class CheckedSelector(Selector):
    """Calls the selector. Raises UserError for a result of another form.

    Raises ConfigError for a selector that sends neither rows nor values."""

    def __init__(self, own: Own) -> None:
        self._own = own
        self.sends = getattr(own.plug, "sends", None)  # type: ignore[assignment]
        if self.sends not in ("rows", "values"):
            own.refuse(f"sends is {self.sends!r}; expected 'rows' or 'values'", ConfigError)

    def state_values(self, dim: int) -> int:
        return self._own.whole("state_values", dim, at_least=dim)

    def accumulate(self, step: Step, state_VW: Floats, grad_VD: Floats) -> Floats:
        shape = grad_VD.shape
        values_VD: Floats = self._own.array("accumulate", step, state_VW, grad_VD, dtype=np.float32, shape=shape)
        return values_VD.copy() if np.may_share_memory(values_VD, grad_VD) else values_VD

    def choose(self, step: Step, values_VD: Floats) -> Bools:
        shape = (len(values_VD),) if self.sends == "rows" else values_VD.shape
        return self._own.array("choose", step, values_VD, dtype=np.bool_, shape=shape)

    def settle(self, state_VW: Floats, values_VD: Floats, sent_VD: Bools, decoded_VD: Floats) -> None:
        found = self._own.call("settle", state_VW, values_VD, sent_VD, decoded_VD)
        if found is not None:
            self._own.returned("settle", words(found), "None: it changes state_VW in place")
