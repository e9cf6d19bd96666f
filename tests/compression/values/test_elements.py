"""Packets of elements: what comes back is what went in, of the stated size, and nothing else is accepted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.values.codec import value_codec
from shardkeep.compression.values.elements import MASKS, POSITIONS, decode, encode, size_bytes
from tests.support.cases import every
from tests.support.examples import examples

FP32 = value_codec("fp32")


def made(num_rows: int, dim: int, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    mask_KD = rng.random((num_rows, dim)) < share
    return np.where(mask_KD, rng.normal(size=(num_rows, dim)), 0).astype(np.float32), mask_KD


@examples(60)
@given(num_rows=st.integers(0, 40), dim=st.integers(1, 20), share=st.floats(0, 1), seed=st.integers(0, 9))
@every("codec", ["fp32", "fp16"])
def test_elements_come_back_with_their_signs_and_places(
    codec: str, num_rows: int, dim: int, share: float, seed: int
) -> None:
    rows_KD, mask_KD = made(num_rows, dim, share, seed)
    packet = encode(rows_KD, mask_KD, value_codec(codec))
    assert packet.nbytes == size_bytes(num_rows, dim, int(mask_KD.sum()), value_codec(codec))
    decoded_KD, decoded_mask_KD = decode(packet, num_rows, dim, value_codec(codec))
    assert np.array_equal(decoded_mask_KD, mask_KD)
    expected = value_codec(codec).decode(value_codec(codec).encode(rows_KD), dim)
    assert np.array_equal(decoded_KD, expected)


@every(
    ("num_rows", "dim", "elements", "form", "size"),
    [
        (10, 16, 10, POSITIONS, 5 + 10 * 1 + 40),
        (10, 16, 20, MASKS, 5 + 10 * 2 + 80),
        (10, 16, 19, POSITIONS, 5 + 19 * 1 + 76),
        (1000, 16, 999, POSITIONS, 5 + 999 * 2 + 3996),
        (1000, 16, 1000, MASKS, 5 + 2000 + 4000),
        (70_000, 1, 17_499, POSITIONS, 5 + 17_499 * 4 + 4 * 17_499),
        (70_000, 1, 17_500, MASKS, 5 + 70_000 + 4 * 17_500),
        (0, 16, 0, MASKS, 5),
    ],
)
def test_the_smaller_form_is_taken(num_rows: int, dim: int, elements: int, form: int, size: int) -> None:
    mask_KD = np.zeros((num_rows, dim), dtype=bool)
    mask_KD.reshape(-1)[:elements] = True
    packet = encode(mask_KD.astype(np.float32), mask_KD, FP32)
    assert (packet[0] if packet.size else None, packet.size) == (form, size)


@every("share", [0.02, 0.5], ids=["positions", "masks"])
def test_a_packet_that_is_cut_or_longer_is_refused(share: float) -> None:
    rows_KD, mask_KD = made(30, 9, share)
    packet = encode(rows_KD, mask_KD, FP32)
    assert packet[0] == (POSITIONS if share < 0.1 else MASKS)
    for size in range(packet.size):
        with pytest.raises(CorruptMessage):
            decode(packet[:size], 30, 9, FP32)
    with pytest.raises(CorruptMessage):
        decode(np.append(packet, np.uint8(0)), 30, 9, FP32)


@every(
    "packet",
    [
        [],
        [2, 0, 0, 0, 0],
        [MASKS, 1, 0, 0, 0, 0b1000, *[0] * 4],  # a bit beyond a row of 3
        [MASKS, 1, 0, 0, 0, 0b1001, *[0] * 4],
        [MASKS, 1, 0, 0, 0, 0b011, *[0] * 4],  # two elements, one value
        [MASKS, 255, 255, 255, 255, 0b111, *[0] * 12],  # no memory is taken for what is not there
        [POSITIONS, 1, 0, 0, 0, 3, *[0] * 4],  # beyond the row
        [POSITIONS, 2, 0, 0, 0, 1, 0, *[0] * 8],  # falling
        [POSITIONS, 2, 0, 0, 0, 1, 1, *[0] * 8],  # twice
        [POSITIONS, 255, 255, 255, 255, 1, *[0] * 4],
    ],
    ids=str,
)
def test_bytes_that_are_no_packet_are_refused(packet: list[int]) -> None:
    with pytest.raises(CorruptMessage):
        decode(np.array(packet, dtype=np.uint8), 1, 3, FP32)


@examples(100)
@given(data=st.binary(max_size=40), num_rows=st.integers(0, 5), dim=st.integers(1, 12))
def test_any_bytes_are_a_packet_or_a_clear_error(data: bytes, num_rows: int, dim: int) -> None:
    packet = np.frombuffer(data, dtype=np.uint8)
    try:
        rows_KD, mask_KD = decode(packet, num_rows, dim, FP32)
    except CorruptMessage:
        return
    assert rows_KD.shape == mask_KD.shape == (num_rows, dim)
    again_KD, mask_again_KD = decode(encode(rows_KD, mask_KD, FP32), num_rows, dim, FP32)
    assert np.array_equal(again_KD.view(np.uint32), rows_KD.view(np.uint32))
    assert np.array_equal(mask_again_KD, mask_KD)
