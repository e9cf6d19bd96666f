"""The wire form: what is packed comes back, its bytes are fixed, and hostile bytes are refused without harm."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import CorruptMessage, ProtocolError
from shardkeep.ps.wire import admin
from shardkeep.ps.wire.admin import CALLS, Call, Reply, decode_call, decode_reply, encode_call, encode_reply
from shardkeep.ps.wire.message import EMPTY, Kind, allocate, read, text_message
from tests.support.cases import every
from tests.support.examples import examples
from tests.support.id_codes import varint
from tests.support.messages import Message, Section, pack, text_of, unpack

HEADER = 40


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
    parts = [(s.table, s.rows, s.id_format, s.value_format, bytes(s.ids), bytes(s.values)) for s in message.sections]
    return message.kind, message.generation, message.rank, message.step, message.value, parts


def sizes(message: Message) -> list[tuple[int, int]]:
    return [(s.ids.size, s.values.size) for s in message.sections]


@examples()
@given(messages)
def test_what_is_packed_comes_back_as_views_without_gaps_at_multiples_of_eight_bytes(message: Message) -> None:
    packed = pack(message)
    back = unpack(packed)
    assert plain(back) == plain(message) and bytes(pack(back)) == bytes(packed)
    for part in [s.ids for s in back.sections] + [s.values for s in back.sections]:
        assert not part.size or np.shares_memory(part, packed)
    for area, parts in (
        (read(packed).ids_area, [s.ids for s in message.sections]),
        (read(packed).values_area, [s.values for s in message.sections]),
    ):
        assert bytes(area) == b"".join(map(bytes, parts))
        assert not area.size or (area.ctypes.data - packed.ctypes.data) % 8 == 0
    assert packed.size % 8 == 0


def test_the_bytes_on_the_wire_are_these_and_padding_is_zero() -> None:
    odd = Section(0, 1, array(b"\xff" * 3), array(b"\xff" * 5))
    for _ in range(50):
        np.full(4096, 255, np.uint8)
        packed = pack(Message(Kind.PUSH, 0, 0, 0, (odd, odd)))
        assert bytes(packed[HEADER:]).hex(" ", -8) == (
            "3c00010101000003 0500000000000000 ffffffffffff0000 ffffffffffffffff ffff000000000000"
        )

    first = Section(table=0, rows=1, ids=array(b"\x07" + bytes(7)), values=array(b"\x01\x02\x03"), value_format=1)
    packed = pack(Message(Kind.PUSH, generation=3, rank=5, step=9, sections=(first,), value=-1))
    assert bytes(packed).hex(" ", 8) == (
        "534b030403000000 0500000001000000 0900000000000000 ffffffffffffffff 4000000000000000 "
        "3d01000108030000 0700000000000000 0102030000000000"
    )
    second = Section(table=3, rows=300, ids=array(b"\x05\x06"), values=array(b"\x04"), id_format=3, value_format=7)
    packed = pack(Message(Kind.PUSH, 3, 5, 9, (first, second), -1))
    columns = "00" + "0004" + "01ac02" + "0003" + "0107" + "0802" + "0301"  # flags, tables, rows, ...
    parts = "07000000000000000506" + 6 * "00" + "01020304" + 4 * "00"
    assert bytes(packed[HEADER:]).hex() == columns + 2 * "00" + parts


@examples(50)
@given(st.lists(st.integers(0, 3), max_size=8), st.integers(0, 255), st.integers(0, 9), st.booleans())
def test_columns_that_say_the_same_of_all_sections_come_back(rows: list[int], tag: int, width: int, skip: bool) -> None:
    parts = [
        Section(t + skip, count, array(bytes(8 * count)), array(bytes(width * count)), tag, 255 - tag)
        for t, count in enumerate(rows)
    ]
    message = Message(Kind.PUSH, 0, 0, 0, tuple(parts))
    assert plain(unpack(pack(message))) == plain(message)
    directory = 5 + len(rows) * (1 + skip) + (tag > 127) + (tag < 128)
    if rows:
        assert read(pack(message)).ids_at_S1[0] == (HEADER + directory + 7) // 8 * 8


def test_a_directory_of_many_tables_is_small_and_a_read_only_or_unaligned_buffer_is_read() -> None:
    rows = np.arange(100, 126)
    columns = {"tables_S": np.arange(26), "rows_S": rows, "value_bytes_S": rows * 10, "value_formats_S": 4}
    raw = allocate(Kind.PUSH, generation=0, rank=0, step=0, id_bytes_S=rows * 8, **columns)
    assert raw.ids_at_S1[0] == HEADER + 32
    coded = {"id_bytes_S": rows + rows % 3, "id_formats_S": rows % 5}
    assert allocate(Kind.PUSH, generation=0, rank=0, step=0, **coded, **columns).ids_at_S1[0] < HEADER + 90

    shifted = np.empty(push().size + 1, np.uint8)[1:]
    shifted[:] = push()
    shifted.flags.writeable = False
    assert plain(unpack(shifted)) == plain(unpack(push()))


@every("text", ["", "one line", "ä€😀", "x" * 10_000], ids=["empty", "plain", "unicode", "long"])
def test_text_comes_back_and_what_is_no_utf8_is_still_a_line(text: str) -> None:
    assert text_of(unpack(text_message(Kind.ANSWER, text, generation=2, rank=1))) == text
    assert text_of(Message(Kind.ERROR, 0, 0, 0, (Section(0, 0, EMPTY, array(b"bad \xff")),))) == "bad �"


# ---- hostile bytes ----


def push() -> Bytes:
    """Two tables; their parts need padding."""
    first = Section(0, 3, array(bytes(range(24))), array(bytes(range(36))))
    return pack(Message(Kind.PUSH, 1, 2, 3, (first, Section(1, 1, array(bytes(8)), array(bytes(6))))))


def test_every_other_length_and_more_sections_than_any_job_has_are_refused() -> None:
    good = push()
    longer = [np.concatenate([good, np.zeros(extra, np.uint8)]) for extra in (1, 8, 4096)]
    for buffer in [good[:length].copy() for length in range(good.size)] + longer:
        with pytest.raises(CorruptMessage):
            read(buffer)
    with pytest.raises(ProtocolError, match="a message of 65537 sections; allowed: 65536"):
        allocate(Kind.PUSH, generation=0, rank=0, step=0, tables_S=np.arange(65537), rows_S=np.zeros(65537, np.int64))
    with pytest.raises(CorruptMessage, match="with 65537 sections"):
        read(claiming(65537, SHORT + bytes(65537 + 4)))
    assert read(claiming(65536, SHORT + bytes(65536 + 4), 0)).tables_S.size == 65536


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
        # A flip within the padding that rounds an area's size up to 8 bytes looks like a larger area.
        assert [(sum(area) + 7) // 8 for area in zip(*sizes(message), strict=True)] == [
            (sum(area) + 7) // 8 for area in zip(*shape, strict=True)
        ]
    assert kept >= 8 * sum(map(sum, shape))  # what is in ids and values is not the wire's business


@examples(150)
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


def claiming(count: int, directory: bytes, area_bytes: int = 80) -> Bytes:
    """A message of a directory made by hand, with as many zeros behind it."""
    body = directory + bytes(-len(directory) % 8 + area_bytes)
    buffer = array(bytes(pack(Message(Kind.PUSH, 1, 2, 3))) + body)
    buffer[12:16].view("<u4")[0], buffer[32:40].view("<u8")[0] = count, buffer.size
    return buffer


LONG = b"\x0d"  # flags: all of tables, formats; bytes one by one
SHORT = b"\x3d"  # flags: all columns in their short form
SIZE = st.one_of(st.integers(0, 80), st.sampled_from([2**31, 2**32 - 8, 2**32, 2**63, 2**64 - 8, 2**64 - 1]))


@examples(150)
@given(st.lists(st.tuples(SIZE, SIZE), min_size=1, max_size=3))
def test_sizes_that_a_directory_invents_give_parts_of_just_these_sizes_or_none(invented: list[tuple[int, int]]) -> None:
    numbers = [ids for ids, _ in invented] + [values for _, values in invented]
    buffer = claiming(len(invented), LONG + bytes(len(invented)) + b"\0\0" + b"".join(map(varint, numbers)))
    if sum(-(-sum(area) // 8) * 8 for area in zip(*invented, strict=True)) == 80:
        assert sizes(unpack(buffer)) == invented
    else:
        with pytest.raises(CorruptMessage):
            unpack(buffer)


@examples(150)
@given(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**32 - 1)), min_size=1, max_size=3), SIZE, SIZE)
def test_widths_that_a_directory_invents_give_rows_of_just_these_widths_or_none(
    rows: list[int], id_width: int, value_width: int
) -> None:
    numbers = [*rows, 0, 0, id_width, value_width]
    buffer = claiming(len(rows), SHORT + b"".join(map(varint, numbers)))
    areas = [sum(rows) * id_width, sum(rows) * value_width]
    if max(id_width, value_width) > buffer.size or sum(-(-area // 8) * 8 for area in areas) != 80:
        with pytest.raises(CorruptMessage):
            unpack(buffer)
    else:
        assert sizes(unpack(buffer)) == [(count * id_width, count * value_width) for count in rows]


NO_NUMBER, TOO_LONG = "has a number that is none", "the sections alone have more"


@every(
    ("count", "directory", "text"),
    [
        (1, b"\x3f\1\0\0\0\0", NO_NUMBER),
        (1, b"\x7d\1\0\0\0\0", NO_NUMBER),
        (1, SHORT + b"\1\0\0" + b"\x8a\0" + b"\0", NO_NUMBER),
        (1, SHORT + varint(2**32) + b"\0\0\0\0", NO_NUMBER),
        (1, SHORT + b"\0" + varint(256) + b"\0\0\0", NO_NUMBER),
        (1, SHORT + b"\0\0" + varint(256) + b"\0\0", NO_NUMBER),
        (1, b"\x3c" + varint(2**33) + b"\0\0\0\0\0", NO_NUMBER),
        (1, b"\x3c" + varint(1) + b"\0\0\0\0\0", NO_NUMBER),
        (2, b"\x3c" + varint(2**33 - 2) + varint(0) + b"\0\0\0\0\0\0", NO_NUMBER),
        (30, LONG, "the directory ends too early"),
        (1, SHORT + b"\x7f\0\0\x7f\0", TOO_LONG),
        (1, SHORT + varint(2**32 - 1) + b"\0\0\0\x7f", TOO_LONG),
        (1, SHORT + varint(2**32 - 1) + b"\0\0\x08\0", TOO_LONG),
        (1, LONG + b"\1\0\0" + varint(2**40) + b"\0", NO_NUMBER),
        (1, LONG + b"\1\0\0\0" + varint(2**40), NO_NUMBER),
        (1, SHORT + b"\1\0\0\x40\0", "the sections add up to 112"),
        (90, SHORT, "the header says 128 with 90 sections"),
        (2**32 - 1, SHORT, "the header says 128 with 4294967295 sections"),
    ],
    ids=["a short form of rows", "an unknown flag", "a longer form of a number", "rows", "an id format",
         "a value format", "a table", "a table below 0", "a table behind the last", "an early end", "ids", "values",
         "rows of ids", "2**40 bytes of ids", "2**40 bytes of values", "a sum", "sections", "no end of sections"],
)  # fmt: skip
def test_what_is_wrong_with_a_directory_is_said_and_allocates_nothing(count: int, directory: bytes, text: str) -> None:
    buffer = claiming(count, directory, 24 if count == 30 else 80)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptMessage, match=text):
            unpack(buffer)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def changed(buffer: Bytes, at: int, value: int) -> Bytes:
    assert buffer[at] != value
    buffer[at] = value
    return buffer


ODD = Message(Kind.PUSH, 1, 2, 3, (Section(0, 3, array(bytes(33)), array(bytes(36))),))
PADDING = "the padding is not all zeros"


@every(
    ("buffer", "text"),
    [
        (EMPTY, "0 bytes are no message; a header has 40"),
        (np.zeros(64, np.uint8), "magic 0x0 version 0, expected 0x4b53 version 3"),
        (np.zeros((8, 8), np.uint8), "64 bytes are no message"),
        (np.zeros(64, np.int8), "64 bytes are no message"),
        (push()[::2], "no message"),
        (changed(push(), 3, 77), "unknown kind of message 77"),
        (changed(pack(ODD), HEADER + 6, 1), PADDING),
        (changed(pack(ODD), HEADER + 8 + 33, 1), PADDING),
        (changed(pack(ODD), -1, 1), PADDING),
    ],
    ids=["nothing", "zeros", "a matrix", "signed", "every other byte", "kind", "directory", "ids", "values"],
)
def test_what_is_no_message_is_named(buffer: Bytes, text: str) -> None:
    with pytest.raises(CorruptMessage, match=text):
        unpack(buffer)


# ---- admin calls as text: the words on the wire stay as they are, and each end reads what the other wrote ----

TEXTS: dict[str, Call] = {
    '{"ask": "report"}': admin.GetReport(),
    '{"ask": "report", "digest": false}': admin.GetReport(digest=False),
    '{"ask": "cpu"}': admin.GetCpuTime(),
    '{"ask": "see", "token": "a7"}': admin.CheckFolder("a7"),
    '{"ask": "see", "token": "a7", "folder": "/f"}': admin.CheckFolder("a7", "/f"),
    '{"ask": "mark", "step": 4, "base": ""}': admin.TakeSnapshot(4, ""),
    '{"ask": "snapshot", "step": 4}': admin.WriteSnapshot(4),
    '{"ask": "snapshot", "step": 4, "folder": "/f"}': admin.WriteSnapshot(4, "/f"),
    '{"ask": "unmark"}': admin.DropSnapshot(),
    '{"ask": "saved", "step": 4, "id": "c1"}': admin.CheckpointSaved(4, "c1"),
    '{"ask": "load", "folder": "/f", "step": 4, "servers": 2}': admin.LoadRows("/f", 4, 2),
    '{"ask": "journal"}': admin.GetJournalSize(),
}
REPLIES: dict[str, Reply] = {
    "{}": admin.Done(),
    '{"pid": 7, "cpu_s": 1.5}': admin.ServerCpuTime(7, 1.5),
    '{"bytes": 12}': admin.JournalSize(12),
    '{"files": [{"path": "a"}], "full": false, "removes": true}': admin.SnapshotFiles([{"path": "a"}], False, True),
    '{"shard": 0}': {"shard": 0},
}


def test_calls_and_replies_keep_their_bytes_and_are_read_back() -> None:
    for text, call in TEXTS.items():
        assert encode_call(call) == text
        assert decode_call(text) == call
    for text, reply in REPLIES.items():
        assert encode_reply(reply) == text
        assert decode_reply(text, type(reply)) == reply
    assert len(set(CALLS.values())) == len(CALLS)
    assert {type(call) for call in TEXTS.values()} == set(CALLS.values())
    assert decode_call('{"ask": "mark", "step": 4}') == admin.TakeSnapshot(4, "")  # of all rows


@every("text", ["", "[]", "3", "[" * 100_000, '{"ask": []}', '{"ask": "time"}', '{"step": 1}'])
def test_an_unknown_call_is_refused_with_the_words_that_are_allowed(text: str) -> None:
    with pytest.raises(ProtocolError, match=r"unknown; allowed: .*report\|cpu\|see\|mark"):
        decode_call(text)


@every("text", ["", "{", "[" * 100_000, '{"pid": 7}', '{"pid": 7, "cpu_s": 1, "more": 2}', "[]", "7"])
def test_a_reply_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="is not a ServerCpuTime"):
        decode_reply(text, admin.ServerCpuTime)
