"""The dense tower of one worker: model, optimizer, schedule, DDP, compile and mixed precision behind two calls a step.

It knows no rows and no servers: embeddings come in as leaves of autograd and leave with their gradients.
"""

# B = batch, I = dense columns, T = outputs (1)

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardkeep.base.errors import UserError
from shardkeep.compression.config import TowerCompressionConfig
from shardkeep.compression.tower.compressor import DenseCompression
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.config import TowerConfig
from shardkeep.workers.dense.amp import choose_precision
from shardkeep.workers.dense.compile import Compilation, Switch
from shardkeep.workers.dense.cpu import onednn
from shardkeep.workers.dense.gradients import BucketSums, sum_flat, wrap_in_ddp
from shardkeep.workers.dense.optimizer import build_optimizer
from shardkeep.workers.dense.state import ModelState
from shardkeep.workers.dense.state_tree import joined, split
from shardkeep.workers.timing.clock import Stopwatch

log = logging.getLogger(__name__)
_NORMS = 16
"""Steps whose mean gradient is what `unsent` is compared with: one alone may be an unusual one."""


@dataclass(frozen=True)
class Update:
    """What one `Tower.update` did.

    `applied`: the dense step was made. `row_scale`: factor that brings this step's row gradients to their true
    size. `grad_norm`: norm of the summed dense gradient before clipping; not finite when the step was skipped.
    """

    applied: bool
    row_scale: float
    grad_norm: float


class Tower:
    """Trains the dense model; every rank makes the same calls, one `update` per step.

    Args:
        model: `forward(dense_BI, embeddings) -> logits_BT`; moved to `device` and from then on owned by the tower.
        collective: the ranks of this generation; rank 0's parameters are sent to the others here (blocks).
        sync: add gradients in rank order, and let nothing depend on timing.
        compression: of the gradients between ranks; None = none.
        clip_norm: largest norm of the summed gradient, None = no clipping.
        batch_size: samples of a full micro-batch; only those are compiled.
        seed: of dropout; the random numbers of a micro-batch depend on (seed, step, rank, micro-batch) only.

    Attributes:
        chosen: what `compile` and `amp` came to and why, one line each.
        watch: told what runs: forward, backward, dense_reduce, optimizer; compiling is not counted.

    Raises:
        UserError: `compile: on` where torch.compile cannot run, `linear: onednn` where oneDNN cannot.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        config: TowerConfig,
        collective: Collective,
        device: torch.device,
        sync: bool,
        compression: TowerCompressionConfig | None = None,
        clip_norm: float | None = None,
        batch_size: int,
        seed: int = 0,
        watch: Stopwatch | None = None,
    ) -> None:
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32
        self.model = model.to(device)
        self.device = device
        self.chosen: dict[str, str] = {}
        self._config = config
        self._sync = sync
        self._clip_norm = clip_norm
        self._seed = seed
        self.watch = watch if watch is not None else Stopwatch()
        self._model_state = ModelState(self.model)
        self._named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._parameters = list(self._named.values())
        self._optimizer = build_optimizer(config.optimizer, self._parameters)
        shapes = {name: tuple(p.shape) for name, p in self._named.items()}
        wish = compression or TowerCompressionConfig()
        self._ring = wish.name == "none" and not sync
        self._compression = DenseCompression(wish, shapes, device)
        self._grad_norms: deque[float] = deque(maxlen=_NORMS)
        self._step = 0
        self._micro = 0
        self._choose_precision()
        self._choose_linear()
        self._switch = Switch(self.model, batch_size)
        self._compilation = Compilation(
            self._switch, config, device, sync=sync, context=self._autocast, say=partial(self._say, "compile")
        )
        self._ddp: DistributedDataParallel | None = None
        self.join(collective)
        self.broadcast()

    def _choose_precision(self) -> None:
        self._precision = choose_precision(self._config.amp, self.device)
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self._precision.scaled)
        self._say("amp", self._precision.reason)

    def _choose_linear(self) -> None:
        chosen = onednn.choose(self._config.linear, self.model, self.device, amp=self._precision.dtype is not None)
        if chosen is not None:
            self._say("linear", chosen)

    @property
    def compiles(self) -> bool:
        """Whether this generation's first batch waits until every rank has compiled."""
        return self._compilation.due

    @property
    def compile_s(self) -> float:
        """Seconds this rank has spent compiling."""
        return self._compilation.compile_s

    def _say(self, what: str, reason: str) -> None:
        self.chosen[what] = reason
        log.info("tower %s=%r", what, reason)

    def join(self, collective: Collective) -> None:
        """Takes the ranks of another generation. Sends nothing: see `share`."""
        self.leave()
        self.collective = collective
        self._compilation.regroup()
        self._micro = 0

    def broadcast(self) -> None:
        """Sends rank 0's parameters and buffers to the other ranks. Every rank calls it, after `join`; blocks."""
        if self.collective.world_size > 1:
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                self.collective.broadcast(tensor.detach(), purpose="agreements")

    def share(self, source: int, lacking: Sequence[int]) -> None:
        """Gives the state of rank `source` to the ranks that lack it. Every rank calls it, after `join`; blocks."""
        if lacking:
            tensors: dict[str, torch.Tensor] = {}
            mine = split(self.state_dict(), tensors)
            shapes = [(key, list(t.shape), str(t.dtype).removeprefix("torch.")) for key, t in tensors.items()]
            state, shapes = self.collective.broadcast_object([mine, shapes], source=source, purpose="agreements")
            lacks = self.collective.rank in lacking
            for key, shape, dtype in shapes:
                if self.collective.rank != source:
                    tensors[key] = torch.empty(shape, dtype=getattr(torch, dtype))
                tensors[key] = tensors[key].cpu()
                if tensors[key].numel():
                    self.collective.broadcast(tensors[key], source=source, purpose="agreements")
            if lacks:
                self.load_state_dict(joined(state, tensors))

    @property
    def step(self) -> int:
        """The step that the state is at the start of."""
        return self._step

    def leave(self) -> None:
        """Lets go of the generation's process group; a collective that closes calls it."""
        had_ddp = self._ddp is not None
        self._ddp = None
        self._reduced = False
        self._compression.settle(applied=False)
        self._forget_gradients()
        if had_ddp:
            gc.collect()  # DDP is part of a reference cycle, and holds the group

    @property
    def unsent(self) -> dict[str, float]:
        """What compression has left of this rank's gradients, as a norm, and the mean norm of the last steps' summed
        gradients, 0 = this process made no step; {} = nothing is ever left for later."""
        norm = self._compression.unsent_norm
        if norm is None:
            return {}
        return {"norm": norm, "step_norm": sum(self._grad_norms) / max(1, len(self._grad_norms))}

    @property
    def scaling(self) -> bool:
        """Whether a GradScaler is on: then an update that was not applied drops the step's rows too."""
        return bool(self._scaler.is_enabled())

    def backward(
        self,
        dense_BI: torch.Tensor,
        embeddings: dict[str, torch.Tensor],
        label_BT: torch.Tensor,
        weight: float,
        *,
        last: bool = True,
    ) -> torch.Tensor:
        """Loss and gradients of one micro-batch; the embeddings' gradients are left in their `.grad`.

        Args:
            embeddings: feature -> (B, D) leaves with requires_grad. Their gradients are scaled where a
                GradScaler is on: multiply by `Update.row_scale`.
            weight: of each sample's loss: 1 / samples of the step over all ranks, 0 for a stand-in batch.
            last: the step's last micro-batch; gradients are summed over ranks with it (may block).

        Returns:
            The sum of the weighted losses of this micro-batch, float32, without a graph.
        """
        if self._compilation.due:
            with self.watch.within(None):
                dims = {name: leaf.shape[1] for name, leaf in embeddings.items()}
                self._compilation.run(self.collective, dense_BI.shape[1], dims)
        loss = self._backward(dense_BI, embeddings, label_BT, weight, last)
        self._micro += 1
        if not last:
            self._keep_gradients()
        return loss

    def _backward(
        self,
        dense_BI: torch.Tensor,
        embeddings: dict[str, torch.Tensor],
        label_BT: torch.Tensor,
        weight: float,
        last: bool,
    ) -> torch.Tensor:
        run: nn.Module = self._switch if self._ddp is None else self._ddp
        accumulating = self._ddp.no_sync() if self._ddp is not None and not last else contextlib.nullcontext()
        self._reduced = last and self._ddp is not None
        if last:
            self._compression.begin(self._step, self._scaler.get_scale())
        # DDP talks to the other ranks in the forward pass, too: once, when it rebuilds its buckets.
        with self.collective.guard("the sum of the dense gradients"), self._seeded(), accumulating:
            self.watch.enter("forward")
            with self._autocast():
                logits_BT = run(dense_BI, embeddings)
            if logits_BT.shape != label_BT.shape:  # of a user's own model
                wanted = tuple(label_BT.shape)
                raise UserError(f"model.name: forward returned logits {tuple(logits_BT.shape)}; expected {wanted}")
            loss = F.binary_cross_entropy_with_logits(logits_BT.float(), label_BT, reduction="sum") * weight
            self.watch.enter("backward")
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def update(self, step: int, rows_finite: bool = True) -> Update:
        """Ends step `step` (counted from 0): sums over ranks, unscales, clips, and steps the optimizer. Blocks.

        The dense update is skipped where the summed gradient is not finite. With a GradScaler an overflow
        anywhere, also in the rows of another rank (`rows_finite` = False there), skips it on all ranks, and
        the caller drops the rows of the step when `applied` is False.
        """
        self.watch.enter("dense_reduce")
        self._sum_over_ranks()
        row_scale = 1.0
        if self._scaler.is_enabled():
            row_scale = 1.0 / self._scaler.get_scale()
            self._spread_overflow(rows_finite)
        self.watch.enter("optimizer")
        if self._scaler.is_enabled():
            self._scaler.unscale_(self._optimizer)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        grad_norm = float(norm)
        applied = math.isfinite(grad_norm)
        if applied:
            self._clip_and_step(step, norm)
            self._grad_norms.append(grad_norm)
        self._compression.settle(applied)
        if self._scaler.is_enabled():
            self._scaler.update()
        self._forget_gradients()
        self._step, self._micro = step + 1, 0
        return Update(applied, row_scale, grad_norm)

    def _sum_over_ranks(self) -> None:
        if self.collective.world_size == 1:
            return
        if not self._reduced:
            everywhere = sum_flat(self._named, self.collective, self._compression)
            if self._ddp is None and self.collective.process_group is not None:
                # The first step goes without DDP and shows which parameters the model leaves out.
                names: dict[torch.Tensor, str] = {p: name for name, p in self._named.items()}
                sums = BucketSums(self.collective, self._compression, names, ring=self._ring, watch=self.watch)
                self._ddp = wrap_in_ddp(self._switch, sums, find_unused=not everywhere)
                self.collective.before_close(self.leave)
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                self.collective.broadcast(buffer, purpose="buffers")

    def _spread_overflow(self, rows_finite: bool) -> None:
        """One rank's overflow in its rows becomes everybody's: an infinite gradient, which the scaler sees."""
        bad = torch.tensor([0.0 if rows_finite else 1.0])
        self.collective.all_reduce_sum(bad, purpose="gradients")
        if bad.item():
            next(p.grad for p in self._parameters if p.grad is not None).fill_(math.inf)

    def _clip_and_step(self, step: int, norm: torch.Tensor) -> None:
        if self._clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clip_norm, norm)
        rate = self._config.optimizer.lr * self._config.optimizer.schedule.factor(step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def _keep_gradients(self) -> None:
        """With CUDA graphs the next micro-batch overwrites the memory these gradients lie in."""
        if self._switch.enabled and self.device.type == "cuda" and self._config.mode != "default":
            for p in self._parameters:
                p.grad = None if p.grad is None else p.grad.clone()

    def _forget_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def predict(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, T) in float32 without gradients; dropout off; always eager."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode(), self._autocast():
                logits_BT: torch.Tensor = self.model(dense_BI, embeddings)
                return logits_BT.float()
        finally:
            self.model.train(was_training)

    # Contexts.

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._precision.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._precision.dtype)

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        """Random numbers of this micro-batch; the process's own generator is left as it was."""
        place = struct.pack("<4q", self._seed, self._step, self.collective.rank, self._micro)
        key = xxhash.xxh3_64_intdigest(place) >> 1
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.default_generator.manual_seed(key)
            if self.device.type == "cuda":
                torch.cuda.manual_seed(key)
            yield

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Parameters, buffers, optimizer, scaler and the next step: what is the same on all ranks; tensors are the
        live ones."""
        return {
            "model": self._model_state.get(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "compression": self._compression.state_dict(),
            "step": self._step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state of another tower of the same model and config; it is copied. What belonged to this rank only
        is gone; see `load_local_state_dict`."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch keeps the tensors it is given
        self._scaler.load_state_dict(state["scaler"])
        self._compression.load_state_dict(state.get("compression", {}))  # checkpoints without compression lack it
        self._step, self._micro = state["step"], 0

    def local_state_dict(self) -> dict[str, Any]:
        """What belongs to this rank only: the gradient that compression has not sent yet. Live tensors; {} = nothing.
        `merge_local` in compression/tower/compressor.py makes one state of several ranks'."""
        return self._compression.local_state_dict()

    def load_local_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a copy of this rank's state, or of several ranks' merged; {} = nothing is owed. Raises ValueError when
        it does not fit."""
        self._compression.load_local_state_dict(state)

    def digest_bytes(self) -> bytes:
        """Name and bytes of every parameter, buffer and optimizer value, in the order of the names; a copy."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for parameter, slots in self._optimizer.state.items():
            for key, value in slots.items():
                tensors[f"{names[id(parameter)]}/{key}"] = torch.as_tensor(value)
        return b"".join(name.encode() + _bytes_of(tensors[name]) for name in sorted(tensors))


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
