"""Value codecs without a row scale: what comes back is what went in, to the format's precision; nothing is hidden."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from shardkeep.compression.values.codec import value_codec
from shardkeep.compression.values.floats import saturated_values
from shardkeep.compression.values.moments import decode_moments, encode_moments
from tests.support.cases import every
from tests.support.examples import examples

CODECS = {name: value_codec(name) for name in ("fp32", "fp16", "bf16")}
HALF = {"fp16": (torch.float16, 2.0**-11), "bf16": (torch.bfloat16, 2.0**-8)}
LARGEST = {"fp16": 65504.0, "bf16": 3.3895313892515355e38}
floats = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)


def rows(values: list[float], dim: int = 1) -> np.ndarray:
    return np.array(values, dtype=np.float32).reshape(-1, dim)


def there_and_back(name: str, rows_KD: np.ndarray) -> np.ndarray:
    codec = CODECS[name]
    return codec.decode(codec.encode(rows_KD), rows_KD.shape[1])


def test_fp32_gives_back_every_bit_without_a_copy() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100, dtype=np.uint32)
    rows_KD = np.append(bits, [0, 1 << 31, 1, 0x7F800000, 0xFFC12345]).astype(np.uint32).view(np.float32).reshape(-1, 5)
    encoded = CODECS["fp32"].encode(rows_KD, np.arange(21, dtype=np.uint64))
    decoded = CODECS["fp32"].decode(encoded, 5)
    assert np.array_equal(decoded.view(np.uint32), rows_KD.view(np.uint32))
    assert np.shares_memory(encoded, rows_KD) and np.shares_memory(decoded, encoded)


@examples(300)
@given(values=st.lists(floats, max_size=40))
@every("name", list(HALF))
def test_a_half_format_rounds_to_the_nearest_and_keeps_signs_infinities_and_nan(name: str, values: list[float]) -> None:
    rows_KD = rows(values)
    decoded = there_and_back(name, rows_KD)
    expected = torch.from_numpy(rows_KD.copy()).to(HALF[name][0]).float().numpy()
    overflowed = np.isinf(expected) & np.isfinite(rows_KD)
    expected[overflowed] = np.copysign(np.float32(LARGEST[name]), rows_KD[overflowed])
    assert np.array_equal(decoded, expected, equal_nan=True)
    numbers = ~np.isnan(rows_KD)
    assert np.array_equal(np.signbit(decoded[numbers]), np.signbit(rows_KD[numbers]))
    assert np.array_equal(np.isinf(decoded), np.isinf(rows_KD))


def test_ties_go_to_the_even_neighbour_and_subnormals_of_fp16_survive() -> None:
    ties = rows([1 + 2**-11, 1 + 3 * 2**-11, -(1 + 2**-11)])
    assert there_and_back("fp16", ties).ravel().tolist() == [1.0, 1 + 2**-9, -1.0]
    ties = rows([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)])
    assert there_and_back("bf16", ties).ravel().tolist() == [1.0, 1 + 2**-6, -1.0]
    decoded = there_and_back("fp16", rows([2**-24, -(2**-24), 2**-26, -(2**-26), 3 * 2**-24])).ravel()
    assert decoded.tolist() == [2**-24, -(2**-24), 0.0, 0.0, 3 * 2**-24]
    assert np.signbit(decoded[3])


@every("name", list(HALF))
def test_a_finite_value_beyond_the_range_stays_finite_and_is_counted(name: str) -> None:
    top = LARGEST[name]
    encoded = CODECS[name].encode(rows([3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 1.0, top], dim=7))
    decoded = CODECS[name].decode(encoded, 7).ravel()
    assert decoded[[0, 1, 2, 3]].tolist() == [top, -top, np.inf, -np.inf]
    assert np.isnan(decoded[4])
    assert decoded[5] == 1.0
    assert saturated_values(CODECS[name], encoded) == 3
    assert saturated_values(CODECS[name], CODECS[name].encode(rows([1.0, np.inf, np.nan]))) == 0
    assert saturated_values(CODECS["fp32"], CODECS["fp32"].encode(rows([3.4e38]))) == 0


@every("name", list(HALF))
def test_stochastic_rounding_of_a_half_format_keeps_what_nearest_keeps_and_takes_a_neighbour_else(name: str) -> None:
    codec, top = CODECS[name], LARGEST[name]
    kept = [0.0, -0.0, 1.0, -2.5, 2.0**-14, top, -top, np.inf, -np.inf, 2.0**-24]
    rows_KD = rows([*kept, 3.4e38, -3.4e38, np.nan], dim=13)
    decoded = codec.decode(codec.encode(rows_KD.repeat(50, axis=0), np.arange(50, dtype=np.uint64)), 13)
    assert np.array_equal(decoded[:, :12], [[*kept, top, -top]] * 50) and np.isnan(decoded[:, 12]).all()
    assert (np.signbit(decoded[:, :12]) == np.signbit(rows_KD[:, :12])).all()

    rows_KD = np.random.default_rng(1).normal(size=(500, 16)).astype(np.float32)
    rows_KD[:100] *= 1e-6  # subnormals of fp16
    decoded = codec.decode(codec.encode(rows_KD, np.arange(500, dtype=np.uint64)), 16)
    assert np.array_equal(decoded, codec.decode(codec.encode(decoded), 16))  # numbers of the format
    place = np.maximum(np.abs(rows_KD) * HALF[name][1] * 2, 2.0**-24 if name == "fp16" else 0.0)
    assert (np.abs(decoded - rows_KD) < place).all()


def test_stochastic_rounding_between_subnormals_of_fp16_has_the_value_as_its_mean() -> None:
    num, codec = 20000, CODECS["fp16"]
    row_D = np.array([0.3, -0.004, 1.5, 700.25, -1023.7], np.float32) * np.float32(2.0**-24)  # 1024: a normal number
    encoded = codec.encode(np.repeat(row_D[None], num, axis=0), np.arange(num, dtype=np.uint64))
    found_KD = codec.decode(encoded, row_D.size).astype(np.float64)
    assert (np.abs(found_KD.mean(axis=0) - row_D) < 5 * found_KD.std(axis=0) / np.sqrt(num)).all()
    assert (np.abs(found_KD - row_D) < 2.0**-24).all()


# ---- second moments, a byte each ----


def test_a_byte_of_a_moment_is_a_power_of_the_square_root_of_two_at_most_19_percent_off() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = decode_moments(codes)
    assert values[0] == 0.0 and values[1:] == pytest.approx(2.0 ** ((np.arange(1, 256) - 176) / 2), rel=1e-6)
    assert np.array_equal(encode_moments(values), codes)
    moments = np.exp(np.random.default_rng(0).uniform(-60.0, 27.0, 10_000)).astype(np.float32)
    ratios = decode_moments(encode_moments(moments)) / moments
    assert ratios.min() > 0.84 and ratios.max() < 1.19
    assert encode_moments(np.array([0.0, 1e-38, 1e30, np.nan], np.float32)).tolist() == [0, 1, 255, 255]
