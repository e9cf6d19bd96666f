"""Transfers: between the host and a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[np.float32 | np.int32], device: torch.device) -> torch.Tensor:
    """A copy of the array on the device."""
    writeable = array if array.flags.writeable else array.copy()  # torch warns about read-only arrays
    return torch.from_numpy(writeable).to(device, copy=True)


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of float32 tensors of one device on the host, C-contiguous, by one transfer. Blocks."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    host = torch.empty_like(flat, device="cpu", pin_memory=flat.is_cuda).copy_(flat)
    parts = torch.split(host, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
