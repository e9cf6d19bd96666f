"""What padded widths of the dense model (`tower.pad_widths`) gain on this machine: its linear layers, timed alone."""

# B = rows, I = inputs, O = outputs

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardkeep.config import JobConfig
from shardkeep.core_plan import worker_threads
from shardkeep.workers.dense import onednn, padding
from shardkeep.workers.dense.amp import MixedPrecision

MULTIPLES = (8, 16, 32, 64)
MIN_GAIN, LIMIT_S, LEAST_ROUNDS = 1.03, 1.0, 3
LEAST, MOST = 1 << 24, 1 << 29
"""Multiplications of a layer's product: with fewer it is left out, with more it is timed with fewer rows."""


def timed(layer: nn.Linear, batch_size: int, precision: MixedPrecision) -> float:
    """Seconds of forward and backward of a layer; on a CPU those of this process, whatever else the CPU does."""
    rows, device = min(batch_size, max(64, MOST // layer.weight.numel())), layer.weight.device
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    x_BI = torch.randn(rows, layer.in_features, device=device, requires_grad=True)
    began = clock()
    with precision.autocast():
        y_BO = layer(x_BI)
    torch.autograd.grad(y_BO, [x_BI, *layer.parameters()], torch.ones_like(y_BO))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - began


def padding_gain(config: JobConfig, model: nn.Module, seconds_of: Callable[..., float] = timed) -> dict[str, Any]:
    """The `multiple` with which a model's linear layers are fastest, and the `gain`: how many times as fast as without.
    {} = less than 3 %, or the job's device or library is not here. Takes about a second; blocks. `seconds_of`: as
    `timed`."""
    tower, batch_size, threads = config.tower, config.train.batch_size, torch.get_num_threads()
    device = torch.device("cuda" if torch.cuda.is_available() and tower.device != "cpu" else "cpu")
    lacks = tower.device not in ("auto", device.type) or (tower.linear == "onednn" and onednn.why_not(device))
    layers = [layer for layer, _ in onednn.layers_of(model) if layer.weight.numel() * batch_size >= LEAST]
    if lacks or not layers:
        return {}
    counts = Counter((layer.in_features, layer.out_features) for layer in layers)
    precision, forms = MixedPrecision(tower.amp, device), {}
    for multiple in (*reversed(MULTIPLES), 1):  # the smallest one of a form is kept
        twins = [nn.Linear(*shape, device=device) for shape in counts]
        onednn.choose(tower.linear, nn.ModuleList(twins), device, amp=precision.chosen.dtype is not None)
        padding.use_for(nn.ModuleList(twins), multiple)
        forms[tuple(padding.lacking(twin, multiple) for twin in twins)] = multiple, twins
    best = dict.fromkeys((multiple for multiple, _ in forms.values()), math.inf)
    rounds, end = 0, time.monotonic() + LIMIT_S
    torch.set_num_threads(worker_threads(config))
    while rounds < LEAST_ROUNDS or time.monotonic() < end:
        for multiple, twins in forms.values():
            each = zip(twins, counts.values(), strict=True)
            seconds = sum(count * seconds_of(twin, batch_size, precision) for twin, count in each)
            best[multiple] = min(best[multiple], seconds)
        rounds += 1
    torch.set_num_threads(threads)
    fastest = min(best, key=best.__getitem__)
    gain = best[1] / best[fastest]
    return {"multiple": fastest, "gain": gain} if gain >= MIN_GAIN else {}
