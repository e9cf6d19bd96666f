"""The registry of number formats: every name and tag has its codec, and tags stay what they are."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from shardkeep.base.errors import CorruptMessage
from shardkeep.base.plugging.plugs import Plug
from shardkeep.compression.config import ValueFormat
from shardkeep.compression.values.codec import value_codec
from shardkeep.compression.values.registry import FORMATS, Format
from tests.support.cases import every

TAGS = {  # never to be changed: what is on the wire and in journals
    ("fp32", None): 0, ("fp16", None): 1, ("bf16", None): 2,
    ("fp16-block", "pow2"): 3, ("fp16-block", "fp16"): 4,
    ("fp8-e4m3", "pow2"): 5, ("fp8-e4m3", "fp16"): 6,
    ("fp8-e5m2", "pow2"): 7, ("fp8-e5m2", "fp16"): 8,
    ("int8", "pow2"): 9, ("int8", "fp16"): 10,
    ("int4", "pow2"): 11, ("int4", "fp16"): 12,
    ("int2", "pow2"): 13, ("int2", "fp16"): 14,
    ("sign", "pow2"): 15, ("sign", "fp16"): 16,
}  # fmt: skip


BITS = {"fp32": 32, "fp8-e4m3": 8, "fp8-e5m2": 8, "int8": 8, "int4": 4, "int2": 2, "sign": 1}


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
        sizes = [codec.scale_bytes + math.ceil(dim * BITS.get(name, 16) / 8) for dim in range(1, 71)]
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
