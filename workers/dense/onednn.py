"""Linear layers by oneDNN: float32 matrix products on CPUs whose wide vectors torch's own library leaves unused.

torch multiplies float32 matrices by MKL, which takes AVX-512 on Intel's CPUs alone. oneDNN, which torch carries too,
takes it wherever it is there: 2.1 to 2.4 times as fast on an AMD Zen 5.
"""

# B = batch, I = inputs, O = outputs

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from shardkeep.base.errors import UserError


def choose(wish: str, model: nn.Module, device: torch.device, *, amp: bool) -> str | None:
    """Whose products a model's linear layers take for `tower.linear` = auto, torch or onednn, and why, one line; None =
    torch's, as everybody expects. `amp`: autocast is on. Raises UserError where oneDNN is requested and not there."""
    lacking = why_not(device)
    if wish == "onednn" and lacking:
        raise UserError(f"tower.linear: onednn is not possible here: {lacking}; allowed: auto or torch")
    if wish == "auto" and (lacking or amp or not helps()):
        return None
    if wish == "torch":
        return "torch: as configured"
    if not use_for(model):
        return "torch: the model has no nn.Linear"
    if wish == "auto":
        return "onednn: MKL leaves AVX-512 unused here"
    return f"onednn: as configured{', but unused: amp is on' if amp else ''}"


@functools.cache
def why_not(device: torch.device) -> str | None:
    """What stands against oneDNN's float32 products on this device, as one clause; None when they can be made."""
    if device.type != "cpu":
        return f"the tower is on {device.type}"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch was built without oneDNN"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return f"torch {torch.__version__} has no operator for it"
    return None


@functools.cache
def helps() -> bool:
    """Whether this CPU has AVX-512 and MKL does not take it. By its names alone, so that equal machines agree."""
    uses_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return uses_mkl and torch.backends.cpu.get_cpu_capability() == "AVX512" and cpu_vendor() == "AuthenticAMD"


def cpu_vendor() -> str:
    """The vendor that Linux names, such as AuthenticAMD; empty where it names none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def use_for(model: nn.Module) -> int:
    """Has every `nn.Linear` of a model multiply by oneDNN, in float32 and outside of torch.compile; their number.

    Layers of another class, or with a `forward` of their own, stay as they are."""
    layers = _plain_layers(model)
    for layer in layers:
        layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]
    return len(layers)


def _plain_layers(model: nn.Module) -> list[nn.Linear]:
    return [layer for layer, product in layers_of(model) if product is F.linear]


def layers_of(model: nn.Module) -> Iterator[tuple[nn.Linear, Callable[..., torch.Tensor]]]:
    """Each layer that is an `nn.Linear` itself, also in the class that FSDP makes of it, and its product: `F.linear` or
    `linear`. Layers that have a `forward` of their own are left out."""
    for layer in model.modules():
        kind, own = type(layer), vars(layer).get("forward")
        ours = isinstance(own, functools.partial) and own.func is _forward
        plain = kind is nn.Linear or (kind.__name__, kind.__bases__[-1]) == ("FSDPLinear", nn.Linear)
        if plain and (own is None or ours):
            yield cast(nn.Linear, layer), linear if ours else F.linear


@contextlib.contextmanager
def rows_alone(model: nn.Module) -> Iterator[None]:
    """Inside, every `nn.Linear` on the CPU multiplies by oneDNN, in float32.

    A row of oneDNN's product has the same bits at every place of a batch of two rows or more. With MKL, outputs of a
    width that is not a multiple of 16 depend on the row's place."""
    layers = _plain_layers(model)
    for layer in layers:
        layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _forward(layer: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    return linear(inputs, layer.weight, layer.bias)


def linear(inputs: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`, by oneDNN where it can."""
    if _is_transformed() or not _takes(inputs, weight_OI):
        return F.linear(inputs, weight_OI, bias_O)
    outputs: torch.Tensor = _Linear.apply(inputs, weight_OI, bias_O)  # type: ignore[no-untyped-call]
    return outputs


def _is_transformed() -> bool:
    """Whether something else than eager reverse mode in float32 runs the layer: it knows what to do with F.linear."""
    return (
        torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cpu")
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
    )


def _takes(inputs: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    plain = inputs.dtype is weight_OI.dtype is torch.float32 and inputs.device.type == weight_OI.device.type == "cpu"
    fits = inputs.ndim >= 2 and inputs.numel() > 0 and inputs.shape[-1] == weight_OI.shape[1]
    return plain and fits and why_not(inputs.device) is None


class _Linear(torch.autograd.Function):
    """`F.linear` with its three products by oneDNN; what differentiates its gradient again has torch's."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight_OI)
        return multiply(inputs, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        inputs, weight_OI = ctx.saved_tensors
        grad_BO, inputs_BI = grad.reshape(-1, grad.shape[-1]), inputs.reshape(-1, inputs.shape[-1])
        wants_inputs, wants_weight, wants_bias = ctx.needs_input_grad
        product = F.linear if torch.is_grad_enabled() else multiply
        return (
            product(grad_BO, weight_OI.t()).view(inputs.shape) if wants_inputs else None,
            product(grad_BO.t(), inputs_BI.t()) if wants_weight else None,
            grad_BO.sum(0) if wants_bias else None,
        )


def use_for_inference(model: nn.Module) -> None:
    """Has every `nn.Linear` of a model multiply by oneDNN for good, without gradients; the bits are those inside
    `rows_alone`."""
    for layer, _ in layers_of(model):
        layer.forward = functools.partial(_forward_without_gradients, layer)  # type: ignore[method-assign]


def _forward_without_gradients(layer: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() or _is_transformed() or not _takes(inputs, layer.weight):
        return _forward(layer, inputs)
    return multiply(inputs, layer.weight, layer.bias)


def multiply(left: torch.Tensor, right_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """left @ right.T + bias, by the operator that torch.compile puts in the place of linear layers
    (torch/_inductor/mkldnn_ir.py)."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, right_OI, bias_O, "none", [], "")
    return product
