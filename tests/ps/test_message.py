"""The wire form: what is packed comes back, its bytes are fixed, and hostile bytes are refused without harm."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.base.errors import CorruptMessage
from shardkeep.ps.message import EMPTY, Bytes, Kind, Message, Section, pack, read, text_message, text_of, unpack

HEADER, ENTRY = 40, 24


def array(content: bytes) -> Bytes:
    return np.frombuffer(content, dtype=np.uint8).copy()


sections = st.builds(
    Section,
    table=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 2**32 - 1),
    ids=st.binary(max_size=40).map(array),
    values=st.binary(max_size=70).map(array),
    id_format=st.integers(0, 255),
    value_format=st.integers(0, 255),
)
messages = st.builds(
    Message,
    kind=st.sampled_from(Kind),
    generation=st.integers(0, 2**32 - 1),
    rank=st.integers(0, 2**32 - 1),
    step=st.integers(-(2**63), 2**63 - 1),
    sections=st.lists(sections, max_size=6).map(tuple),
    value=st.integers(-(2**63), 2**63 - 1),
)


def plain(message: Message) -> tuple[object, ...]:
    """A message as comparable values."""
    parts = [(s.table, s.rows, s.id_format, s.value_format, bytes(s.ids), bytes(s.values)) for s in message.sections]
    return message.kind, message.generation, message.rank, message.step, message.value, parts


def sizes(message: Message) -> list[tuple[int, int]]:
    return [(s.ids.size, s.values.size) for s in message.sections]


@given(messages)
def test_what_is_packed_comes_back(message: Message) -> None:
    packed = pack(message)
    assert plain(unpack(packed)) == plain(message)
    assert read(packed).overhead == packed.size - sum(map(sum, sizes(message)))


@given(messages)
def test_the_same_message_is_the_same_bytes(message: Message) -> None:
    assert bytes(pack(message)) == bytes(pack(unpack(pack(message))))


@given(messages)
def test_ids_start_at_multiples_of_eight_bytes_values_have_no_gaps_and_all_are_views(message: Message) -> None:
    packed = pack(message)
    sections = unpack(packed).sections
    for part in [s.ids for s in sections] + [s.values for s in sections]:
        assert not part.size or np.shares_memory(part, packed)
    assert all((s.ids.ctypes.data - packed.ctypes.data) % 8 == 0 for s in sections if s.ids.size)
    area = read(packed).values_area
    assert bytes(area) == b"".join(bytes(s.values) for s in sections)
    assert not area.size or (area.ctypes.data - packed.ctypes.data) % 8 == 0


def test_padding_is_zero_whatever_the_memory_held_before() -> None:
    odd = Section(0, 1, array(b"\xff" * 3), array(b"\xff" * 5))
    for _ in range(50):
        np.full(4096, 255, np.uint8)
        packed = pack(Message(Kind.PUSH, 0, 0, 0, (odd, odd)))
        assert bytes(packed)[88:].count(0) == 2 * 5 + 6


def test_the_bytes_on_the_wire_are_these() -> None:
    section = Section(table=2, rows=1, ids=array(b"\x07" + bytes(7)), values=array(b"\x01\x02\x03"), value_format=1)
    packed = pack(Message(Kind.PUSH, generation=3, rank=5, step=9, sections=(section,), value=-1))
    assert bytes(packed).hex(" ", 8) == (
        "534b020403000000 0500000001000000 0900000000000000 ffffffffffffffff 5000000000000000 "
        "0200000000010000 0100000008000000 0300000000000000 "
        "0700000000000000 0102030000000000"
    )


def test_a_read_only_or_unaligned_buffer_is_read_as_well() -> None:
    packed = pack(Message(Kind.PULL, 0, 0, 4, (Section(0, 1, array(bytes(8)), EMPTY),)))
    shifted = np.empty(packed.size + 1, np.uint8)[1:]
    shifted[:] = packed
    shifted.flags.writeable = False
    assert plain(unpack(shifted)) == plain(unpack(packed))


@pytest.mark.parametrize("text", ["", "one line", "ä€😀", "x" * 10_000], ids=["empty", "plain", "unicode", "long"])
def test_text_comes_back(text: str) -> None:
    assert text_of(unpack(text_message(Kind.ANSWER, text, generation=2, rank=1))) == text


def test_text_that_is_no_utf8_is_still_a_line() -> None:
    assert text_of(Message(Kind.ERROR, 0, 0, 0, (Section(0, 0, EMPTY, array(b"bad \xff")),))) == "bad �"


# ---- hostile bytes ----


def push() -> Bytes:
    """Two tables; their parts need padding."""
    first = Section(0, 3, array(bytes(range(24))), array(bytes(range(36))))
    return pack(Message(Kind.PUSH, 1, 2, 3, (first, Section(1, 1, array(bytes(8)), array(bytes(6))))))


def test_every_truncation_is_corrupt() -> None:
    for length in range(push().size):
        with pytest.raises(CorruptMessage):
            unpack(push()[:length].copy())


@pytest.mark.parametrize("extra", [1, 8, 4096])
def test_bytes_too_many_are_corrupt(extra: int) -> None:
    with pytest.raises(CorruptMessage):
        unpack(np.concatenate([push(), np.zeros(extra, np.uint8)]))


def test_every_flip_of_every_bit_is_corrupt_or_leaves_the_shape() -> None:
    good = push()
    shape = sizes(unpack(good))
    kept = 0
    for bit in range(8 * good.size):
        flipped = good.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            message = unpack(flipped)
        except CorruptMessage:
            continue
        kept += 1
        # A flip within the padding that rounds a part's size up to 8 bytes cannot be told from a longer part.
        assert [((i + 7) // 8, (v + 7) // 8) for i, v in sizes(message)] == [
            ((i + 7) // 8, (v + 7) // 8) for i, v in shape
        ]
    assert kept >= 8 * sum(map(sum, shape))  # what stands in ids and values is not the wire's business


@settings(max_examples=300)
@given(st.binary(max_size=400))
def test_noise_behind_a_good_beginning_never_does_more_than_raise(noise: bytes) -> None:
    buffer = array(bytes(push()[:4]) + noise)
    if buffer.size >= HEADER:
        buffer[32:40].view("<u8")[0] = buffer.size
        buffer[12:16].view("<u4")[0] %= 8
    try:
        message = unpack(buffer)
    except CorruptMessage:
        return
    assert HEADER + sum(map(sum, sizes(message))) <= buffer.size


@settings(max_examples=500)
@given(
    st.lists(st.integers(0, 2**64 - 1) | st.integers(2**64 - 200, 2**64 - 1), min_size=2, max_size=2),
    st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 64), min_size=2, max_size=2),
)
def test_sizes_that_a_header_invents_give_parts_of_just_these_sizes_or_none(values: list[int], ids: list[int]) -> None:
    buffer = push()
    for i in range(2):
        at = HEADER + ENTRY * i
        buffer[at + 12 : at + 16].view("<u4")[0] = ids[i]
        buffer[at + 16 : at + 24].view("<u8")[0] = values[i]
    try:
        message = unpack(buffer)
    except CorruptMessage:
        return
    assert sizes(message) == list(zip(ids, values, strict=True))


def test_sizes_that_wrap_around_64_bits_are_corrupt() -> None:
    buffer = push()  # parts of 24 + 8 + 40 + 8 bytes; now -8 and 56 in place of the two lengths of values
    buffer[HEADER + 16 : HEADER + 24].view("<u8")[0] = 2**64 - 8
    buffer[HEADER + ENTRY + 16 : HEADER + ENTRY + 24].view("<u8")[0] = 56
    with pytest.raises(CorruptMessage, match=r"one section alone has 2\*\*32 or more"):
        unpack(buffer)


@pytest.mark.parametrize("field", ["sections", "ids", "values"])
def test_a_lie_about_size_allocates_nothing(field: str) -> None:
    buffer = push()
    where = {
        "sections": slice(12, 16),
        "ids": slice(HEADER + 12, HEADER + 16),
        "values": slice(HEADER + 16, HEADER + 20),
    }
    buffer[where[field]] = 255
    tracemalloc.start()
    try:
        with pytest.raises(CorruptMessage):
            unpack(buffer)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("buffer", "text"),
    [
        (EMPTY, "0 bytes are no message; a header has 40"),
        (np.zeros(64, np.uint8), "magic 0x0 version 0, expected 0x4b53 version 2"),
        (np.zeros((8, 8), np.uint8), "64 bytes are no message"),
        (np.zeros(64, np.int8), "64 bytes are no message"),
        (push()[::2], "no message"),
    ],
    ids=["nothing", "zeros", "a matrix", "signed", "every other byte"],
)
def test_what_is_no_message_is_named(buffer: Bytes, text: str) -> None:
    with pytest.raises(CorruptMessage, match=text):
        unpack(buffer)


def test_an_unknown_kind_is_named() -> None:
    buffer = push()
    buffer[3] = 77
    with pytest.raises(CorruptMessage, match="unknown kind of message 77"):
        unpack(buffer)
