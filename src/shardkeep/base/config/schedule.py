"""Learning-rate schedules: pure functions of the step, the same on servers and in towers."""

from __future__ import annotations

import bisect
import math
from typing import Literal

from pydantic import Field

from shardkeep.base.settings import MOST_STEPS, Settings

LEAST = 1e-7
"""A factor below it counts as 0: float32 numbers have seven digits."""


class ScheduleConfig(Settings):
    """Warm-up, then decay. The rate at step t is `lr * schedule.factor(t)`."""

    warmup_steps: int = Field(0, ge=0, le=MOST_STEPS)
    """Steps over which the rate rises linearly from lr / warmup_steps to lr; 0 = no warm-up."""
    decay: Literal["none", "linear", "cosine", "inverse_sqrt", "exponential"] = "none"
    """Shape of the decay after the warm-up."""
    decay_steps: int = Field(0, ge=0, le=MOST_STEPS)
    """Steps from the end of the warm-up to `final_factor` (linear, cosine); for `exponential` the
    steps in which the rate falls to `final_factor` of itself, again and again; for `inverse_sqrt`
    the offset in `sqrt(decay_steps / (decay_steps + t))`. Needed by every decay but `none`."""
    final_factor: float = Field(0.0, ge=0.0, le=1.0)
    """Factor on lr at the end of `linear` and `cosine` decay; the ratio per period of `exponential`."""

    def model_post_init(self, _context: object) -> None:
        if self.decay == "none":
            unused = [k for k in ("decay_steps", "final_factor") if k in self.model_fields_set and getattr(self, k)]
            if unused:
                raise ValueError(f"{' and '.join(unused)}: has no effect with decay: none; allowed with another decay")
        elif self.decay_steps == 0:
            raise ValueError(f"decay_steps: 0 with decay: {self.decay}; allowed: 1 or more steps")
        if self.decay == "exponential" and self.final_factor == 0.0:
            raise ValueError("final_factor: 0 with decay: exponential; allowed: above 0, up to 1")
        if self.decay == "inverse_sqrt" and self.final_factor:
            raise ValueError("final_factor: has no effect with decay: inverse_sqrt")

    def end(self, steps: int) -> int:
        """The first of `steps` steps from which on the rate is 0, or so low that it moves no float32 weight; `steps` =
        there is none."""
        return bisect.bisect_left(
            range(steps), True, lo=min(self.warmup_steps, steps), key=lambda s: self.factor(s) < LEAST
        )

    def factor(self, step: int) -> float:
        """The factor on the base rate at `step` (0 = the first step); in [0, 1]."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        t = step - self.warmup_steps
        if self.decay == "none":
            return 1.0
        if self.decay == "inverse_sqrt":
            return math.sqrt(self.decay_steps / (self.decay_steps + t))
        if self.decay == "exponential":
            return float(self.final_factor ** (t / self.decay_steps))
        done = min(t / self.decay_steps, 1.0)
        shape = 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.final_factor + (1.0 - self.final_factor) * shape
