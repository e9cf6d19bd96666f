"""What every built-in format promises, for each of the registry: a new one is tested without a line here."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.values.codec import RowCodec
from shardkeep.compression.values.codecs import built_in
from shardkeep.compression.values.registry import ELEMENTS, FORMATS, tag_of
from shardkeep.compression.values.scaled import BLOCK
from shardkeep.testing import check_codec
from tests.support.cases import every
from tests.support.codecs import encoded

PLUGS = (*FORMATS.values(), ELEMENTS)
CASES = {f"{plug.name}, {scale}": built_in(tag).codec for plug in PLUGS for scale, tag in plug.config.items()}
every_format = every("codec", CASES.values(), ids=CASES)


def gaussian(num_rows: int, dim: int) -> np.ndarray:
    return np.random.default_rng(dim).normal(size=(num_rows, dim)).astype(np.float32)


@every_format
def test_every_format_keeps_what_plugs_must_keep(codec: RowCodec) -> None:
    check_codec(codec)


@every_format
def test_the_bits_of_a_row_do_not_depend_on_its_block(codec: RowCodec) -> None:
    count = BLOCK // 8 + 50  # two blocks
    rows_KD = gaussian(count, 5)
    rows = encoded(codec, rows_KD)
    order = np.random.default_rng(1).permutation(count)
    for mine in (order, np.arange(count - 7, count)):
        assert np.array_equal(encoded(codec, rows_KD[mine]), rows[mine])


@every_format
def test_rows_of_another_form_are_refused(codec: RowCodec) -> None:
    for wrong in (np.zeros((2, 2)), np.zeros(4, np.float32), np.zeros((4, 4), np.float32)[:, ::2]):
        with pytest.raises(TypeError, match="C-contiguous float32"):
            encoded(codec, wrong)


# ---- the registry: every name and tag has its codec, and tags stay what they are ----

TAGS = {  # never to be changed: what is on the wire and in journals
    ("fp32", None): 0, ("fp16", None): 1, ("elements", None): 17,
    ("int8", "pow2"): 9, ("int8", "fp16"): 10,
    ("int4", "pow2"): 11, ("int4", "fp16"): 12,
    ("int2", "pow2"): 13, ("int2", "fp16"): 14,
}  # fmt: skip
BITS = {"fp32": 32, "elements": 32, "fp16": 16, "int8": 8, "int4": 4, "int2": 2}


def test_every_format_has_its_sizes_its_parts_and_tags_of_its_own() -> None:
    assert {(plug.name, scale): tag for plug in PLUGS for scale, tag in plug.config.items()} == TAGS
    assert len(set(TAGS.values())) == len(TAGS) and max(TAGS.values()) < 64
    for (name, scale), tag in TAGS.items():
        codec, scale_bytes = built_in(tag).codec, {None: 0, "pow2": 1, "fp16": 2}[scale]
        assert (built_in(tag).name, built_in(tag).packs) == (name, name == "elements")
        sizes = [scale_bytes + math.ceil(dim * BITS[name] / 8) for dim in range(1, 71)]
        assert [codec.row_bytes(dim) for dim in range(1, 71)] == sizes
        if scale_bytes:
            assert codec.parts(np.empty(0, np.uint8), 9, 16) == {"scales": 9 * scale_bytes}
    assert tag_of("int8", None, plug=0) == TAGS["int8", "pow2"]
    with pytest.raises(CorruptMessage, match="unknown value format 40"):
        built_in(40)
