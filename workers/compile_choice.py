"""Whether one rank's tower runs compiled: as configured, or by trying both. Ranks compile outside the reduction, wait
for each other, and agree."""

# B = batch, I = dense columns

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from shardkeep.base.errors import JobError, UserError
from shardkeep.workers.collective import Collective
from shardkeep.workers.compiling import (
    COMPILE_TIMEOUT_S,
    Switch,
    Trial,
    faster_of,
    why_no_compiler,
    worth_compiling,
)
from shardkeep.workers.config import TowerConfig


class CompileChoice:
    """Turns `switch` on or off. Every rank makes the same calls.

    Args:
        sync: nothing may depend on timing.
        total_steps: of the whole job, None = unknown.
        context: what the model is compiled in (autocast).
        say: told what `compile` came to and why, one line.

    Attributes:
        compile_s: seconds this rank has spent compiling.

    Raises:
        UserError: `compile: on` where torch.compile cannot run.
    """

    def __init__(
        self,
        switch: Switch,
        config: TowerConfig,
        device: torch.device,
        *,
        sync: bool,
        total_steps: int | None,
        context: Callable[[], AbstractContextManager[Any]],
        say: Callable[[str], None],
    ) -> None:
        self.switch = switch
        self.compile_s = 0.0
        self._config = config
        self._device = device
        self._total_steps = total_steps
        self._context = context
        self._say = say
        self._input_shape: tuple[int, dict[str, int]] | None = None
        self.trial = self._begun(sync)
        self.first = config.compile == "on"
        """Compile before the next batch."""

    def _begun(self, sync: bool) -> Trial:
        wish, lacking = self._config.compile, why_no_compiler(self._device)
        if wish == "on" and lacking:
            raise UserError(f"tower.compile: on is not possible here: {lacking}; allowed: auto or off")
        if wish == "off":
            self._say("off: as configured")
        elif wish == "auto" and sync:
            self._say("off: in sync mode nothing may depend on timing")
        elif wish == "auto" and lacking:
            self._say(f"off: {lacking}")
        elif wish == "auto":
            self._say("undecided: the first steps are measured")
            return Trial()
        else:
            self._say("on: as configured")
        return Trial(phase="over")

    @property
    def deciding(self) -> bool:
        """Whether `compile: auto` is still measuring; the steps until then are no steady state."""
        return self.trial.phase != "over"

    @property
    def decision(self) -> bool | None:
        """Whether the job runs compiled; None = it is still finding out."""
        return None if self.deciding else self.switch.enabled or self.first

    def follow(self, decision: bool | None) -> None:
        """Goes on as another rank of the job does: all compile together, before the next step."""
        self.trial = Trial() if decision is None else Trial(phase="over")
        self.first, self.switch.enabled = bool(decision), False

    def take_over(self, decision: bool | None) -> None:
        """Goes on as the job decided before, which it does once in its life."""
        if self.deciding and decision is not None:
            self.trial, self.first = Trial(phase="over"), bool(decision)
            self._say(f"{'on' if self.first else 'off'}: as the job decided before")

    def due(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> bool:
        """Whether `compile_first` must come before this batch, whose shape is noted."""
        if self._input_shape is None:
            self._input_shape = dense_BI.shape[1], {name: leaf.shape[1] for name, leaf in embeddings.items()}
        return self.first

    def compile_first(self, collective: Collective) -> None:
        """Compiles for what was decided before the first batch. Raises JobError where `compile: on` fails."""
        self.first = False
        problem = self._compile(collective)
        if problem is not None and self._config.compile == "on":
            raise JobError(f"tower.compile: on failed: {problem}; tower.compile: off trains without it")
        if problem is not None:
            self._say(f"off: compiling failed: {problem}")

    def clock(self) -> float:
        """Now, in seconds; while it measures, when the device has done what it was given."""
        if self.trial.measuring and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def note(self, num_samples: int, seconds: float) -> None:
        """A batch of so many samples took `seconds`."""
        if self.trial.measuring and num_samples == self.switch.batch_size:
            self.trial.seconds.append(seconds)

    def decide(self, step: int, collective: Collective) -> None:
        """After step `step`, when `trial.step_done` says that enough was measured: compiles, or keeps the faster."""
        if self.trial.phase == "eager":
            self.trial.eager_s = self.trial.next("compiled")
            left = None if self._total_steps is None else self._total_steps - step - 1
            go_on, reason = _agree(collective, worth_compiling(self.trial.eager_s, left, self._device))
            problem = self._compile(collective) if go_on else None
            if problem is not None:
                go_on, reason = False, f"off: compiling failed: {problem}"
            if go_on:
                return
        else:
            go_on, reason = _agree(collective, faster_of(self.trial.eager_s, self.trial.next("over")))
        self.trial.phase = "over"
        self.switch.enabled = go_on
        self._say(reason)

    def _compile(self, collective: Collective) -> str | None:
        """What hindered this rank or another, as text; None = all have compiled."""
        assert self._input_shape is not None
        num_dense, dims = self._input_shape
        started = time.perf_counter()
        problem = self.switch.compile_for(dims, num_dense, mode=self._config.mode, context=self._context)
        self.compile_s += time.perf_counter() - started
        collective.barrier(timeout_s=COMPILE_TIMEOUT_S)
        failed_W = collective.all_gather(torch.tensor([int(problem is not None)])).view(-1)
        if not failed_W.any():
            return None
        self.switch.enabled = False
        return problem or f"worker {int(failed_W.argmax())} could not compile; its log says why"


def _agree(collective: Collective, mine: tuple[bool, str]) -> tuple[bool, str]:
    go_on, reason = collective.broadcast_object(list(mine))
    return bool(go_on), str(reason)
