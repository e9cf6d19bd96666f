"""One push a step for all modules over a client: at the end of the backward pass, or with an optimizer's step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

import torch

from shardkeep.base.errors import UserError
from shardkeep.loop.client import EmbeddingClient
from shardkeep.workers.embeddings.loop_lookup import Lookup

Steps = Literal["backward"] | torch.optim.Optimizer
Scale = Literal["mean", "sum"] | float | Callable[[], float]


class HasFactor(Protocol):
    """An optimizer of rows on servers."""

    @property
    def factor(self) -> float:
        """What multiplies the tables' learning rates."""
        ...


class StepPush:
    """Collects the lookups of a step and applies them together.

    Args:
        scale: Of row gradients: mean = 1 / number of trainers, as DDP averages dense gradients; sum; a number; or a
            function, such as `lambda: 1 / scaler.get_scale()`.
        steps: backward = at the end of the backward pass; or the optimizer after whose step it happens.
    """

    def __init__(self, client: EmbeddingClient, *, scale: Scale, steps: Steps) -> None:
        self._client = weakref.ref(client)
        self.settings = (scale, steps)
        self._scale = scale
        self._count = 0
        self._live: dict[int, Lookup] = {}  # by their number: hooks that held a lookup would hold themselves
        self._reached: set[int] = set()  # numbers of `_live`
        self._optimizers: list[HasFactor] = []
        self._pass = -1  # the backward pass at whose end the push is due
        if isinstance(steps, torch.optim.Optimizer):
            steps.register_step_post_hook(lambda *_: self.push())

    @classmethod
    def of(cls, client: EmbeddingClient, *, scale: Scale, steps: Steps) -> StepPush:
        """The one of a client, for all of its modules. Raises UserError where another module has other settings."""
        found = _PUSHES.get(client)
        if found is None:
            found = _PUSHES[client] = cls(client, scale=scale, steps=steps)
        if found.settings != (scale, steps):
            raise UserError("scale or steps: another module over this client has other ones; allowed: the same for all")
        return found

    def watch_lr(self, optimizer: HasFactor) -> None:
        """Multiplies learning rates by an optimizer's `factor` in each step; all such factors must be equal."""
        self._optimizers.append(optimizer)

    def add(self, lookup: Lookup) -> None:
        """Adds a lookup of the running step."""
        if any(live.step != lookup.step for live in self._live.values()):
            self._forget()  # of a step that was ended by `client.apply`
        self._count += 1
        self._live[self._count] = lookup
        for leaf in lookup.leaves():
            leaf.register_post_accumulate_grad_hook(partial(self._reach, self._count, lookup.step))  # type: ignore[no-untyped-call]

    def push(self) -> None:
        """Applies what a backward pass has reached. Without such rows, the step of this trainer is empty."""
        client = self._client()
        assert client is not None  # lookups hold it
        reached = [lookup for number, lookup in self._live.items() if number in self._reached]
        self._forget()
        client.apply(*reached, scale=self._factor(client), lr_factor=self._lr_factor())

    def _factor(self, client: EmbeddingClient) -> float:
        if callable(self._scale):
            return self._scale()
        named = {"mean": 1.0 / client.num_trainers, "sum": 1.0}
        return named[self._scale] if isinstance(self._scale, str) else self._scale

    def _lr_factor(self) -> float:
        factors = [optimizer.factor for optimizer in self._optimizers] or [1.0]
        if max(factors) - min(factors) > 1e-6 * max(factors):
            found = f"{min(factors):g} to {max(factors):g} times their first ones"
            raise UserError(f"learning rates: modules have {found}; allowed: the same factor for all")
        return factors[0]

    def _forget(self) -> None:
        self._live, self._reached = {}, set()

    def _reach(self, number: int, step: int, _leaf: torch.Tensor) -> None:
        if number not in self._live:
            raise UserError(
                f"backward: the rows of step {step} were pushed by an earlier backward pass; add the losses up "
                "before one backward, or push with the optimizer (steps=optimizer)"
            )
        self._reached.add(number)
        running = torch._C._current_graph_task_id()
        if self.settings[1] == "backward" and running != self._pass:
            self._pass = running  # a pass that raised has no end, so its number tells the next one apart
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.push)


_PUSHES: weakref.WeakKeyDictionary[EmbeddingClient, StepPush] = weakref.WeakKeyDictionary()
