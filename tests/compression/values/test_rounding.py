"""Keys of stochastic rounding: a function of four numbers, spread over all bits."""

from __future__ import annotations

import math
import zlib

import numpy as np

from shardkeep.compression.values.rounding import WorkerKeys, row_keys, table_key
from shardkeep.compression.values.rounding_kernels import fill_random, stochastic
from tests.support.cases import every

IDS = np.array([-5, 0, 1, 2, 3, 2**40, -(2**63), 2**63 - 1], np.int64)


def test_keys_are_what_they_were() -> None:
    keys_K = row_keys(1, table_key("user"), IDS[:2], 7)
    assert [f"{key:016x}" for key in keys_K] == ["569fc76c3bcf0e79", "bfb9ad9e0c85fd16"]


def test_a_key_depends_on_its_own_row_alone_and_on_each_of_four_numbers() -> None:
    keys_K = row_keys(1, 2, IDS, 3)
    assert keys_K.dtype == np.uint64
    assert np.array_equal(row_keys(1, 2, IDS[::-1].copy(), 3), keys_K[::-1])
    assert row_keys(1, 2, IDS[:0], 3).shape == (0,)
    many = np.arange(2000, dtype=np.int64)
    found = [row_keys(*a, many, s) for a, s in (((0, 0), 0), ((1, 0), 0), ((0, 1), 0), ((0, 0), 1), ((1, 1), 1))]
    assert np.unique(np.concatenate(found)).size == 5 * many.size
    for seed in (-1, 2**64 + 5, 2**200):
        assert row_keys(seed, 2**64 - 1, IDS, 2**40).size == IDS.size


def test_workers_round_apart_and_tables_too() -> None:
    starts_T1, ids_V = np.array([0, 3, 6]), np.array([1, 2, 3, 1, 2, 3], np.int64)
    first, second = (WorkerKeys(9, rank, ["a", "b"]).of_step(4, starts_T1, ids_V) for rank in (0, 1))
    assert np.unique([*first, *second]).size == 12
    assert np.array_equal(first[3:], row_keys(9, table_key("b"), ids_V[3:], 4))


def drawn(keys_K: np.ndarray, dim: int) -> np.ndarray:
    """Random bits, uint32 (K, dim)."""
    random_KP = np.empty((keys_K.size, dim), np.uint32)
    fill_random(keys_K, random_KP)
    return random_KP


def test_random_bits_are_what_they_were() -> None:
    keys_K = np.array([0, 1, 2**32, 0x569FC76C3BCF0E79], np.uint64)
    found = [" ".join(f"{bits:08x}" for bits in row) for row in drawn(keys_K, 3)]
    assert found == [
        "00000000 7bb994da e6a3242b",
        "4ea4e35b d771bc7b 88ff5e83",
        "06d3fa73 55429d55 bc93f4ba",
        "5639e1fa 0bb9ee68 c697a3c9",
    ]
    many_K = row_keys(3, 4, np.arange(300, dtype=np.int64), 5)
    assert zlib.crc32(drawn(many_K, 33).tobytes()) == 774907620


@every("value", [0.25, -0.25, 0.999, 126.5, -126.5, 2.0**-20, -(2.0**-20), 0.0, 1.0, -1.0, 127.0, -127.0])
def test_as_many_random_numbers_round_up_as_the_fraction_says(value: float) -> None:
    fraction = float(np.float32(value)) % 1
    least = round(2**24 * (1 - fraction)) << 8  # from this random number on it is rounded up; an integer never
    randoms = {0: 0, 2**32 - 1: 1, least: 1, least - 1: 0} if fraction else {0: 0, 2**31: 0, 2**32 - 1: 0}
    for random, up in randoms.items():
        assert stochastic(np.float32(value), np.uint32(random)) == math.floor(value) + up
