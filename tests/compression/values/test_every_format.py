"""What every number format promises, for each format of the registry: a new one is tested without a line here."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.values.codec import ValueCodec, value_codec
from shardkeep.compression.values.registry import FORMATS
from tests.support.examples import examples

CASES = [
    pytest.param(
        value_codec(tag), stochastic, id=f"{name}, {scale or 'no scale'}, {'stochastic' * stochastic or 'nearest'}"
    )
    for name, entry in FORMATS.items()
    for tag, scale in entry.config.tags().items()
    for stochastic in ((False, True) if entry.config.rounds else (False,))
]
every_format = pytest.mark.parametrize(("codec", "stochastic"), CASES)


def gaussian(num_rows: int, dim: int) -> np.ndarray:
    return np.random.default_rng(dim).normal(size=(num_rows, dim)).astype(np.float32)


def keys(num_rows: int, stochastic: bool) -> np.ndarray | None:
    return np.random.default_rng(7).integers(0, 2**64, num_rows, dtype=np.uint64) if stochastic else None


def there_and_back(codec: ValueCodec, rows_KD: np.ndarray, stochastic: bool) -> np.ndarray:
    encoded = codec.encode(rows_KD, keys(len(rows_KD), stochastic))
    assert encoded.dtype == np.uint8 and encoded.nbytes == len(rows_KD) * codec.row_bytes(rows_KD.shape[1])
    decoded = codec.decode(encoded, rows_KD.shape[1])
    assert (decoded.dtype, decoded.shape) == (np.float32, rows_KD.shape)
    return decoded


@every_format
@pytest.mark.parametrize("dim", [1, 3, 16, 65])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_rows_come_back_in_their_shape(codec: ValueCodec, stochastic: bool, num_rows: int, dim: int) -> None:
    there_and_back(codec, gaussian(num_rows, dim), stochastic)


@every_format
def test_a_decoded_row_is_nearer_than_zeros_and_points_the_same_way(codec: ValueCodec, stochastic: bool) -> None:
    rows_KD = gaussian(500, 16)
    decoded_KD = there_and_back(codec, rows_KD, stochastic)
    error = np.linalg.norm(decoded_KD - rows_KD) / np.linalg.norm(rows_KD)
    assert error < (4.0 if stochastic else 1.0)  # one random bit a value is off by more than the value
    assert (np.sum(decoded_KD * rows_KD, axis=1) > 0).mean() > 0.8  # and points the same way


@every_format
def test_a_row_of_zeros_stays_one(codec: ValueCodec, stochastic: bool) -> None:
    assert not there_and_back(codec, np.zeros((3, 9), np.float32), stochastic).any()


@every_format
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_does_not_come_back_finite(codec: ValueCodec, stochastic: bool, bad: float) -> None:
    rows_KD = gaussian(4, 9)
    rows_KD[1, 8] = bad
    decoded = there_and_back(codec, rows_KD, stochastic)
    assert not np.isfinite(decoded[1]).all() and np.isfinite(decoded[[0, 2, 3]]).all()


@every_format
def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(codec: ValueCodec, stochastic: bool) -> None:
    rows_KD, keys_K = gaussian(300, 5), keys(300, stochastic)
    encoded = codec.encode(rows_KD, keys_K).reshape(300, -1)
    order = np.random.default_rng(1).permutation(300)
    again = codec.encode(rows_KD[order], None if keys_K is None else keys_K[order]).reshape(300, -1)
    assert np.array_equal(again, encoded[order])
    assert np.array_equal(codec.encode(rows_KD, keys_K).reshape(300, -1), encoded)


@every_format
@examples(20)
@given(data=st.data(), num_rows=st.integers(0, 5), dim=st.integers(1, 20))
def test_random_bytes_decode_and_wrong_sizes_are_refused(
    codec: ValueCodec, stochastic: bool, data: st.DataObject, num_rows: int, dim: int
) -> None:
    size = num_rows * codec.row_bytes(dim)
    encoded = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    assert codec.decode(encoded, dim).shape == (num_rows, dim)
    longer = np.append(encoded, np.uint8(0))
    if longer.size % codec.row_bytes(dim):
        with pytest.raises(CorruptMessage, match="bytes"):
            codec.decode(longer, dim)


@every_format
def test_read_only_bytes_and_rows_work(codec: ValueCodec, stochastic: bool) -> None:
    rows_KD = gaussian(6, 4)
    expected = there_and_back(codec, rows_KD, stochastic)
    rows_KD.flags.writeable = False
    frozen = np.frombuffer(codec.encode(rows_KD, keys(6, stochastic)).tobytes(), np.uint8)
    assert np.array_equal(codec.decode(frozen, 4), expected)
