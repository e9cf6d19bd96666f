"""check_codec: whether a codec of the user's own keeps what `RowCodec` states, on rows and bytes that jobs bring."""
# K = rows, D = embedding dim, R = bytes of one encoded row

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardkeep.base.arrays import Bytes, Rows
from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.values.checked import CheckedCodec
from shardkeep.compression.values.codec import RowCodec
from shardkeep.compression.values.draws import Draws
from shardkeep.testing.trial import Trial

ROWS, ZEROS, SOME = 40, 5, slice(3, 9)
"""Rows of a check, the row of zeros, and a part of them."""


def check_codec(codec: RowCodec, *, dims: Sequence[int] = (1, 7, 16, 33)) -> None:
    """Checks a codec: types and shapes, row by row, several servers, sizes, zeros, NaN, no rows, hostile bytes.

    Args:
        codec: Made with its options.
        dims: Numbers of values in a row.

    Raises AssertionError: one line with the method, what it returned, and what is expected."""
    trial = Trial(lambda: codec, type(codec).__name__, RowCodec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns about NaN
        for dim in dims:
            trial.where, random = f"dim {dim}", np.random.default_rng(dim)
            encoded_KR = _check_rows(CheckedCodec(trial), trial, dim, random)
            _check_packets(CheckedCodec(trial), trial, dim, random, encoded_KR)


def _check_rows(codec: RowCodec, trial: Trial, dim: int, random: np.random.Generator) -> Bytes:
    """Encodes and decodes; returns encoded rows."""
    ids_K, sizes_K1 = random.integers(-(2**62), 2**62, ROWS), np.exp2(random.integers(-20, 20, (ROWS, 1)))
    rows_KD = (random.normal(size=(ROWS, dim)) * sizes_K1).astype(np.float32)
    rows_KD[ZEROS] = 0.0

    def encode(rows_KD: Rows, part: Any = slice(None)) -> Bytes:
        draws = Draws(np.array([7], np.uint64), np.array([ids_K[part].size]), ids_K[part], step=3)
        return codec.encode(rows_KD[part], draws).copy()

    encoded_KR, same, finite = encode(rows_KD), np.array_equal, np.isfinite
    trial.require(same(encode(rows_KD), encoded_KR), "encode gives other bits for the same rows and draws")
    for part in (random.permutation(ROWS), np.arange(3, 9), np.arange(1), np.arange(0)):
        trial.require(same(encode(rows_KD, part), encoded_KR[part]), "encode: the bits of a row depend on other rows")
    decoded_KD = codec.decode(encoded_KR, dim)
    trial.require(finite(decoded_KD).all(), "decode makes finite rows infinite or NaN")
    trial.require(not decoded_KD[ZEROS].any(), "decode makes a row of zeros another one")
    for bad in (np.nan, np.inf):
        (odd_KD := rows_KD.copy())[2, -1] = bad
        odd_KD = codec.decode(encode(odd_KD), dim)
        trial.require(not finite(odd_KD[2]).all(), f"decode makes a row with {bad} finite")
        trial.require(finite(np.delete(odd_KD, 2, 0)).all(), f"a row with {bad} changes other rows")
    for part_KR in (encoded_KR[SOME], _in_a_message(encoded_KR[SOME])):
        trial.require(
            same(codec.decode(part_KR, dim), decoded_KD[SOME]), "decode of some rows differs from that of all"
        )
    codec.decode(random.integers(0, 256, encoded_KR.shape, dtype=np.uint8), dim)
    return encoded_KR


def _check_packets(codec: RowCodec, trial: Trial, dim: int, random: np.random.Generator, encoded_KR: Bytes) -> None:
    """Splits rows among servers, each of which packs its own, and unpacks them; then unpacks hostile bytes."""
    for servers in (1, 2, 3, ROWS + 1):
        for part_KR in (np.ascontiguousarray(encoded_KR[server::servers]) for server in range(servers)):
            codec.parts(packet := codec.pack(part_KR, dim), len(part_KR), dim)
            unpacked_KR = codec.unpack(_in_a_message(packet), len(part_KR), dim)
            same = np.array_equal(codec.decode(unpacked_KR, dim), codec.decode(part_KR, dim))
            trial.require(same, f"rows of {servers} servers differ after pack and unpack")
    for packet in _wrong_packets(codec.pack(encoded_KR, dim), random):
        for rows in (ROWS, 1, 0):
            trial.hostile = True
            try:
                unpacked_KR = codec.unpack(packet, rows, dim)
            except CorruptMessage:
                continue
            finally:
                trial.hostile = False
            codec.decode(unpacked_KR, dim)


def _wrong_packets(packet: Bytes, random: np.random.Generator) -> Iterator[Bytes]:
    """Packets that are too short, too long, random or changed, or have another number of rows."""
    yield from (packet[:size] for size in (*range(min(12, packet.size)), packet.size - 1))
    yield np.append(packet, np.uint8(1))
    for _ in range(50):
        yield random.integers(0, 256, packet.size, dtype=np.uint8)
        changed = packet.copy()
        changed[random.integers(packet.size)] ^= 1 << int(random.integers(8))
        yield changed


def _in_a_message(array: Bytes) -> Bytes:
    """The same bytes, read-only and at an odd address."""
    return np.frombuffer(b"0" + array.tobytes(), dtype=np.uint8)[1:].reshape(array.shape)
