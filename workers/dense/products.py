"""Products: the matrix products of a dense model, counted once by their shapes. It changes none and times none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shardkeep.workers.timing.clock import PARTS, Part


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
        self._is_counted = False

    @contextlib.contextmanager
    def counted(self, samples: int) -> Iterator[None]:
        """Counts the products inside: forward and backward of `samples` samples, which run eager."""
        with _Counter() as counter:
            yield
        self._is_counted = True
        self.per_sample = counter.flops / samples

    @contextlib.contextmanager
    def added(self, samples: int, *, eager: bool) -> Iterator[None]:
        """Adds the products of a micro-batch, which runs inside. The first eager one is counted."""
        with self.counted(samples) if eager and samples and not self._is_counted else contextlib.nullcontext():
            yield
        self.flops += self.per_sample * samples

    def seconds(self, by_part: Mapping[Any, float]) -> float:
        """The time of the parts in which they are made."""
        return sum(by_part[part] for part in self.parts)


class _Counter(TorchDispatchMode):
    """Sees each operator below autograd and autocast, and calls it as it was called.

    Attributes:
        flops: Of all products so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = operator(*args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        strided = all(tensor.layout is torch.strided for tensor in tensors)  # else shapes do not tell the work
        if strided and (count := _count_of(operator)) is not None:
            with contextlib.suppress(Exception):  # a product of a user's model is made, although it cannot be counted
                self.flops += count(*args, **kwargs, out_val=found)
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
