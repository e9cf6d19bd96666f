"""LossSum: the loss of one step. It stays on the tower's device until the host can have it without a wait."""

from __future__ import annotations

import torch


class LossSum:
    """The sum of the losses of a rank's micro-batches, in float64, which a Python sum of them equals bit for bit.

    `float(...)` is the mean loss of the rank's samples, 0 where it has none; blocks until `ready`.

    Args:
        rank_samples: Samples of this rank.
        step_samples: Samples of all ranks, by which each loss is divided.
    """

    def __init__(self, device: torch.device, rank_samples: int, step_samples: int) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._samples = rank_samples, step_samples
        self._copied: torch.cuda.Event | None = None

    def add(self, loss: torch.Tensor) -> None:
        """Adds the loss of a micro-batch, a scalar without a graph."""
        self._sum += loss

    def send(self) -> None:
        """Starts the copy to the host, behind what the device still has to do. No loss is added afterwards."""
        if self._sum.is_cuda:
            pinned = torch.empty_like(self._sum, device="cpu", pin_memory=True)
            self._sum = pinned.copy_(self._sum, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    @property
    def ready(self) -> bool:
        """Whether the host has it; on a CPU always."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def __float__(self) -> float:
        if self._copied is not None:
            self._copied.synchronize()
        rank_samples, step_samples = self._samples
        return float(self._sum) * step_samples / rank_samples if rank_samples else 0.0
