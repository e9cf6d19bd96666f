"""A callback that keeps what it receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardkeep import Callback
from shardkeep.callbacks import CheckpointEvent, EvaluationEvent, ProgressEvent, StartEvent, Summary
from shardkeep.view.callback import METHODS

Call = tuple[str, Any]


class Notes(Callback):
    """Keeps each method's name and argument, in order. Does `deeds[method](argument)` after that."""

    def __init__(self, **deeds: Callable[[Any], None]) -> None:
        assert set(deeds) <= set(METHODS)
        self.calls: list[Call] = []
        self._deeds = deeds

    def on_start(self, event: StartEvent, /) -> None:
        self._note("on_start", event)

    def on_progress(self, event: ProgressEvent, /) -> None:
        self._note("on_progress", event)

    def on_evaluation(self, event: EvaluationEvent, /) -> None:
        self._note("on_evaluation", event)

    def on_checkpoint(self, event: CheckpointEvent, /) -> None:
        self._note("on_checkpoint", event)

    def on_end(self, summary: Summary, /) -> None:
        self._note("on_end", summary)

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.calls]

    def of(self, method: str) -> list[Any]:
        return [argument for name, argument in self.calls if name == method]

    def steps(self, method: str) -> list[int]:
        return [argument.step for argument in self.of(method)]

    def check_order(self) -> None:
        """Start first, end last, both once; the steps of each kind grow."""
        assert self.methods[0] == "on_start" and self.methods[-1] == "on_end"
        assert (self.methods.count("on_start"), self.methods.count("on_end")) == (1, 1)
        for method in METHODS[1:-1]:
            steps = self.steps(method)
            assert steps == sorted(set(steps)), (method, steps)

    def _note(self, method: str, argument: Any) -> None:
        self.calls.append((method, argument))
        if method in self._deeds:
            self._deeds[method](argument)


def fails(error: BaseException, *, at: int = 0) -> Callable[[Any], None]:
    def deed(argument: Any) -> None:
        if getattr(argument, "step", at) >= at:
            raise error

    return deed
