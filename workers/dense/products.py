"""Products: the matrix products of a dense model, counted once by their shapes, and how fast the machine makes them
alone. It changes no product, and times none in training."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from shardkeep.workers.timing.clock import PARTS, Part

MOST_PASSES = 16
"""The products alone are made so often, at most."""


class Products:
    """Floating-point operations of the matrix products of one rank's training.

    Attributes:
        flops: So far: samples times `per_sample`.
        per_sample: Of forward and backward; 0 = not counted yet, or there are none.
        parts: The parts of a step whose seconds the device needs for them. A GPU computes behind all of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.flops, self.per_sample = 0.0, 0.0
        self.parts: Sequence[Part] = PARTS if device.type == "cuda" else ("forward", "backward")
        self._device = device
        self._counter: _Counter | None = None

    @contextlib.contextmanager
    def counted(self, samples: int) -> Iterator[None]:
        """Counts the products inside: forward and backward of `samples` samples, which run eager."""
        with _Counter() as counter:
            yield
        self._counter = counter
        self.per_sample = sum(flops for *_, flops in counter.calls) / samples

    @contextlib.contextmanager
    def added(self, samples: int, *, eager: bool) -> Iterator[None]:
        """Adds the products of a micro-batch, which runs inside. The first eager one is counted."""
        with self.counted(samples) if eager and samples and self._counter is None else contextlib.nullcontext():
            yield
        self.flops += self.per_sample * samples

    def seconds(self, by_part: Mapping[Any, float]) -> float:
        """The time of the parts in which they are made."""
        return sum(by_part[part] for part in self.parts)

    def flops_per_s_alone(self, limit_s: float = 0.2) -> float | None:
        """The rate of the same products, one after the other with nothing between them. Takes about `limit_s`, and at
        least one product. None = none were counted, or one cannot be made of ones."""
        ones = functools.cache(_Operand.ones)  # shared, or they would take more memory than training
        calls = [] if self._counter is None else self._counter.calls
        with torch.no_grad(), contextlib.suppress(RuntimeError):
            ready = [(product, *tree_map_only(_Operand, ones, operands), flops) for product, operands, flops in calls]
            began, made = time.perf_counter(), 0
            for product, args, kwargs, flops in ready * MOST_PASSES:
                product(*args, **kwargs)
                made += flops
                if time.perf_counter() - began > limit_s:
                    break
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            return made / (time.perf_counter() - began) if made else None
        return None


@dataclass(frozen=True, slots=True)
class _Operand:
    """What a tensor was like."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: torch.Tensor) -> _Operand:
        """Raises TypeError for a sparse tensor, of which shapes do not tell the work."""
        if tensor.layout is not torch.strided:
            raise TypeError(str(tensor.layout))
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def ones(self) -> torch.Tensor:
        """A tensor like it, full of ones: zeros and numbers that are not normal may be faster or slower."""
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return torch.ones(last + 1, dtype=self.dtype, device=self.device).as_strided(self.size, self.stride)


class _Counter(TorchDispatchMode):
    """Sees each operator below autograd and autocast, and calls it as it was called.

    Attributes:
        calls: Each product, its arguments with `_Operand` in the place of tensors, and its FLOPs.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Callable[..., Any], Any, int]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = operator(*args, **kwargs)
        if (count := _count_of(operator)) is not None:
            with contextlib.suppress(Exception):  # a product of a user's model is made, although it cannot be counted
                operands = tree_map_only(torch.Tensor, _Operand.like, (args, kwargs))
                self.calls.append((operator, operands, count(*args, **kwargs, out_val=found)))
        return found

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Yes: a part of the model that a user compiles stays compiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: what tells torch.compile to leave this alone imports all of it, 3 CPU seconds and 83 MB."""
        return False


def _count_of(operator: Any) -> Callable[..., int] | None:
    """What counts the FLOPs of an operator; None = it is no product."""
    packet = getattr(operator, "_overloadpacket", None)
    if packet is getattr(torch.ops.mkldnn, "_linear_pointwise", ""):  # torch's list lacks it
        return lambda left, right_OI, *_, out_val: 2 * out_val.numel() * right_OI.shape[1]
    return flop_registry.get(packet)
