"""Second moments in one byte each."""

from __future__ import annotations

import numpy as np
import pytest

from shardkeep.compression.values.moments import decode_moments, encode_moments


def test_every_byte_stands_for_a_power_of_the_square_root_of_two_and_comes_back() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = decode_moments(codes)
    assert values[0] == 0.0 and values[1:] == pytest.approx(2.0 ** ((np.arange(1, 256) - 176) / 2), rel=1e-6)
    assert np.array_equal(encode_moments(values), codes)


def test_a_moment_is_at_most_19_percent_off_and_one_beyond_the_range_is_its_end() -> None:
    moments = np.exp(np.random.default_rng(0).uniform(-60.0, 27.0, 10_000)).astype(np.float32)
    ratios = decode_moments(encode_moments(moments)) / moments
    assert ratios.min() > 0.84 and ratios.max() < 1.19
    assert encode_moments(np.array([0.0, 1e-38, 1e30, np.nan], np.float32)).tolist() == [0, 1, 255, 255]
