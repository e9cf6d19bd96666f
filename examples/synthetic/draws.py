"""Random numbers as functions of a key and a number: every process draws the same samples, in any order.

B = samples
"""

import numpy as np
import xxhash

GOLDEN = np.array([0x9E3779B97F4A7C15], np.uint64)  # 2**64 divided by the golden ratio; an array, as scalars warn


def key_of(part, seed):
    """A key for each part of the data and each seed, uint64 (1,)."""
    return np.array([xxhash.xxh3_64_intdigest(f"synthetic/{part}".encode(), seed=seed)], np.uint64)


def mix(x):
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits. uint64 arrays."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stepped(key, numbers):
    """A key for each of some whole numbers, far apart. uint64 arrays."""
    return key + np.asarray(numbers, np.uint64) * GOLDEN


def ids_of(key, numbers):
    """An id for each of some whole numbers: any 64 bits, like hashes of texts. int64."""
    return mix(key + GOLDEN + np.asarray(numbers, np.uint64)).view(np.int64)


def uniform(keys):
    """A number in [0, 1) for each key, float64."""
    return unit(mix(keys))


def unit(bits):
    """A number in [0, 1) from the upper 53 of 64 random bits, float64."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def zipf_ranks(keys, size, exponent):
    """Ranks in [0, size) whose probability falls as rank ** -exponent, int64."""
    share = 1.0 - exponent
    draw = uniform(keys)
    if abs(share) < 1e-9:
        x = np.exp(draw * np.log(size + 1.0))
    else:
        x = np.exp(np.log1p(draw * (np.exp(share * np.log(size + 1.0)) - 1.0)) / share)
    return np.clip(x.astype(np.int64) - 1, 0, size - 1)


def happens(keys, logits):
    """Whether each event of these log-odds happens."""
    return uniform(keys) < 1.0 / (1.0 + np.exp(-logits))
