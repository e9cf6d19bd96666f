"""Kernels of the shuffle: a keyed bijection of [0, n), evaluated for any range of positions without memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardkeep.base.compiling.kernels import kernel
from shardkeep.base.hashing_kernels import GOLDEN, mix


@kernel("void(int64, int64, uint64, int64[::1])")
def permuted_range(start: int, num_samples: int, key: np.uint64, out_B: NDArray[np.int64]) -> None:
    """Writes positions [start, start + B) of the permutation of [0, num_samples) named by `key`.

    An alternating Feistel network with two halves of fixed width is a bijection of [0, 2^k); numbers of
    [num_samples, 2^k) are walked on until they fall inside (cycle walking, Black and Rogaway 2002).
    2^k < 2 * num_samples, so a walk takes less than two rounds on average.
    """
    bits = 1
    while (1 << bits) < num_samples:
        bits += 1
    low_bits = np.uint64(bits // 2)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << (np.uint64(bits) - low_bits)) - np.uint64(1)
    limit = np.uint64(num_samples)
    for i in range(len(out_B)):
        x = np.uint64(start + i)
        while True:
            low = x & low_mask
            high = x >> low_bits
            for r in range(4):
                round_key = key + np.uint64(2 * r + 1) * GOLDEN
                high ^= mix(low ^ round_key) & high_mask
                low ^= mix(high ^ ~round_key) & low_mask
            x = (high << low_bits) | low
            if x < limit:
                break
        out_B[i] = np.int64(x)
