"""The 64-bit hash of every room: the finalizer of splitmix64. Shuffles, placement, indexes and random numbers use it.

Its bits are part of files, of the wire and of results. They never change.
"""

from __future__ import annotations

import numpy as np

from shardkeep.base.compiling.kernels import kernel

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio, odd: multiples of it are far apart."""


@kernel("uint64(uint64)")
def mix(x: np.uint64) -> np.uint64:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
