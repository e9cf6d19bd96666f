"""Second moments beside rows: a row's mean squared gradient in one byte, as a power of the square root of two.

Why they are sent: an Adagrad or Adam server that squares the sum of m steps' gradients adds up to m times too much.
"""
# K = rows

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Bytes, Floats

_ZERO_AT, _STEPS = 176, 2  # code c > 0 represents 2 ** ((c - 176) / 2): 2 ** -87.5 to 2 ** 39.5
_VALUES = np.concatenate([[0.0], 2.0 ** ((np.arange(1, 256) - _ZERO_AT) / _STEPS)]).astype(np.float32)
_BOUNDS = (_VALUES[1:-1].astype(np.float64) * 2.0**0.25).astype(np.float32)


def encode_moments(moments_K: Floats) -> Bytes:
    """One byte each, uint8 (K,), to the nearest power: at most 19 % off. Zero stays zero; what lies beyond the range
    becomes its end, a NaN the largest."""
    codes_K = (np.searchsorted(_BOUNDS, moments_K) + 1).astype(np.uint8)
    codes_K[moments_K <= 0.0] = 0
    return codes_K


def decode_moments(codes_K: Bytes) -> Floats:
    """The moments, float32 (K,); every byte represents one."""
    return _VALUES.take(codes_K)
