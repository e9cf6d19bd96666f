"""The dense tower of one worker: model, loss, optimizer, compile and mixed precision behind two calls a step.

It knows no rows and no servers: embeddings come in as leaves of autograd and leave with their gradients.
"""

# B = batch, I = dense columns, T = labels

from __future__ import annotations

import contextlib
import copy
import logging
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import nn

from shardkeep.base.errors import UserError
from shardkeep.compression.config import TowerCompressionConfig
from shardkeep.compression.tower.compressor import DenseCompression
from shardkeep.compression.tower.exchange import Shapes
from shardkeep.workers.collectives.collective import Collective, Solo
from shardkeep.workers.collectives.operations import all_reduce_sum, broadcast_object
from shardkeep.workers.config import TowerConfig
from shardkeep.workers.dense import onednn, padding
from shardkeep.workers.dense.amp import MixedPrecision
from shardkeep.workers.dense.compile import Compilation, Switch
from shardkeep.workers.dense.loss import Objective
from shardkeep.workers.dense.optimizer import DenseOptimizer
from shardkeep.workers.dense.state import ModelState, bytes_by_name, joined, split
from shardkeep.workers.dense.sums import GradientSums
from shardkeep.workers.embeddings.inputs import Inputs
from shardkeep.workers.timing.clock import Stopwatch

if TYPE_CHECKING:
    from shardkeep.workers.dense.shards import Shards

log = logging.getLogger(__name__)
MakeCompression = Callable[[Shapes, torch.device], DenseCompression]
PLAIN: MakeCompression = partial(DenseCompression, TowerCompressionConfig())


@dataclass(frozen=True)
class TowerUpdate:
    """What one `Tower.update` did.

    `applied`: the dense step was made. `row_scale`: factor that brings this step's row gradients to their true
    size. `grad_norm`: norm of the summed dense gradient before clipping; not finite when the step was skipped.
    """

    applied: bool
    row_scale: float
    grad_norm: float


class MicroBatches:
    """Where training is: its step, the micro-batch of the step, and dropout's random numbers for each."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.step = 0
        self._seed = seed
        self._device = device
        self._number = 0

    def restart(self, step: int) -> None:
        """Goes to the start of a step."""
        self.step, self._number = step, 0

    @contextlib.contextmanager
    def next(self, rank: int) -> Iterator[None]:
        """Seeds torch for the next micro-batch, by (seed, step, rank, micro-batch) alone; the process's own generator
        is left as it was."""
        place = struct.pack("<4q", self._seed, self.step, rank, self._number)
        key = xxhash.xxh3_64_intdigest(place) >> 1
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.default_generator.manual_seed(key)
            if self._device.type == "cuda":
                torch.cuda.manual_seed(key)
            yield
        self._number += 1


class Tower:
    """Trains the dense model, alone until `join`; every rank makes the same calls, one `update` per step.

    Args:
        model: `forward(dense_BI, embeddings) -> logits_BT`; moved to `device` and from then on owned by the tower.
        objective: Its loss, clipping, and the samples of a full micro-batch.
        sync: Add gradients in rank order, and let nothing depend on timing.
        compression: Makes that of the gradients between ranks, from the shapes of parameters and a device.
        seed: Of dropout; the random numbers of a micro-batch depend on (seed, step, rank, micro-batch) only.
        watch: Measures forward, backward, dense_reduce, optimizer; compiling is not counted.

    Attributes:
        chosen: What `compile`, `amp` and others came to and why, one line each.

    Raises:
        UserError: `compile: on` where torch.compile cannot run, `linear: onednn` where oneDNN cannot.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        config: TowerConfig,
        objective: Objective,
        device: torch.device,
        sync: bool,
        compression: MakeCompression = PLAIN,
        seed: int = 0,
        watch: Stopwatch | None = None,
    ) -> None:
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32
        self.model = model.to(device)
        self.device = device
        self.chosen: dict[str, str] = {}
        self.watch = watch if watch is not None else Stopwatch()
        self._loss, self._state = objective.loss, ModelState(self.model)
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = DenseOptimizer(config.optimizer, list(parameters.values()), clip_norm=objective.clip_norm)
        self.precision = MixedPrecision(config.amp, device, self.model)
        self._choose("amp", self.precision.chosen.reason)
        amp = self.precision.chosen.dtype is not None
        if (linear := onednn.choose(config.linear, self.model, device, amp=amp)) is not None:
            self._choose("linear", linear)
        if config.pad_widths != "off":
            self._choose("pad_widths", padding.use_for(self.model, config.pad_widths))
        switch, say = Switch(self.model, objective.batch_size), partial(self._choose, "compile")
        self.compilation = Compilation(
            switch, config, device, sync=sync, dtype=self.precision.chosen.dtype,
            context=self.precision.autocast, say=say,
        )  # fmt: skip
        made = compression({name: tuple(p.shape) for name, p in parameters.items()}, device)
        shard = _sharding(config, self.model, device, self.precision.chosen.dtype)
        self.sums = GradientSums(switch, parameters, made, sync=sync, watch=self.watch, shard=shard)
        self._micro_batches = MicroBatches(seed, device)
        self.join(Solo())

    def _choose(self, what: str, reason: str) -> None:
        self.chosen[what] = reason
        log.info("tower %s=%r", what, reason)

    @property
    def collective(self) -> Collective:
        """The ranks of this generation."""
        return self.sums.collective

    @property
    def shards(self) -> Shards | None:
        """This rank's parts of the model, with `parallel: fsdp` from the first group of processes on; None = it has all
        of it."""
        return self.sums.shards

    @property
    def step(self) -> int:
        """The step that the state is at the start of."""
        return self._micro_batches.step

    @property
    def unsent(self) -> dict[str, float]:
        """What compression has left of this rank's gradients, as a norm, and the mean norm of the last steps' summed
        gradients, 0 = this process made no step; {} = it keeps no residual."""
        norm = self.sums.compression.memory.norm
        return {} if norm is None else {"norm": norm, "step_norm": self.optimizer.mean_norm}

    def join(self, collective: Collective) -> None:
        """Takes the ranks of another generation, and makes shards of the model where they are wanted: it must be equal
        on all ranks then. Sends nothing of the model: see `share`."""
        before = self.shards
        self.sums.join(collective)
        if self.shards is not None and before is None:
            self._state = ModelState(self.model)
            self.optimizer = self.optimizer.of_parts(list(self.shards.local.values()), self.shards.norm)
        self._state.settle(applied=False)
        self.compilation.regroup()
        self._micro_batches.restart(self.step)

    def backward(
        self,
        dense_BI: torch.Tensor,
        embeddings: Inputs,
        label_BT: torch.Tensor,
        weight: float,
        factors_B: torch.Tensor | None = None,
        *,
        last: bool = True,
    ) -> torch.Tensor:
        """Loss and gradients of one micro-batch; the embeddings' gradients are left in their `.grad`.
        Returns the sum of the weighted losses, float32, without a graph.

        Args:
            embeddings: Feature -> (B, D) leaves with requires_grad, or without for frozen tables; group -> Sequence of
                such leaves (N, D). With a GradScaler, multiply their gradients by `TowerUpdate.row_scale`.
            weight: Of each sample's loss: 1 / samples of the step over all ranks, 0 for a stand-in batch.
            factors_B: A further factor on each sample's loss; None = all 1.
            last: The step's last micro-batch; gradients are summed over ranks with it (may block).
        """
        if self.compilation.due:
            with self.watch.within(None):
                self.compilation.run(self.collective, (dense_BI, embeddings))
        self._state.keep_buffers()
        around = self.sums.around_backward(self.step, loss_scale=self.precision.scaler.get_scale(), last=last)
        products = self.compilation.counted(len(dense_BI) if weight else 0)
        with around as run, products, self._micro_batches.next(self.collective.rank):
            self.watch.enter("forward")
            with self.precision.autocast():
                logits_BT = run(dense_BI, embeddings)
            if logits_BT.shape != label_BT.shape:  # of a user's own model
                expected = tuple(label_BT.shape)
                raise UserError(f"model.name: forward returned logits {tuple(logits_BT.shape)}; expected {expected}")
            loss = self._loss(logits_BT.float(), label_BT, factors_B) * weight
            self.watch.enter("backward")
            self.precision.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if not last:
            self.compilation.keep_gradients(self.optimizer.parameters)
        return loss.detach()

    def update(self, step: int, rows_finite: bool = True, lr_factor: float = 1.0) -> TowerUpdate:
        """Ends step `step` (counted from 0): sums over ranks, unscales, clips, and steps the optimizer. Blocks.

        The dense update is skipped where the summed gradient is not finite. With a GradScaler an overflow
        anywhere, also in the rows of another rank (`rows_finite` = False there), skips it on all ranks, and
        the caller drops the rows of the step when `applied` is False. `lr_factor` multiplies the learning rate.
        """
        scaler = self.precision.scaler if self.precision.scaling else None
        self.watch.enter("dense_reduce")
        self.sums.finish()
        row_scale = 1.0
        if scaler is not None:
            row_scale = 1.0 / scaler.get_scale()
            self._spread_overflow(rows_finite)
        self.watch.enter("optimizer")
        if scaler is not None:
            scaler.unscale_(self.optimizer.torch)
        grad_norm = self.optimizer.apply(step, lr_factor)
        applied = math.isfinite(grad_norm)
        self.sums.compression.memory.settle(applied)
        self._state.settle(applied=applied)
        if scaler is not None:
            scaler.update()
        self.optimizer.torch.zero_grad(set_to_none=True)
        self._micro_batches.restart(step + 1)
        return TowerUpdate(applied, row_scale, grad_norm)

    def _spread_overflow(self, rows_finite: bool) -> None:
        """One rank's overflow in rows or shards becomes everybody's: an infinite gradient, which the scaler sees."""
        finite = rows_finite and (self.shards is None or self.shards.finite)
        bad = torch.tensor([0.0 if finite else 1.0])
        all_reduce_sum(self.collective, bad, purpose="gradients")
        if bad.item():
            grads = [p.grad for p in self.optimizer.parameters if p.grad is not None]
            next(grad for grad in grads if grad.numel()).fill_(math.inf)

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Around calls of `predict`. Blocks until every rank has called it, if the model is in shards."""
        return contextlib.nullcontext() if self.shards is None else self.shards.whole()

    def predict(self, dense_BI: torch.Tensor, embeddings: Inputs) -> torch.Tensor:
        """Logits (B, T) in float32 without gradients; dropout off; always eager; inside `whole`.

        Without mixed precision on a CPU, the bits of a sample depend on B, not on its place or the other samples."""
        was_training = self.model.training
        if was_training:  # a walk through all modules
            self.model.eval()
        try:
            with torch.inference_mode(), self.precision.autocast(), onednn.rows_alone(self.model):
                logits_BT: torch.Tensor = self.model(dense_BI, embeddings)
                return logits_BT.float()
        finally:
            if was_training:
                self.model.train()

    def state_dict(self) -> dict[str, Any]:
        """Parameters, buffers, optimizer, scaler and the next step: what is the same on all ranks; tensors are the
        live ones. With `shards` some are DTensors, of which each rank has a part."""
        optimizer = self.optimizer.torch.state_dict()
        if self.shards is not None:
            optimizer["state"] = self.shards.labelled_slots(optimizer["state"])
        return {
            "model": self._state.get(),
            "optimizer": optimizer,
            "scaler": self.precision.scaler.state_dict(),
            "compression": self.sums.compression.memory.state_dict(),
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state of another tower of the same model and config; it is copied. Its tensors are whole, or parts
        as of this tower. What belonged to this rank only is gone; see `Memory.load_local_state_dict`."""
        model, optimizer = state["model"], state["optimizer"]
        if self.shards is None:
            optimizer = copy.deepcopy(optimizer)  # torch keeps the tensors it is given
        else:
            names = dict(self.model.named_parameters(remove_duplicate=False))
            model = {name: self.shards.split(t) if name in names else t for name, t in model.items()}
            optimizer = {**optimizer, "state": self.shards.own_slots(optimizer["state"])}
        self.model.load_state_dict(model)
        self._state.settle(applied=True)
        self.optimizer.torch.load_state_dict(optimizer)
        self.precision.scaler.load_state_dict(state["scaler"])
        self.sums.compression.memory.load_state_dict(
            state.get("compression", {})
        )  # checkpoints without compression lack it
        self._micro_batches.restart(state["step"])

    def digest_bytes(self) -> bytes:
        """All of `digest_parts`."""
        return b"".join(digest_parts(self))


def _sharding(
    config: TowerConfig, model: nn.Module, device: torch.device, half: torch.dtype | None
) -> Callable[[Collective], Shards | None] | None:
    """What makes shards of the model over ranks; None = it stays whole."""
    if config.parallel != "fsdp":
        return None
    from shardkeep.workers.dense.shards import sharded  # here: other jobs do not load FSDP

    return partial(sharded, model, device, half=half)


def digest_parts(tower: Tower) -> Iterator[bytes]:
    """Yields name and bytes of every parameter, buffer and optimizer value, in the order of the names; copies. With
    `shards` those of this rank."""
    parameters = dict(tower.model.named_parameters()) if tower.shards is None else tower.shards.local
    return bytes_by_name(parameters, tower.model, tower.optimizer.torch)


def share(tower: Tower, source: int, lacking: Sequence[int]) -> None:
    """Gives the state of rank `source` to the ranks that lack it. Every rank calls it, after `Tower.join`; blocks."""
    if not lacking:
        return
    collective = tower.collective
    tensors: dict[str, torch.Tensor] = {}
    own = split(tower.state_dict(), tensors)
    shapes = [(key, list(t.shape), str(t.dtype).removeprefix("torch.")) for key, t in tensors.items()]
    state, shapes = broadcast_object(collective, [own, shapes], source=source, purpose="agreements")
    for key, shape, dtype in shapes:
        if collective.rank != source:
            tensors[key] = torch.empty(shape, dtype=getattr(torch, dtype))
        tensors[key] = tensors[key].cpu()
        if tensors[key].numel():
            collective.broadcast(tensors[key], source=source, purpose="agreements")
    if collective.rank in lacking:
        tower.load_state_dict(joined(state, tensors))
