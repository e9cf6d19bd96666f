#!/usr/bin/env python3
"""Would int8 or padded widths make a dense model faster on this machine? CPU of one thread, matrix products alone.

int8 is worth its cost in AUC where it beats bf16 by 1.3, at 1, 16 and 64 rows (weights packed at loading, inputs
rounded by row or batch: `quantized::linear_dynamic`). A width is worth padding to a multiple of 8, 16 or 32 where the
product, forward and backward, takes less time by more than the added columns cost.
"""

# B = rows, I = inputs, O = outputs

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import nn

WIDTHS = [479, 1024, 512, 256, 1]
"""Of the scored model: the DLRM tower of W1 at D = 64, wider."""
ROWS = (1, 16, 64)
INT8_TARGET = 1.3
PADDED = {"fp32": (367, 368, 384), "bf16": (367, 368, 384)}
TRAINED_ROWS, OUTPUTS = 2048, 512


def scored(form: str, rows: int) -> Callable[[], object]:
    torch.manual_seed(1)
    layers = [nn.Linear(i, o) for i, o in itertools.pairwise(WIDTHS)]
    x_BI = torch.randn(rows, WIDTHS[0])
    if form == "int8":
        scales = [layer.weight.detach().abs().max() / 127 for layer in layers]
        packed = [
            torch.ops.quantized.linear_prepack(
                torch.quantize_per_tensor(layer.weight.detach(), float(scale), 0, torch.qint8), layer.bias.detach()
            )
            for layer, scale in zip(layers, scales, strict=True)
        ]
        return lambda: through(x_BI, [partial(_int8, weights) for weights in packed])
    dtype = torch.bfloat16 if form == "bf16" else torch.float32
    whole = [layer.to(dtype) for layer in layers]
    return lambda: through(x_BI.to(dtype), list(whole))


def _int8(packed: Any, x_BI: torch.Tensor) -> torch.Tensor:
    y_BO: torch.Tensor = torch.ops.quantized.linear_dynamic(x_BI, packed, reduce_range=True)
    return y_BO


def through(x_BI: torch.Tensor, layers: list[Callable[[torch.Tensor], torch.Tensor]]) -> torch.Tensor:
    with torch.inference_mode():
        for layer in layers[:-1]:
            x_BI = layer(x_BI).relu_()
        return layers[-1](x_BI).float()


def trained(form: str, width: int) -> Callable[[], object]:
    torch.manual_seed(1)
    dtype = torch.bfloat16 if form == "bf16" else torch.float32
    x_BI = torch.randn(TRAINED_ROWS, width, dtype=dtype, requires_grad=True)
    weight_OI = torch.randn(OUTPUTS, width, dtype=dtype, requires_grad=True)
    grad_BO = torch.randn(TRAINED_ROWS, OUTPUTS, dtype=dtype)
    return lambda: torch.autograd.grad(F.linear(x_BI, weight_OI), [x_BI, weight_OI], grad_BO)


def contestant(make: Callable[[], Callable[[], object]], seconds: float) -> harness.Figures:
    """Microseconds of CPU a call."""
    call = make()
    for _ in range(3):
        call()
    calls, began, until = 0, time.process_time(), time.monotonic() + seconds
    while time.monotonic() < until:
        call()
        calls += 1
    return {"cpu_us": (time.process_time() - began) / calls * 1e6}


def main() -> None:
    options = harness.parse(harness.arguments(__doc__ or ""))
    torch.set_num_threads(1)
    results: dict[str, Any] = {"scored": {}, "padded": {}}
    for rows in ROWS:
        forms = {
            f"{form}, {rows} rows": partial(contestant, partial(scored, form, rows))
            for form in ("fp32", "bf16", "int8")
        }
        found = harness.alternate(forms, rounds=options.rounds, seconds=options.seconds)
        results["scored"][str(rows)] = {"rounds": found}
        for form in ("fp32", "bf16"):
            gain = harness.ratios(found, f"{form}, {rows} rows", f"int8, {rows} rows", "cpu_us")
            harness.show_ratio(f"int8, times as fast as {form} at {rows} rows", gain, INT8_TARGET)
            results["scored"][str(rows)][f"{form} / int8"] = gain
    for form, widths in PADDED.items():
        forms = {f"{form}, width {width}": partial(contestant, partial(trained, form, width)) for width in widths}
        found = harness.alternate(forms, rounds=options.rounds, seconds=options.seconds)
        results["padded"][form] = {"rounds": found}
        for width in widths[1:]:
            gain = harness.ratios(found, f"{form}, width {widths[0]}", f"{form}, width {width}", "cpu_us")
            harness.show_ratio(f"{form}: width {widths[0]} beside {width}, time", gain)
            results["padded"][form][f"{widths[0]} / {width}"] = gain
    harness.write(options.json, "products", results)


if __name__ == "__main__":
    main()
