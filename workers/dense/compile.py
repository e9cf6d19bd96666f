"""torch.compile for the tower. `auto` is a rule by device: on CPUs compiling gains too little (docs/research/log.md).

Ranks compile outside the reduction, wait for each other and agree. Only batches of the full size are compiled; a ragged
last batch runs eager, and so does one with fewer than two entries of a sequence, so nothing is ever recompiled.
"""

# B = batch, I = dense columns, T = outputs, W = ranks

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkeep.base.errors import JobError, UserError
from shardkeep.base.machine.limits import rss_bytes
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.operations import all_gather
from shardkeep.workers.config import TowerConfig
from shardkeep.workers.dense.products import Products
from shardkeep.workers.embeddings.inputs import (
    Inputs,
    entries_of,
    has_many_entries,
    leaves_of,
    shapes_of,
    zeros,
)

Example = tuple[torch.Tensor, Inputs]
"""Dense columns, and what the model gets of the rows."""
COMPILE_TIMEOUT_S = 900.0
"""How long ranks wait for each other's compilation."""
_WITH_BF16 = {
    "amx_bf16": "was not measured with AMX",
    "avx512_bf16": "gained 4 to 6 % of a step with bf16, and has to gain 8 %",
}
"""What compiling did on CPUs that compute in bf16, by the flag of the CPU (docs/guide/performance.md)."""


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

    def forward(self, dense_BI: torch.Tensor, embeddings: Inputs) -> torch.Tensor:
        if self.enabled and len(dense_BI) == self.batch_size and has_many_entries(embeddings):
            return self._run(dense_BI, embeddings)
        logits_BT: torch.Tensor = self.model(dense_BI, embeddings)
        return logits_BT

    def _run(self, dense_BI: torch.Tensor, embeddings: Inputs) -> torch.Tensor:
        """Runs compiled. The numbers of entries change from batch to batch, and are variables of the graph."""
        assert self._compiled is not None
        for entries in entries_of(embeddings):
            torch._dynamo.mark_dynamic(entries, 0)
        return self._compiled(dense_BI, embeddings)

    def compile_for(
        self, example: Example, *, mode: str, context: Callable[[], AbstractContextManager[Any]], products: Products
    ) -> str | None:
        """Compiles forward and backward for the full batch; a problem comes back as text. Minutes at worst. `products`
        are counted before, where there are no sequences, whose zeros are shorter.

        Runs on zeros like `example`, inputs of any size: no gradient is left in the parameters, buffers and random
        numbers stay as they were.
        """
        # DDP wraps this module, and towers are smaller than a bucket: dynamo need not split graphs at buckets.
        import torch._dynamo
        import torch._inductor.config

        torch._dynamo.config.optimize_ddp = False
        model = self.model

        def run(dense_BI: torch.Tensor, embeddings: Inputs) -> torch.Tensor:
            logits_BT: torch.Tensor = model(dense_BI, embeddings)
            return logits_BT

        try:
            if not entries_of(example[1]):
                with products.counted(self.batch_size), context():
                    self._dry_run(self.model, *example)
            self._compiled = torch.compile(run, mode=None if mode == "default" else mode, dynamic=False)
            # One compile thread: a pool of processes would outlive its use.
            with torch._inductor.config.patch(compile_threads=1), context():
                self._dry_run(self._run, *example)
                if mode != "default":  # its CUDA graph is recorded in the second run
                    self._dry_run(self._run, *example)
        except Exception as error:
            self._compiled = None
            lines = str(error).strip().splitlines()
            return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"
        return None

    def _dry_run(self, run: Callable[..., torch.Tensor], dense_BI: torch.Tensor, embeddings: Inputs) -> None:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        device = parameters[0].device
        kept = [b.clone() for b in self.model.buffers()]
        dense_BI = torch.zeros(self.batch_size, dense_BI.shape[1], device=device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            inputs = zeros(*shapes_of(embeddings), self.batch_size, device)
            for leaf, like in zip(leaves_of(inputs), leaves_of(embeddings), strict=True):
                leaf.requires_grad_(like.requires_grad)
            logits_BT = run(dense_BI, inputs)
            trained = [*parameters, *(leaf for leaf in leaves_of(inputs) if leaf.requires_grad)]
            torch.autograd.grad(logits_BT.float().sum(), trained, allow_unused=True)
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), kept, strict=True):
                buffer.copy_(before)


def why_eager(can: Mapping[str, Any], dtype: torch.dtype | None) -> str:
    """Why auto compiles nothing on a CPU with these flags (`torch.cpu.get_capabilities`) and autocast to `dtype`. Flags
    alone decide, before step 0, so equal machines agree. No gain is large enough to ask how long the job is."""
    if dtype is None:
        return "made steps 1 to 29 % slower in fp32"
    flags = _WITH_BF16 if dtype is torch.bfloat16 else {}
    return next((told for flag, told in flags.items() if can.get(flag)), "was not measured in this arithmetic")


def choose(
    config: TowerConfig,
    device: torch.device,
    *,
    sync: bool,
    dtype: torch.dtype | None = None,
) -> tuple[bool, str]:
    """Whether the tower is to run compiled, with the reason. Raises UserError: `compile: on` where it cannot.

    `dtype`: of autocast, None = there is none."""
    if config.compile == "on" and (lacking := why_no_compiler(device)):
        raise UserError(f"tower.compile: on is not possible here: {lacking}; allowed: auto or off")
    if config.compile != "auto":
        return config.compile == "on", f"{config.compile}: as configured"
    if device.type == "cpu":
        return False, f"off: on this CPU compiling {why_eager(torch.cpu.get_capabilities(), dtype)}"
    if config.parallel == "fsdp":
        return False, "off: tower.parallel: fsdp gathers parameters in the forward pass"
    if sync:
        return False, "off: torch.compile may select GPU kernels by time, and nothing in sync may depend on time"
    return True, "on: the tower is on a GPU"


class Compilation:
    """Turns `switch` on where the job runs compiled. Every rank makes the same calls.

    Args:
        dtype: of autocast; None = there is none.
        context: what the model is compiled in (autocast).
        say: receives one line: whether the tower runs compiled, and why.

    Attributes:
        due: whether `run` must come before the next batch; in each generation once.
        compile_s: seconds that this rank has spent compiling.
        rss_bytes: memory of this process before and after it compiled; None = it has not.
        products: the tower's matrix products.

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
        dtype: torch.dtype | None = None,
        context: Callable[[], AbstractContextManager[Any]],
        say: Callable[[str], None],
    ) -> None:
        self.switch = switch
        self.compile_s = 0.0
        self.rss_bytes: tuple[int, int] | None = None
        self.products = Products(device)
        self._config = config
        self._device = device
        self._context = context
        self._say = say
        self._tried = False
        self._problem: str | None = None
        self._wanted, reason = choose(config, device, sync=sync, dtype=dtype)
        self.due = self._wanted
        say(reason)

    def regroup(self) -> None:
        """Other ranks may have joined: all meet again before the next batch, and only new ranks compile."""
        self.due, self.switch.enabled = self._wanted, False

    def run(self, collective: Collective, example: Example) -> None:
        """Compiles once in the process's life, for inputs like `example`, and agrees with the other ranks. Raises
        JobError where `on` failed."""
        self.due = False
        if self._config.compile == "auto" and entries_of(example[1]):
            self._wanted = False
            self._say("off: auto compiles no tower with sequences")
            return
        if not self._tried:
            started, before = time.perf_counter(), rss_bytes()
            self._problem = why_no_compiler(self._device) or self.switch.compile_for(
                example, mode=self._config.mode, context=self._context, products=self.products
            )
            self._tried = True
            self.compile_s = time.perf_counter() - started
            self.rss_bytes = before, rss_bytes()
        collective.barrier(timeout_s=COMPILE_TIMEOUT_S, purpose="agreements")
        failed_W = all_gather(collective, torch.tensor([int(self._problem is not None)]), purpose="agreements").view(-1)
        self.switch.enabled = not failed_W.any()
        if self.switch.enabled:
            return
        problem = self._problem or f"worker {int(failed_W.argmax())} could not compile; its log says why"
        if self._config.compile == "on":
            raise JobError(f"tower.compile: on failed: {problem}; tower.compile: off trains without it")
        self._say(f"off: compiling failed: {problem}")

    def counted(self, samples: int) -> AbstractContextManager[None]:
        """Is around a micro-batch, and counts its matrix products. `samples`: 0 = it is a stand-in."""
        return self.products.added(samples, eager=not self.switch.enabled)

    def keep_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """With CUDA graphs the next micro-batch overwrites the memory in which a micro-batch's gradients lie."""
        if self.switch.enabled and self._device.type == "cuda" and self._config.mode != "default":
            for p in parameters:
                p.grad = None if p.grad is None else p.grad.clone()
