"""Compression of the tower's gradient between workers: one rank's form and its memory. Knows no network and no DDP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from shardkeep.base.plugging.own import load_own
from shardkeep.compression.config import FORMS, TowerCompressionConfig
from shardkeep.compression.tower.exchange import DenseForm, Ranks, Shapes, Sum
from shardkeep.compression.tower.formats import FP16, Rounded
from shardkeep.compression.tower.memory import Memory


class DenseCompression:
    """One rank's compression of the dense gradient.

    Every rank makes the same calls in each step: `begin`, `sum` for all parameters (in one or more groups, each once),
    `memory.settle`.

    Args:
        shapes: of the parameters, by name.
        device: where gradients are.
        import_from: folder where a form of the user's own is looked for last.

    Raises:
        UserError: a form of the user's own that cannot be loaded or built.
    """

    memory: Memory
    """All that is kept over steps."""

    def __init__(
        self, config: TowerCompressionConfig, shapes: Shapes, device: torch.device, *, import_from: Path | None = None
    ) -> None:
        self.name = config.name
        self.num_values = sum(map(math.prod, shapes.values()))
        self.memory = Memory(shapes, device)
        self._warmup_steps = config.warmup_steps or 0
        self._form: DenseForm
        if (plug := FORMS.get(config.name)) is not None:
            options = {key: value for key in plug.config if (value := getattr(config, key)) is not None}
            self._form = plug.load()(shapes, self.memory, **options)
        else:
            from shardkeep.compression.tower.checked import CheckedForm  # here: other jobs do not load it

            setting = "compression.tower"
            own = load_own(config, DenseForm, shapes, self.memory, setting=setting, import_from=import_from)
            self._form = CheckedForm(own, device)
        self._first = Rounded(shapes, FP16, self.memory)
        self._warming = False

    def begin(self, step: int, scale: float = 1.0) -> None:
        """Begins step `step` of the job, whose gradients are multiplied by the loss scale `scale`. What a step before
        left unsettled is forgotten."""
        self.memory.begin(scale)
        self._warming = step < self._warmup_steps

    def sum(self, names: Sequence[str], grads: Sequence[torch.Tensor], ranks: Ranks) -> Sum:
        """The sum over ranks of the gradients of the parameters `names`, flat in their order, float32. Not finite
        somewhere on all ranks where a gradient of any rank is not finite."""
        form = self._first if self._warming else self._form
        return form.sum(names, [grad.detach().float() for grad in grads], ranks)
