"""Value codecs with a row scale and without: exact values against plain arithmetic, bounds of the error, odd rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from shardkeep.compression.values.draws import Draws
from shardkeep.compression.values.floats import saturated_values
from shardkeep.compression.values.moments import decode_moments, encode_moments
from shardkeep.compression.values.rounding_kernels import random_bits, row_keys
from shardkeep.compression.values.scaled import ScaledCodec
from tests.support.cases import every
from tests.support.codecs import codec_of, draws_of, encoded, there_and_back
from tests.support.examples import examples

CODECS = [ScaledCodec(width, scale) for width in (8, 4, 2) for scale in ("pow2", "fp16")]
every_codec = every("codec", CODECS, ids=str)
ordinary = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)


def gaussian(num_rows: int, dim: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num_rows, dim)).astype(np.float32)


def steps(codec: ScaledCodec, encoded: np.ndarray) -> np.ndarray:
    """The steps that encoded rows begin with, read by hand, float64 (K, 1)."""
    if codec.scale_bytes == 1:
        return np.exp2(encoded[:, :1].astype(np.float64) - 127)
    bits = encoded[:, :2].copy().view("<u2").astype(np.uint32) << 15
    return bits.view(np.float32).astype(np.float64)


# ---- against plain arithmetic ----


@examples(60)
@given(rows_KD=arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 19)), elements=ordinary))
@every_codec
def test_nearest_is_the_step_times_the_nearest_level(codec: ScaledCodec, rows_KD: np.ndarray) -> None:
    rows = encoded(codec, rows_KD)
    step_K1 = steps(codec, rows)
    with np.errstate(all="ignore"):
        inverse_K1 = np.float32(1.0) / step_K1.astype(np.float32)
        scaled = np.where(rows_KD.any(axis=1, keepdims=True), rows_KD * inverse_K1, np.float32(0.0))
    level = np.clip(np.rint(scaled), -codec.top, codec.top)
    step_K1 = np.where(rows_KD.any(axis=1, keepdims=True), step_K1, 0.0)
    assert np.array_equal(codec.decode(rows, rows_KD.shape[1]), (step_K1 * level).astype(np.float32))


@examples(60)
@given(rows_KD=arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=finite))
@every_codec
def test_the_step_is_the_smallest_that_does_not_clip(codec: ScaledCodec, rows_KD: np.ndarray) -> None:
    rows = encoded(codec, rows_KD)
    largest_K = np.abs(rows_KD).max(axis=1).astype(np.float64)
    low, high = 2.0**-126, float(np.finfo(np.float32).max) / codec.top / 2
    for row, largest in zip(rows, largest_K, strict=True):
        step = float(steps(codec, row[None])[0, 0])
        if largest == 0.0:
            assert not row.any()
        elif low * codec.top < largest < high * codec.top:
            code = row[: codec.scale_bytes].copy()
            before = int.from_bytes(code.tobytes(), "little") - 1
            code[:] = np.frombuffer(before.to_bytes(codec.scale_bytes, "little"), np.uint8)
            assert step * codec.top >= largest > float(steps(codec, code[None])[0, 0]) * codec.top


def test_bits_stand_where_the_format_says() -> None:
    rows_KD = np.array([[1.0, -1.0, 7.0, 0.0, -7.0]], np.float32)
    assert encoded(codec_of("int4"), rows_KD).tolist() == [[127, 0xF1, 0x07, 0x09]]
    assert encoded(codec_of("int4", "fp16"), rows_KD).tolist() == [[0x00, 0x7F, 0xF1, 0x07, 0x09]]
    rows_KD = np.array([[1.0, -1.0, 0.0, 0.0, -1.0]], np.float32)
    assert encoded(codec_of("int2"), rows_KD).tolist() == [[127, 0b00001101, 0b11]]
    assert encoded(codec_of("int8"), rows_KD * 127).tolist() == [[127, 127, 129, 0, 0, 129]]


# ---- the error ----

# Mean relative L2 error of Gaussian rows of 16 with a scale of two bytes.
ERRORS = {"int8": 4.7e-3, "int4": 8.4e-2, "int2": 0.58}


@every("name", list(ERRORS))
def test_the_error_of_gaussian_rows_is_the_documented_one(name: str) -> None:
    rows_KD = gaussian(20000, 16)
    error_KD = there_and_back(codec_of(name, "fp16"), rows_KD) - rows_KD
    relative = np.mean(np.linalg.norm(error_KD, axis=1) / np.linalg.norm(rows_KD, axis=1))
    assert relative == pytest.approx(ERRORS[name], rel=0.05)
    coarse_KD = there_and_back(codec_of(name, "pow2"), rows_KD) - rows_KD
    assert relative <= np.mean(np.linalg.norm(coarse_KD, axis=1) / np.linalg.norm(rows_KD, axis=1)) < 2 * relative


# ---- odd rows ----


@every_codec
def test_rows_of_any_size_come_back_finite_and_near_with_their_signs(codec: ScaledCodec) -> None:
    sizes_K1 = np.array([[1e-45], [1e-40], [1e-38], [1e-30], [1e30], [3e38], [3.4028234e38]])
    rows_KD = (np.array([[1.0, -1.0, 0.5, -0.25, 0.0]]) * sizes_K1).astype(np.float32)
    rows = encoded(codec, rows_KD)
    decoded = codec.decode(rows, 5)
    assert np.isfinite(decoded).all() and saturated_values(codec, rows) == 0
    share = {127: 0.02, 7: 0.3, 1: 2.0}
    error_KD = np.abs(decoded.astype(np.float64) - rows_KD)
    assert (error_KD <= share[codec.top] * sizes_K1 + 2.0**-126).all()
    assert (np.sign(decoded) * np.sign(rows_KD) >= 0.0).all()


# ---- without a row scale ----


FP32, FP16 = codec_of("fp32"), codec_of("fp16")
MAXIMUM = 65504.0
anything = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)


def rows(values: list[float], dim: int = 1) -> np.ndarray:
    return np.array(values, dtype=np.float32).reshape(-1, dim)


def test_fp32_gives_back_every_bit_without_a_copy() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100, dtype=np.uint32)
    rows_KD = np.append(bits, [0, 1 << 31, 1, 0x7F800000, 0xFFC12345]).astype(np.uint32).view(np.float32).reshape(-1, 5)
    view = encoded(FP32, rows_KD)
    decoded = FP32.decode(view, 5)
    assert np.array_equal(decoded.view(np.uint32), rows_KD.view(np.uint32))
    assert np.shares_memory(view, rows_KD) and np.shares_memory(decoded, view)


@examples(300)
@given(values=st.lists(anything, max_size=40))
def test_fp16_rounds_to_the_nearest_and_keeps_signs_infinities_and_nan(values: list[float]) -> None:
    rows_KD = rows(values)
    decoded = there_and_back(FP16, rows_KD)
    expected = torch.from_numpy(rows_KD.copy()).to(torch.float16).float().numpy()
    overflowed = np.isinf(expected) & np.isfinite(rows_KD)
    expected[overflowed] = np.copysign(np.float32(MAXIMUM), rows_KD[overflowed])
    assert np.array_equal(decoded, expected, equal_nan=True)
    numbers = ~np.isnan(rows_KD)
    assert np.array_equal(np.signbit(decoded[numbers]), np.signbit(rows_KD[numbers]))
    assert np.array_equal(np.isinf(decoded), np.isinf(rows_KD))


def test_a_finite_value_beyond_the_range_stays_finite_and_is_counted() -> None:
    halves = encoded(FP16, rows([3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 1.0, MAXIMUM], dim=7))
    assert FP16.decode(halves, 7)[0, :4].tolist() == [MAXIMUM, -MAXIMUM, np.inf, -np.inf]
    assert saturated_values(FP16, halves) == 3
    assert saturated_values(FP16, encoded(FP16, rows([1.0, np.inf, np.nan]))) == 0
    assert saturated_values(FP32, encoded(FP32, rows([3.4e38]))) == 0


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


# ---- random bits of the rounding of stored rows ----


IDS = np.array([-5, 0, 1, 2, 3, 2**40, -(2**63), 2**63 - 1], np.int64)


def keys(seed: int, table: int, ids_K: np.ndarray, step: int) -> np.ndarray:
    keys_K = np.empty(ids_K.size, np.uint64)
    row_keys(np.uint64(seed), np.uint64(table), step, ids_K, keys_K)
    return keys_K


def test_keys_are_what_they_were() -> None:
    keys_K = keys(1, 0x638DD47B9A5CDFAF, IDS[:2], 7)
    assert [f"{key:016x}" for key in keys_K] == ["569fc76c3bcf0e79", "bfb9ad9e0c85fd16"]


def test_random_bits_are_what_they_were() -> None:
    halves = [(0, 0), (1, 0), (0, 1), (0x3BCF0E79, 0x569FC76C)]
    found = [" ".join(f"{random_bits(*map(np.uint32, both), np.uint32(c)):08x}" for c in range(3)) for both in halves]
    assert found == [
        "00000000 7bb994da e6a3242b",
        "4ea4e35b d771bc7b 88ff5e83",
        "06d3fa73 55429d55 bc93f4ba",
        "5639e1fa 0bb9ee68 c697a3c9",
    ]


def test_draws_depend_on_the_key_of_a_row_and_its_column_alone_and_are_uniform() -> None:
    drawn = draws_of(IDS).bits(5)
    for other in (draws_of(IDS, table=8), draws_of(IDS, step=4), draws_of(IDS, sender=1), draws_of(IDS + 1)):
        assert not (other.bits(5) == drawn).any()
    part = np.array([6, 1])
    assert np.array_equal(draws_of(IDS[part]).bits(3), drawn[part, :3])
    two = Draws(np.array([7, 8], np.uint64), np.array([3, 5]), IDS, step=3)
    both = np.concatenate([drawn[:3], draws_of(IDS, table=8).bits(5)[3:]])
    assert np.array_equal(two.bits(5), both)
    uniform = draws_of(np.arange(2000)).uniform(16)
    assert uniform.dtype == np.float32 and uniform.min() >= 0.0 and uniform.max() < 1.0
    assert abs(uniform.mean() - 0.5) < 0.01 and abs(uniform.var() - 1 / 12) < 0.002
