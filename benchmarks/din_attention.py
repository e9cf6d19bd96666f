#!/usr/bin/env python3
"""What does DIN's attention cost, forward and backward, beside the form of the paper? CPU an entry, one thread.

The textbook form pads histories and puts [q, k, q - k, q * k] side by side for one linear layer. shardkeep's encoder
takes the entries alone and multiplies the target once a sample.
"""

# B = samples, L = longest history, E = width of an entry, H = hidden width, N = entries

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import harness
import torch
from torch import nn

from shardkeep.workers.embeddings.sequence import Sequence, SequenceShape
from shardkeep.workers.encoder_config import DinEncoderConfig
from shardkeep.workers.models.encoders.din import DinEncoder
from shardkeep.workers.models.layers.hidden import HiddenOptions, Mlp

SAMPLES, LONGEST, WIDTH, HIDDEN = 256, 50, 64, 64
TARGET = 0.7
ACTIVATIONS = ("relu", "dice")
HISTORIES = {"full": LONGEST, "1 to 50": 1}
"""The shortest history; the longest has 50 entries."""


class Textbook(nn.Module):
    """The same attention over padded histories, by one linear layer over four parts."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        options = HiddenOptions(activation=activation)
        self.hidden = Mlp(4 * WIDTH, [HIDDEN], options)
        self.weight = options.linear(HIDDEN, 1)

    def forward(self, entries_BLE: torch.Tensor, target_BE: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
        """(B, E)."""
        target_BLE = target_BE[:, None].expand_as(entries_BLE)
        parts = [target_BLE, entries_BLE, target_BLE - entries_BLE, target_BLE * entries_BLE]
        weight_BL = self.weight(self.hidden(torch.cat(parts, dim=2).flatten(0, 1))).view(mask_BL.shape)
        return (weight_BL.masked_fill(~mask_BL, 0.0)[:, None] @ entries_BLE)[:, 0]


def contestant(form: str, activation: str, shortest: int, seconds: float) -> harness.Figures:
    """Microseconds of CPU an entry."""
    torch.manual_seed(1)
    lengths_B = torch.randint(shortest, LONGEST + 1, (SAMPLES,))
    num_entries = int(lengths_B.sum())
    sequence = Sequence({}, torch.zeros(num_entries, 0), lengths_B, LONGEST)
    entries_NE, target_BE = torch.randn(num_entries, WIDTH), torch.randn(SAMPLES, WIDTH).requires_grad_()
    grad_BE = torch.randn(SAMPLES, WIDTH)
    run: Callable[[torch.Tensor], torch.Tensor]
    if form == "shardkeep":
        shape = SequenceShape({"item": WIDTH}, 0, LONGEST)
        config = DinEncoderConfig.model_validate({"hidden": [HIDDEN], "activation": activation})
        entries, encoder = entries_NE.requires_grad_(), DinEncoder(shape, config, HiddenOptions())
        run = partial(encoder, target_BE=target_BE, sequence=sequence)
    else:
        entries = sequence.padded(entries_NE).requires_grad_()
        run = partial(Textbook(activation), target_BE=target_BE, mask_BL=sequence.mask())
    runs, began, until = 0, 0.0, 0.0
    for number in range(1_000_000):
        if number == 3:  # after memory is there
            began, until = time.process_time(), time.monotonic() + seconds
        if number > 3 and time.monotonic() > until:
            break
        entries.grad = target_BE.grad = None
        run(entries).backward(grad_BE)
        runs += number >= 3
    return {"cpu_us_per_entry": (time.process_time() - began) / runs / num_entries * 1e6}


def main() -> None:
    options = harness.parse(harness.arguments(__doc__ or ""))
    torch.set_num_threads(1)
    results: dict[str, object] = {}
    for activation in ACTIVATIONS:
        for histories, shortest in HISTORIES.items():
            forms = {
                f"{form}, {activation}, {histories}": partial(contestant, form, activation, shortest)
                for form in ("shardkeep", "textbook")
            }
            found = harness.alternate(forms, rounds=options.rounds, seconds=options.seconds)
            ratio = harness.ratios(found, *forms, "cpu_us_per_entry")
            harness.show_ratio(f"CPU an entry beside the textbook form: {activation}, {histories}", ratio, TARGET)
            results[f"{activation}, {histories}"] = {"rounds": found, "ratio": ratio}
    shape = {"samples": SAMPLES, "longest": LONGEST, "dim": WIDTH, "hidden": HIDDEN}
    harness.write(options.json, "din_attention", {"shape": shape, "cases": results})


if __name__ == "__main__":
    main()
