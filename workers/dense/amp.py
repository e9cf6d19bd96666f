"""Which arithmetic the tower's forward and backward use: a choice from the config and the hardware, with its reason."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

ENDS = "ends_model"
"""The attribute of a module that names its method which ends a model. In bf16 scores had 8 binary digits."""


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
                setattr(module, name, partial(_in_float32, getattr(type(module), name), module))
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


def _in_float32(method: Callable[..., Any], module: nn.Module, first: torch.Tensor, *others: Any) -> Any:
    """A method of a module outside of autocast, on inputs of float32 or more."""
    with torch.autocast(first.device.type, enabled=False):
        return method(module, *map(_widened, (first, *others)))


def _widened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _widened(each) for name, each in value.items()}
    return value.to(torch.promote_types(value.dtype, torch.float32)) if isinstance(value, torch.Tensor) else value
