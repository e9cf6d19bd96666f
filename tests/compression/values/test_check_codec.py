"""check_codec finds what is wrong with a plug, in one line; the examples pass it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.values.codec import RowCodec
from shardkeep.examples.compression.fp8 import Fp8
from shardkeep.examples.compression.huffman import Huffman
from shardkeep.examples.compression.qsgd import Qsgd
from shardkeep.examples.compression.sign import Sign
from shardkeep.testing import check_codec
from tests.support.cases import every
from tests.support.own_codecs import WRONG, Plain


@every("name", WRONG)
def test_a_wrong_codec_is_refused_with_its_method_what_came_and_what_is_expected(name: str) -> None:
    codec, says = WRONG[name]
    with pytest.raises(AssertionError) as refused:
        check_codec(codec)
    text = str(refused.value)
    assert says in text and text.startswith(f"{type(codec).__name__}: ") and "\n" not in text


@every("codec", [Plain(), Sign(), Fp8(), Qsgd(), Qsgd(1, "l2"), Huffman()], ids=lambda codec: type(codec).__name__)
def test_examples_keep_what_plugs_must_keep(codec: RowCodec) -> None:
    check_codec(codec)


@every("options", [{"levels": 0}, {"norm": "l1"}], ids=str)
def test_an_example_refuses_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="allowed: levels of at least 1, norm l2 or max"):
        Qsgd(**options)


def test_a_packet_of_huffman_codes_has_exactly_its_bits() -> None:
    codec = Huffman()
    packet = codec.pack(np.array([[127, 0x21, 0x03]], np.uint8), 3)  # codes 1, 2 and 3: 2 + 2 + 1 bits
    assert packet.size == 1 + 8 + 1 and codec.unpack(packet, 1, 3).tolist() == [[127, 0x21, 0x03]]
    for wrong in (np.append(packet, np.uint8(0)), np.append(packet[:-1], packet[-1] | 1)):
        with pytest.raises(CorruptMessage, match="bits are not exactly 3 codes"):
            codec.unpack(wrong, 1, 3)
