"""The example of a lossless sum: every bit pattern comes back, sizes are bounded, nothing hostile is read past."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.tower.exchange import Ranks
from shardkeep.compression.tower.formats import none
from shardkeep.compression.tower.memory import Memory
from shardkeep.examples.compression.lossless import (
    Lossless,
    decode_floats,
    decode_length,
    encode_floats,
    encode_length,
)
from shardkeep.testing.forms import drive
from tests.support.cases import every
from tests.support.examples import examples

CPU = torch.device("cpu")
SHORT = arrays.array_shapes(min_dims=1, max_dims=1, min_side=0, max_side=100)


def coded_and_back(bits_N: np.ndarray) -> np.ndarray:
    code = encode_floats(bits_N.view(np.uint8))
    assert code.dtype == np.uint8
    assert decode_length(encode_length(len(code)), len(bits_N)) == len(code)
    assert decode_floats(code, len(bits_N)).view(np.uint32).tolist() == bits_N.tolist()
    return code


def gradient(*shape: int, zeros: float = 0.0, spread: float = 0.0) -> np.ndarray:
    drawn = np.random.default_rng(3)
    values = drawn.standard_normal(shape) * np.exp(spread * drawn.standard_normal((shape[0], *[1] * (len(shape) - 1))))
    kept = np.where(drawn.random(shape) < zeros, 0.0, 1e-4 * values)
    return kept.astype(np.float32).reshape(-1).view(np.uint8)


@examples()
@given(arrays.arrays(np.uint32, SHORT), arrays.arrays(np.int8, SHORT), st.integers(-140, 100))
def test_any_bits_and_like_values_with_zeros_and_denormals_among_them_come_back_in_little_more_room(
    bits_N: np.ndarray, small_N: np.ndarray, power: int
) -> None:
    coded_and_back(bits_N)
    coded_and_back(np.ldexp(small_N.astype(np.float32), power).view(np.uint32))


def test_what_arithmetic_does_not_keep_comes_back_and_random_bits_grow_by_a_thousandth() -> None:
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3.4028235e38, 1.17549435e-38, 1.0]
    payloads = np.array([0x7F800001, 0xFFC12345], np.uint32)
    coded_and_back(np.concatenate([np.array(special, np.float32).view(np.uint32), payloads]))
    bits_N = np.random.default_rng(1).integers(0, 1 << 32, 40_000, np.uint32)
    assert len(coded_and_back(bits_N)) < 4.004 * len(bits_N)


@every(
    ("zeros", "spread", "least", "most"),
    [(0.0, 0.0, 26, 27), (0.0, 1.0, 27, 28), (0.5, 0.0, 14, 16), (1.0, 0.0, 0, 0.1)],
)
def test_a_gradient_takes_its_mantissas_and_few_bits_more(
    zeros: float, spread: float, least: float, most: float
) -> None:
    code = encode_floats(gradient(200, 64, zeros=zeros, spread=spread))
    assert least < 8 * len(code) / 12_800 < most
    assert np.array_equal(decode_floats(code, 12_800), gradient(200, 64, zeros=zeros, spread=spread))


def test_a_bomb_is_refused_before_it_has_grown() -> None:
    with pytest.raises(CorruptMessage, match="are not 77 coded float32s"):
        decode_floats(encode_floats(np.zeros(4 << 20, np.uint8)), 77)


def lengths_came(theirs: np.ndarray) -> None:
    """Has rank 0 of two read a length of rank 1."""
    summing = Lossless({"p": (50,)}, Memory({}, CPU)).sum(["p"], [torch.ones(50)], Ranks(0, 2))
    mine = next(summing).packets
    summing.send(torch.stack([mine, torch.from_numpy(theirs)]))


def test_a_length_comes_back_and_one_that_no_code_has_or_with_any_bit_wrong_is_refused() -> None:
    """Before room is made for it."""
    for length in (0, 1, 200, 220):
        assert decode_length(encode_length(length), 50) == length
    encoded = encode_length(201)
    lengths_came(encoded)
    for length in (221, 1 << 39, (1 << 40) - 1):
        with pytest.raises(CorruptMessage, match=r"^the dense gradient of worker 1: a code of .* came for 50 float32s"):
            lengths_came(encode_length(length))
    for place in range(64):
        damaged = encoded.copy()
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(CorruptMessage, match=r"worker 1: .* or its length is damaged$"):
            lengths_came(damaged)
    for size in range(8):
        with pytest.raises(CorruptMessage, match=r"or its length is damaged$"):
            decode_length(encoded[:size], 50)


@every("world_size", [2, 4])
def test_a_sum_has_the_bits_of_fp32_and_takes_fewer_bytes(world_size: int) -> None:
    grads = [torch.from_numpy(gradient(40_000, zeros=0.1).view(np.float32)).roll(7 * r) for r in range(world_size)]
    found = {}
    for make in (Lossless, none):
        form = make({"p": (40_000,)}, Memory({}, CPU))
        totals, sent = drive([form.sum(["p"], [grad], Ranks(r, world_size)) for r, grad in enumerate(grads)])
        assert all(total.view(torch.int32).equal(totals[0].view(torch.int32)) for total in totals)
        found[make] = totals[0], sent
    (coded, fewer), (plain, all_bytes) = found[Lossless], found[none]
    assert coded.view(torch.int32).equal(plain.view(torch.int32))
    rounds = 1 + (world_size > 2)
    assert fewer["framing"] == 8 * (world_size - 1) * rounds and fewer["all"] < 0.9 * all_bytes["all"]
