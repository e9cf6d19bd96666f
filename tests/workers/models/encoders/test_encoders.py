"""Encoders against the formulas of their papers, written sample by sample in float64, with all gradients."""

# Q = the target, K = an entry, X = a sample's entries, E = width of an entry

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardkeep.workers.embeddings.sequence import Sequence, SequenceShape
from shardkeep.workers.encoder_config import (
    DinEncoderConfig,
    HstuEncoderConfig,
    TransformerEncoderConfig,
)
from shardkeep.workers.models.encoders.din import DinEncoder, PairLinear
from shardkeep.workers.models.encoders.hstu import HstuEncoder
from shardkeep.workers.models.encoders.transformer import TransformerEncoder
from shardkeep.workers.models.layers.hidden import HiddenOptions
from tests.support.cases import every

LONGEST, NUMBERS, DIMS = 17, 2, {"item": 4, "category": 2}
WIDTH = sum(DIMS.values())
LENGTHS = {"mixed": (0, 1, 15, 16, 17), "all empty": (0, 0), "all of length 1": (1, 1, 1), "longest": (17, 17)}
HEADS = (slice(0, 3), slice(3, 6))
Parameters = dict[str, torch.Tensor]
OfSample = Callable[[Parameters, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def encoder_of(kind: Any, config: Any, *, numbers: int = NUMBERS) -> nn.Module:
    torch.manual_seed(3)
    encoder: nn.Module = kind(SequenceShape(DIMS, numbers, LONGEST), config, HiddenOptions()).double()
    with torch.no_grad():
        for parameter in encoder.parameters():  # also those that start at zero or are tiny
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return encoder


def inputs_of(lengths: tuple[int, ...], *, numbers: int = NUMBERS) -> tuple[torch.Tensor, torch.Tensor, Sequence]:
    """Entries (N, E) and targets (B, E), and the sequence with its numbers."""
    torch.manual_seed(4)
    count, lengths_B = sum(lengths), torch.tensor(lengths)
    entries, target = (torch.randn(n, WIDTH, dtype=torch.float64).requires_grad_() for n in (count, len(lengths)))
    return entries, target, Sequence({}, torch.randn(count, numbers, dtype=torch.float64), lengths_B, LONGEST)


def agrees(encoder: nn.Module, lengths: tuple[int, ...], of_sample: OfSample, *, numbers: int = NUMBERS) -> None:
    """Values and gradients of an encoder beside those of a function of one sample that has entries."""
    for with_target in (True, False):
        entries, target, sequence = inputs_of(lengths, numbers=numbers)
        found = encoder(entries, target if with_target else None, sequence)
        assert not found[sequence.lengths == 0].any()
        parameters, parts = dict(encoder.named_parameters()), list(zip(
            torch.split(entries, list(lengths)), torch.split(sequence.numbers, list(lengths)), strict=True
        ))  # fmt: skip
        expected = torch.stack([
            of_sample(parameters, *parts[b], target[b] if with_target else None) if length else 0.0 * target[b]
            for b, length in enumerate(lengths)
        ])  # fmt: skip
        torch.testing.assert_close(found, expected)
        weight, leaves = torch.randn_like(found), [entries, target, *parameters.values()]
        grads = [
            torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True, materialize_grads=True)
            for y in (found, expected)
        ]
        for grad, other in zip(*grads, strict=True):
            torch.testing.assert_close(grad, other)
        if isinstance(encoder, DinEncoder):
            return


def affine(p: Parameters, name: str, x: torch.Tensor) -> torch.Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


@every("lengths", LENGTHS.values(), ids=LENGTHS)
@every("softmax", [False, True])
@every("numbers", [NUMBERS, 0])
def test_din_weighs_each_entry_by_hidden_layers_over_the_pair(
    lengths: tuple[int, ...], softmax: bool, numbers: int
) -> None:
    def of_sample(p: Parameters, x: torch.Tensor, n: torch.Tensor, q: torch.Tensor | None) -> torch.Tensor:
        assert q is not None
        # The paper's input [q, k, q - k, q * k]: any W3 gives the same layer, as W1 = A - W3 and W2 = B + W3.
        w3 = torch.ones_like(p["first.entry.weight"])
        w1, w2, w4 = p["first.target.weight"] - w3, p["first.entry.weight"] + w3, p["first.product.weight"]
        numbers_HS = p.get("first.numbers.weight", w1[:, :0])
        first = torch.cat([w1, w2, w3, w4, numbers_HS], dim=1)
        h = torch.cat([q.expand_as(x), x, q - x, q * x, n], dim=1) @ first.T + p["first.target.bias"]
        weight = affine(p, "weight", affine(p, "hidden.blocks.1.0", h.clamp(min=0)).clamp(min=0))[:, 0]
        weight = weight.exp() / weight.exp().sum() if softmax else weight
        return weight @ x

    config = DinEncoderConfig(hidden=[5, 3], activation="relu", softmax=softmax)
    agrees(encoder_of(DinEncoder, config, numbers=numbers), lengths, of_sample, numbers=numbers)


@every(("activation", "norm"), [("dice", "none"), ("relu", "batch")])
def test_din_normalizes_by_the_entries_alone(activation: Any, norm: Any) -> None:
    encoder = encoder_of(DinEncoder, DinEncoderConfig(hidden=[5], activation=activation, norm=norm))
    lengths = (0, 1, 15, 4)
    entries, target, sequence = inputs_of(lengths)
    first = encoder.get_submodule("first")(entries, target, sequence)
    encoder(entries, target, sequence)
    momentum = 0.01 if activation == "dice" else 0.1
    (mean,) = (b for name, b in encoder.named_buffers() if name.endswith("running_mean"))
    torch.testing.assert_close(mean, momentum * first.mean(0))


def tokens(p: Parameters, x: torch.Tensor, n: torch.Tensor, q: torch.Tensor | None) -> torch.Tensor:
    """The entries with numbers and places, and the target as the newest."""
    x = x + affine(p, "places.numbers", n)
    x = x if q is None else torch.cat([x, q[None]])
    return x + p["places.vectors"][: len(x)].flip(0)


def norm(p: Parameters, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (WIDTH,), p[f"{name}.weight"], p[f"{name}.bias"])


@every("lengths", LENGTHS.values(), ids=LENGTHS)
def test_transformer_is_the_bst_layers_at_the_newest_place(lengths: tuple[int, ...]) -> None:
    def of_sample(p: Parameters, x: torch.Tensor, n: torch.Tensor, q: torch.Tensor | None) -> torch.Tensor:
        x = tokens(p, x, n, q)
        for layer in ("layers.0", "layers.1"):
            query, (key, value) = affine(p, f"{layer}.query", x), affine(p, f"{layer}.keys", x).chunk(2, dim=1)
            heads = []
            for h in HEADS:
                share = (query[:, h] @ key[:, h].T / math.sqrt(3)).exp()
                heads.append(share / share.sum(1, keepdim=True) @ value[:, h])
            y = norm(p, f"{layer}.norms.0", x + affine(p, f"{layer}.out", torch.cat(heads, dim=1)))
            hidden = F.leaky_relu(affine(p, f"{layer}.hidden.0", y))
            x = norm(p, f"{layer}.norms.1", y + affine(p, f"{layer}.hidden.2", hidden))
        return x[-1]

    agrees(encoder_of(TransformerEncoder, TransformerEncoderConfig(layers=2, hidden=7)), lengths, of_sample)


@every("lengths", LENGTHS.values(), ids=LENGTHS)
def test_hstu_is_the_papers_layers_at_the_newest_place(lengths: tuple[int, ...]) -> None:
    def of_sample(p: Parameters, x: torch.Tensor, n: torch.Tensor, q: torch.Tensor | None) -> torch.Tensor:
        x, longest = tokens(p, x, n, q), LONGEST + (q is not None)
        for layer in ("layers.0", "layers.1"):
            normed = F.layer_norm(x, (WIDTH,))
            key, value = F.silu(affine(p, f"{layer}.keys", normed)).chunk(2, dim=1)
            gate, query = F.silu(affine(p, f"{layer}.queries", normed)).chunk(2, dim=1)
            heads, distance = [], torch.arange(len(x))[:, None] - torch.arange(len(x))
            for number, h in enumerate(HEADS):
                score = F.silu(query[:, h] @ key[:, h].T + p[f"{layer}.distance"][number][distance.abs()])
                heads.append((score / longest).tril() @ value[:, h])
            x = x + affine(p, f"{layer}.out", F.layer_norm(torch.cat(heads, dim=1), (WIDTH,)) * gate)
        return x[-1]

    agrees(encoder_of(HstuEncoder, HstuEncoderConfig(layers=2)), lengths, of_sample)


def test_the_first_layer_of_din_starts_as_the_layer_over_all_four_parts() -> None:
    torch.manual_seed(6)
    whole = HiddenOptions().linear(4 * WIDTH, 5)
    torch.manual_seed(6)
    w1, w2, w3, w4 = whole.weight.chunk(4, dim=1)
    layer = PairLinear(WIDTH, 0, 5, HiddenOptions())
    assert torch.equal(layer.target.weight, w1 + w3) and torch.equal(layer.entry.weight, w2 - w3)
    assert torch.equal(layer.product.weight, w4) and torch.equal(layer.target.bias, whole.bias)
