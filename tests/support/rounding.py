"""Rounding to fewer bits in numpy and float64: what the kernels of ps/server/table/precision_kernels.py do, written
another way."""

# K = rows, D = values of a row

from __future__ import annotations

import numpy as np

from shardkeep.compression.values.rounding import row_keys

LARGEST = {"fp16": 65504.0, "bf16": float(np.array(0x7F7F0000, np.uint32).view(np.float32))}
_NOISE_BITS = {"fp16": 13, "bf16": 16}


def random_bits(key: int, ids_K: np.ndarray, step: int, first: int, count: int) -> np.ndarray:
    """The 32 random bits of columns [first, first + count), uint32 (K, count)."""
    keys_K = row_keys(key, 0, ids_K, step)
    low_K1, high_K1 = (keys_K & np.uint64(0xFFFFFFFF))[:, None], (keys_K >> np.uint64(32))[:, None]
    columns = np.arange(first, first + count, dtype=np.uint64)
    x = (low_K1 + columns * np.uint64(0x9E3779B9)).astype(np.uint32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x735A2D97) + high_K1.astype(np.uint32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0xD35A2D97)
    return x ^ (x >> np.uint32(15))


def rounded(values_KD: np.ndarray, precision: str, random_KD: np.ndarray) -> np.ndarray:
    """Values of a precision, as float32: of the two around a value the upper one (away from 0) where the part between
    them and the random number add up to 1."""
    if precision == "fp32":
        return values_KD.copy()
    if precision == "int8":
        return _integers(values_KD, random_KD)
    sizes = np.minimum(np.abs(values_KD.astype(np.float64)), LARGEST[precision])
    lower = _halves_below(sizes, precision)
    upper = _halves_above(lower, precision)
    bits = np.where(sizes < 2.0**-14, 21, 13) if precision == "fp16" else np.full(sizes.shape, _NOISE_BITS[precision])
    part = np.floor((sizes - lower) / (upper - lower) * 2.0**bits)
    noise = random_KD >> (32 - bits).astype(np.uint32)
    return np.copysign(np.where(part + noise >= 2.0**bits, upper, lower), values_KD).astype(np.float32)


def _integers(values_KD: np.ndarray, random_KD: np.ndarray) -> np.ndarray:
    most = np.abs(values_KD).max(axis=1, keepdims=True)
    scale = np.float32(most / np.float32(127.0))
    with np.errstate(divide="ignore"):
        inverse = np.where(most > 2.0**-100, np.float32(127.0) / most, np.float32(0.0))
    level = np.clip(values_KD * inverse, -127.0, 127.0).astype(np.float64)
    fixed = np.trunc(level * 2.0**24) + (random_KD >> np.uint32(8))
    return (scale * np.floor(fixed / 2.0**24).astype(np.float32)).astype(np.float32)


def _halves_below(sizes: np.ndarray, precision: str) -> np.ndarray:
    """The largest value that is not above a size from 0 on."""
    if precision == "bf16":
        return (sizes.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    near = sizes.astype(np.float16)
    return np.where(near > sizes, np.nextafter(near, np.float16(0)), near).astype(np.float64)


def _halves_above(values: np.ndarray, precision: str) -> np.ndarray:
    """The value that follows a value of the precision; beyond the last, as if there were another one."""
    if precision == "bf16":
        return (
            (values.astype(np.float32).view(np.uint32).astype(np.int64) + 0x10000)
            .astype(np.uint32)
            .view(np.float32)
            .astype(np.float64)
        )
    exponent = np.maximum(np.floor(np.log2(np.maximum(values, 2.0**-30))), -14)
    return values + 2.0 ** (exponent - 10)
