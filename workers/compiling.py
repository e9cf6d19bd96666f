"""torch.compile for the tower: when it may run, what it compiles, and whether it is kept.

Only batches of the full size are compiled; a ragged last batch runs eager, so nothing is ever recompiled.
"""

# B = batch, I = dense columns, T = outputs

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import sys
import sysconfig
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

COMPILE_TIMEOUT_S = 900.0
"""How long ranks wait for each other's compilation."""
ASSUMED_COMPILE_S = 60.0
"""What one compilation is taken to cost before it was tried."""
ASSUMED_GAIN = {"cpu": 0.1, "cuda": 0.4}
"""Share of the step that compiling may save at best; the CPU's measured 0-5 %."""
WARM_UP, MEASURED = 3, 10
"""Steps left out before each measurement, and steps measured."""


def why_no_compiler(device: torch.device) -> str | None:
    """What torch.compile lacks here, as one clause; None when it can run. Compiles nothing."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler})"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's headers are missing (Python.h, from python3-dev)"
    return None


class Switch(nn.Module):
    """The model, run compiled or eager by the size of the batch and by `enabled`."""

    def __init__(self, model: nn.Module, batch_size: int) -> None:
        super().__init__()
        self.model = model
        self.batch_size = batch_size
        self.enabled = False
        self._compiled: Callable[..., torch.Tensor] | None = None

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        run = self._compiled if self.takes_compiled(len(dense_BI)) else self.model
        assert run is not None
        logits_BT: torch.Tensor = run(dense_BI, embeddings)
        return logits_BT

    def takes_compiled(self, num_samples: int) -> bool:
        return self.enabled and num_samples == self.batch_size

    def compile_for(
        self, dims: dict[str, int], num_dense: int, *, mode: str, context: Callable[[], AbstractContextManager[Any]]
    ) -> str | None:
        """Compiles forward and backward for the full batch; a problem comes back as text. Minutes at worst.

        Runs on zeros: no gradient is left in the parameters, buffers and random numbers stay as they were.
        """
        if self._compiled is not None:  # in an earlier generation of the job
            self.enabled = True
            return None
        # DDP wraps this module, and towers are smaller than a bucket: dynamo need not split graphs at buckets.
        import torch._dynamo
        import torch._inductor.config

        torch._dynamo.config.optimize_ddp = False
        model = self.model

        def run(dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
            logits_BT: torch.Tensor = model(dense_BI, embeddings)
            return logits_BT

        try:
            self._compiled = torch.compile(run, mode=None if mode == "default" else mode, dynamic=False)
            # One compile thread: a pool of processes would outlive its use.
            with torch._inductor.config.patch(compile_threads=1), context():
                self._dry_run(dims, num_dense)
        except Exception as error:
            self._compiled = None
            lines = str(error).strip().splitlines()
            return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"
        self.enabled = True
        return None

    def _dry_run(self, dims: dict[str, int], num_dense: int) -> None:
        assert self._compiled is not None
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        device = parameters[0].device
        kept = [b.clone() for b in self.model.buffers()]
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for _ in range(2):  # reduce-overhead records its CUDA graph in the second run
                dense_BI = torch.zeros(self.batch_size, num_dense, device=device)
                leaves = {
                    name: torch.zeros(self.batch_size, dim, device=device, requires_grad=True)
                    for name, dim in dims.items()
                }
                logits_BT = self._compiled(dense_BI, leaves)
                torch.autograd.grad(logits_BT.float().sum(), [*parameters, *leaves.values()], allow_unused=True)
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), kept, strict=True):
                buffer.copy_(before)


@dataclass
class Trial:
    """Rank 0's measurements for compile: auto. Counts steps; the tower acts on `due`."""

    phase: str = "eager"
    """eager, then compiled, then over."""
    steps: int = 0
    seconds: list[float] = field(default_factory=list)
    eager_s: float = 0.0

    @property
    def measuring(self) -> bool:
        return self.phase != "over" and self.steps >= WARM_UP

    def step_done(self) -> bool:
        """Counts a step; true when the phase has its measurements."""
        self.steps += 1
        return self.phase != "over" and self.steps == WARM_UP + MEASURED

    def next(self, phase: str) -> float:
        """Ends the phase and returns the median seconds of its full batches (infinite without any)."""
        median_s = statistics.median(self.seconds) if self.seconds else float("inf")
        self.phase, self.steps, self.seconds = phase, 0, []
        return median_s


def worth_compiling(eager_s: float, steps_left: int | None, device: torch.device) -> tuple[bool, str]:
    """Whether the job is long enough to repay a compilation, with the reason; steps_left None = unknown, so yes."""
    if eager_s == float("inf"):
        return False, "off: no batch of the full size to compile for"
    if steps_left is None:
        return True, "trying"
    gain_s = steps_left * eager_s * ASSUMED_GAIN[device.type]
    if gain_s < ASSUMED_COMPILE_S:
        return False, (
            f"off: {steps_left} steps of {eager_s * 1e3:.1f} ms can save {gain_s:.0f} s at best, "
            f"compiling costs about {ASSUMED_COMPILE_S:.0f} s"
        )
    return True, "trying"


def faster_of(eager_s: float, compiled_s: float) -> tuple[bool, str]:
    """Whether compiled is kept, with the reason."""
    figures = f"{compiled_s * 1e3:.2f} ms compiled, {eager_s * 1e3:.2f} ms eager"
    return (True, f"on: {figures}") if compiled_s < eager_s else (False, f"off: {figures}")
