"""Linear layers by oneDNN: float32 matrix products on CPUs whose wide vectors torch's own library leaves unused.

torch multiplies float32 matrices by MKL, which takes AVX-512 on Intel's CPUs alone. oneDNN, which torch carries too,
takes it wherever it is there: 2.1 to 2.4 times as fast on an AMD Zen 5.
"""

# B = batch, I = inputs, O = outputs

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

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
    return [each for each in model.modules() if _is_linear(each) and "forward" not in vars(each)]


def _is_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer is an `nn.Linear` itself, also in the class that FSDP makes of it."""
    kind = type(layer)
    return kind is nn.Linear or (kind.__name__, kind.__bases__[-1]) == ("FSDPLinear", nn.Linear)


@contextlib.contextmanager
def rows_alone(model: nn.Module) -> Iterator[None]:
    """Inside, every `nn.Linear` on the CPU multiplies by oneDNN, in float32.

    A row of oneDNN's product has the same bits at every place of a batch of two rows or more. With MKL, outputs of a
    width that is not a multiple of 16 depend on the row's place."""
    layers = _plain_layers(model)
    if not layers or why_not(layers[0].weight.device):
        layers = []
    for layer in layers:
        layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _forward(layer: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    if _is_transformed() or not _takes(inputs, layer.weight):
        return F.linear(inputs, layer.weight, layer.bias)
    outputs: torch.Tensor = _Linear.apply(inputs, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
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
    return plain and inputs.ndim >= 2 and inputs.numel() > 0 and inputs.shape[-1] == weight_OI.shape[1]


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


def use_for_inference(model: nn.Module, device: torch.device) -> None:
    """Has every `nn.Linear` of a model multiply by oneDNN for good, without gradients; the bits are those inside
    `rows_alone`. Does nothing where oneDNN cannot."""
    if why_not(device):
        return
    for layer in model.modules():
        forward = vars(layer).get("forward")
        ours = isinstance(forward, functools.partial) and forward.func is _forward
        if type(layer) is nn.Linear and (forward is None or ours):
            layer.forward = functools.partial(_forward_without_gradients, layer)  # type: ignore[method-assign]


def _forward_without_gradients(layer: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() or _is_transformed() or torch.is_autocast_enabled("cpu"):
        return _forward(layer, inputs)
    if not _takes(inputs, layer.weight):
        return F.linear(inputs, layer.weight, layer.bias)
    return multiply(inputs, layer.weight, layer.bias)


def multiply(left: torch.Tensor, right_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """left @ right.T + bias, by the operator that torch.compile puts in the place of linear layers
    (torch/_inductor/mkldnn_ir.py)."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, right_OI, bias_O, "none", [], "")
    return product
