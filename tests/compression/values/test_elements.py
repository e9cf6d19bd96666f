"""Packets of elements: what comes back is what went in, of the stated size, and nothing else is accepted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.values.elements import MASKS, POSITIONS, Elements
from tests.support.cases import every
from tests.support.codecs import encoded
from tests.support.examples import examples

ELEMENTS = Elements()


def made(num_rows: int, dim: int, share: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.where(rng.random((num_rows, dim)) < share, rng.normal(size=(num_rows, dim)), 0).astype(np.float32)


def packed(rows_KD: np.ndarray) -> np.ndarray:
    return ELEMENTS.pack(encoded(ELEMENTS, rows_KD), rows_KD.shape[1])


def unpacked(packet: np.ndarray, num_rows: int, dim: int) -> np.ndarray:
    return ELEMENTS.decode(ELEMENTS.unpack(packet, num_rows, dim), dim)


@examples(60)
@given(num_rows=st.integers(0, 40), dim=st.integers(1, 20), share=st.floats(0, 1), seed=st.integers(0, 9))
def test_elements_come_back_with_their_signs_and_places(num_rows: int, dim: int, share: float, seed: int) -> None:
    rows_KD = made(num_rows, dim, share, seed)
    packet = packed(rows_KD)
    assert ELEMENTS.parts(packet, num_rows, dim) == {"indices": packet.size - 4 * np.count_nonzero(rows_KD)}
    assert np.array_equal(unpacked(packet, num_rows, dim), rows_KD)


@every(
    ("num_rows", "dim", "elements", "form", "size"),
    [
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
    rows_KD = np.zeros((num_rows, dim), dtype=np.float32)
    rows_KD.reshape(-1)[:elements] = 1.0
    packet = packed(rows_KD)
    assert (packet[0] if packet.size else None, packet.size) == (form, size)


@every("share", [0.02, 0.5], ids=["positions", "masks"])
def test_a_packet_that_is_cut_or_longer_is_refused(share: float) -> None:
    packet = packed(made(30, 9, share))
    assert packet[0] == (POSITIONS if share < 0.1 else MASKS)
    for size in range(packet.size):
        with pytest.raises(CorruptMessage):
            ELEMENTS.unpack(packet[:size], 30, 9)
    with pytest.raises(CorruptMessage):
        ELEMENTS.unpack(np.append(packet, np.uint8(0)), 30, 9)


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
        ELEMENTS.unpack(np.array(packet, dtype=np.uint8), 1, 3)


@examples(100)
@given(data=st.binary(max_size=40), num_rows=st.integers(0, 5), dim=st.integers(1, 12))
def test_any_bytes_are_a_packet_or_a_clear_error(data: bytes, num_rows: int, dim: int) -> None:
    packet = np.frombuffer(data, dtype=np.uint8)
    try:
        rows_KD = unpacked(packet, num_rows, dim)
    except CorruptMessage:
        return
    assert rows_KD.shape == (num_rows, dim)
    assert np.array_equal(unpacked(packed(rows_KD), num_rows, dim), rows_KD, equal_nan=True)
