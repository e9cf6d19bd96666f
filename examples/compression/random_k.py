"""Random-k: single values by keyed random numbers, the same on every worker (Stich et al., NeurIPS 2018).

compression:
  push:
    select: {name: "shardkeep.examples.compression.random_k:RandomK", options: {unbiased: true}}
    keep: 0.1
    pool_rows: 200000
"""
# V = rows of a step, D = embedding dim

from __future__ import annotations

from typing import Literal

import numpy as np

from shardkeep.base.arrays import Bools, Floats
from shardkeep.compression.selection.selector import Selector, Step


class RandomK(Selector):
    """Sends each value with probability `keep`. The draws depend on seed, step, table, id and column only.

    Args:
        unbiased: Sent values are divided by `keep` and the others are forgotten, so that their mean is the gradient.
            Without it, the others wait as a residual.
    """

    sends: Literal["rows", "values"] = "values"

    def __init__(self, *, unbiased: bool = False) -> None:
        self.unbiased = unbiased

    def accumulate(self, step: Step, state_VW: Floats, grad_VD: Floats) -> Floats:
        return grad_VD / np.float32(step.keep) if self.unbiased else super().accumulate(step, state_VW, grad_VD)

    def choose(self, step: Step, values_VD: Floats) -> Bools:
        chosen_VD: Bools = step.draws.uniform(values_VD.shape[1]) < step.keep
        return chosen_VD

    def settle(self, state_VW: Floats, values_VD: Floats, sent_VD: Bools, decoded_VD: Floats) -> None:
        if not self.unbiased:
            super().settle(state_VW, values_VD, sent_VD, decoded_VD)
