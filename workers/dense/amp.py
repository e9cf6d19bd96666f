"""Which arithmetic the tower's forward and backward use: a choice from the config and the hardware, with its reason."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ENDS = "ends_model"
"""The attribute of a module that names its method which ends a model, a `forward` of nn.Linear or a `product` of two
tensors. In bf16 scores would have 8 binary digits. Autocast leaves float64 as it is, and a context inside of a compiled
function bypasses the compiler's cache."""


@dataclass(frozen=True)
class Precision:
    """The chosen arithmetic.

    `dtype` is autocast's, None = float32 throughout; `scaled` = a GradScaler is needed; `reason` is one line for
    the log and the screen.
    """

    dtype: torch.dtype | None
    scaled: bool
    reason: str


def choose_precision(amp: str, device: torch.device) -> Precision:
    """The arithmetic for `tower.amp` = auto, off, bf16 or fp16 on this device.

    auto is bf16 where the hardware computes in bf16, else off: emulated bf16 was 17 times slower than float32
    on a CPU without it.
    """
    if amp == "off":
        return Precision(None, False, "off: as configured")
    native = _computes_in(amp, device)
    name = _name_of(device)
    if amp == "auto":
        if native:
            return Precision(torch.bfloat16, False, f"bf16: {name} computes in bf16")
        return Precision(None, False, f"off: {name} does not compute in bf16")
    dtype, scaled = (torch.float16, True) if amp == "fp16" else (torch.bfloat16, False)
    if native:
        return Precision(dtype, scaled, f"{amp}: as configured")
    return Precision(dtype, scaled, f"{amp}: as configured, but {name} does not compute in {amp}; off is faster")


def _computes_in(amp: str, device: torch.device) -> bool:
    if device.type == "cuda":
        return amp == "fp16" or torch.cuda.is_bf16_supported(including_emulation=False)
    can = torch.cpu.get_capabilities()
    if amp == "fp16":
        return bool(can.get("avx512_fp16") or can.get("amx_fp16"))
    return bool(can.get("avx512_bf16") or can.get("amx_bf16") or can.get("sve_bf16"))


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"


class MixedPrecision:
    """The chosen arithmetic at work: autocast, and a GradScaler where fp16 needs one."""

    def __init__(self, amp: str, device: torch.device, model: nn.Module | None = None) -> None:
        """`model`: ends in float32, also where its other layers do not; before others change layers."""
        self._device = device
        self.chosen = choose_precision(amp, device)
        for module in model.modules() if model is not None and self.chosen.dtype is not None else ():
            if (name := getattr(module, ENDS, None)) is not None:
                setattr(module, name, _product if name == "product" else partial(_linear, module))
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.chosen.scaled)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """For a forward pass."""
        if self.chosen.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self.chosen.dtype)

    @property
    def scaling(self) -> bool:
        """Whether gradients are those of a scaled loss."""
        return bool(self.scaler.is_enabled())


def _linear(layer: Any, x_BI: torch.Tensor) -> torch.Tensor:
    y_BO = F.linear(x_BI.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    return y_BO.float()


def _product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one.double() @ other.double()).float()
