"""What every number format promises, for each format of the registry: a new one is tested without a line here."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardkeep.base.errors import CorruptMessage
from shardkeep.base.plugging.plugs import Plug
from shardkeep.compression.config import ValueFormat
from shardkeep.compression.values.codec import ValueCodec, value_codec
from shardkeep.compression.values.registry import FORMATS, Format
from shardkeep.compression.values.scaled import BLOCK
from tests.support.cases import every
from tests.support.examples import examples

CASES = {
    f"{name}, {scale or 'no scale'}": value_codec(tag)
    for name, entry in FORMATS.items()
    for tag, scale in entry.config.tags().items()
}
every_format = every("codec", CASES.values(), ids=CASES)


def gaussian(num_rows: int, dim: int) -> np.ndarray:
    return np.random.default_rng(dim).normal(size=(num_rows, dim)).astype(np.float32)


def there_and_back(codec: ValueCodec, rows_KD: np.ndarray) -> np.ndarray:
    encoded = codec.encode(rows_KD)
    assert encoded.dtype == np.uint8 and encoded.flags.c_contiguous
    assert encoded.shape == (len(rows_KD), codec.row_bytes(rows_KD.shape[1]))
    decoded = codec.decode(encoded, rows_KD.shape[1])
    assert (decoded.dtype, decoded.shape) == (np.float32, rows_KD.shape)
    return decoded


@every_format
def test_rows_come_back_in_their_shape_nearer_than_zeros_and_point_the_same_way(codec: ValueCodec) -> None:
    for num_rows, dim in ((0, 1), (1, 3), (5, 16), (5, 65)):
        there_and_back(codec, gaussian(num_rows, dim))
    rows_KD = gaussian(500, 16)
    decoded_KD = there_and_back(codec, rows_KD)
    error = np.linalg.norm(decoded_KD - rows_KD) / np.linalg.norm(rows_KD)
    assert error < 1.0
    assert (np.sum(decoded_KD * rows_KD, axis=1) > 0).mean() > 0.8


@every_format
def test_a_row_of_zeros_stays_one(codec: ValueCodec) -> None:
    rows_KD = np.zeros((3, 9), np.float32)
    rows_KD[1] = 1.0
    rows_KD[2] = -0.0
    decoded_KD = there_and_back(codec, rows_KD)
    assert not decoded_KD[[0, 2]].any() and decoded_KD[1].any()
    assert codec.scale_bytes == 0 or not np.signbit(decoded_KD[2]).any()


@every_format
@every("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_does_not_come_back_finite(codec: ValueCodec, bad: float) -> None:
    rows_KD = gaussian(4, 9)
    rows_KD[1, 8] = bad
    rows_KD[2] = bad
    decoded_KD = there_and_back(codec, rows_KD)
    assert not np.isfinite(decoded_KD[[1, 2]]).all(axis=1).any() and np.isfinite(decoded_KD[[0, 3]]).all()
    assert codec.scale_bytes == 0 or np.isnan(decoded_KD[[1, 2]]).all()  # the whole row says so


@every_format
def test_the_bits_of_a_row_depend_on_the_row_alone(codec: ValueCodec) -> None:
    count = BLOCK // 8 + 50  # two blocks
    rows_KD = gaussian(count, 5)
    encoded = codec.encode(rows_KD)
    order = np.random.default_rng(1).permutation(count)
    for mine in (order, order[:9], np.arange(count - 7, count), np.arange(count)):
        assert np.array_equal(codec.encode(rows_KD[mine]), encoded[mine])
    part = np.ascontiguousarray(encoded[order[:9]])  # as it is split among servers
    assert np.array_equal(codec.decode(part, 5), codec.decode(encoded, 5)[order[:9]])


@examples(60)
@given(content=st.binary(min_size=1, max_size=100), num_rows=st.integers(0, 5), dim=st.integers(1, 20))
@every_format
def test_any_bytes_of_the_right_size_decode_and_others_are_refused(
    codec: ValueCodec, content: bytes, num_rows: int, dim: int
) -> None:
    encoded = np.resize(np.frombuffer(content, np.uint8), num_rows * codec.row_bytes(dim))
    assert codec.decode(encoded, dim).shape == (num_rows, dim)
    for wrong in (encoded[:-1], np.append(encoded, np.uint8(0))):
        if wrong.size % codec.row_bytes(dim):
            with pytest.raises(CorruptMessage, match=f"no rows of {codec.row_bytes(dim)} bytes"):
                codec.decode(wrong, dim)


@every_format
def test_read_only_flat_and_unaligned_rows_and_bytes_decode_alike(codec: ValueCodec) -> None:
    rows_KD = gaussian(6, 4)
    expected_KD = there_and_back(codec, rows_KD)
    rows_KD.flags.writeable = False
    encoded = codec.encode(rows_KD).tobytes()
    frozen = np.frombuffer(encoded, dtype=np.uint8)
    for given_bytes in (frozen, np.frombuffer(b"0" + encoded, dtype=np.uint8)[1:], frozen.reshape(2, -1)):
        decoded_KD = codec.decode(given_bytes, 4)
        assert decoded_KD.flags.aligned and np.array_equal(decoded_KD, expected_KD)


@every_format
def test_rows_of_another_form_are_refused(codec: ValueCodec) -> None:
    for wrong in (np.zeros((2, 2)), np.zeros(4, np.float32), np.zeros((4, 4), np.float32)[:, ::2]):
        with pytest.raises(TypeError, match="C-contiguous float32"):
            codec.encode(wrong)


# ---- the registry: every name and tag has its codec, and tags stay what they are ----

TAGS = {  # never to be changed: what is on the wire and in journals
    ("fp32", None): 0, ("fp16", None): 1,
    ("int8", "pow2"): 9, ("int8", "fp16"): 10,
    ("int4", "pow2"): 11, ("int4", "fp16"): 12,
    ("int2", "pow2"): 13, ("int2", "fp16"): 14,
    ("sign", "pow2"): 15, ("sign", "fp16"): 16,
}  # fmt: skip


BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4, "int2": 2, "sign": 1}


def test_every_format_of_the_config_has_its_codecs_sizes_and_tags_of_their_own() -> None:
    assert get_args(ValueFormat) == tuple(FORMATS)
    found = {(name, scale): tag for name, plug in FORMATS.items() for tag, scale in plug.config.tags().items()}
    assert found == TAGS
    assert len(set(TAGS.values())) == len(TAGS)
    assert max(TAGS.values()) < 128
    for (name, scale), tag in TAGS.items():
        codec = value_codec(tag)
        assert (codec.name, codec.tag) == (name, tag)
        assert codec.scale_bytes == {None: 0, "pow2": 1, "fp16": 2}[scale]
        assert value_codec(name, scale) is codec
        sizes = [codec.scale_bytes + math.ceil(dim * BITS[name] / 8) for dim in range(1, 71)]
        assert [codec.row_bytes(dim) for dim in range(1, 71)] == sizes
    assert value_codec("int8").tag == TAGS["int8", "pow2"]
    assert value_codec("fp16", "pow2") is value_codec("fp16")
    with pytest.raises(CorruptMessage, match="unknown value format 77"):
        value_codec(77)
    with pytest.raises(KeyError):
        value_codec("no-such-format")


def test_one_line_adds_a_codec_and_a_tag_of_two_formats_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def added(name: str, **tags: int) -> None:
        monkeypatch.setitem(FORMATS, name, Plug(name, Format(**tags), "shardkeep.compression.values.scaled:int4"))

    added("mine", pow2=126)
    assert value_codec.__wrapped__("mine").tag == 126
    assert value_codec.__wrapped__(126).row_bytes(16) == 9
    added("wide", fp16=125)  # the one kind of scale is its default
    assert value_codec.__wrapped__("wide").tag == 125
    added("yours", pow2=124)
    added("theirs", pow2=124)
    with pytest.raises(ValueError, match="tag 124 is that of yours and theirs"):
        value_codec("yours")


@every("tags", [{}, {"plain": 1, "pow2": 2}, {"plain": 128}, {"pow2": 3, "fp16": -1}, {"pow2": 5, "fp16": 5}], ids=str)
def test_a_line_with_tags_that_cannot_be_is_refused(tags: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="allowed: plain, or one or both of pow2 and fp16"):
        Format(**tags)
