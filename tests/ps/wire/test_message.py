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
from shardkeep.ps.wire.message import EMPTY, Kind, addressed, allocate, read, set_value, text_message
from tests.support.cases import every
from tests.support.examples import examples
from tests.support.id_codes import varint
from tests.support.messages import Message, Section, pack, text_of, unpack

HEADER = 6  # where every number takes one byte


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
    sections=st.lists(sections, max_size=6, unique_by=lambda s: s.table).map(
        lambda parts: tuple(sorted(parts, key=lambda s: s.table))
    ),
    value=st.integers(-(2**63), 2**63 - 1),
)


def plain(message: Message) -> tuple[object, ...]:
    parts = [(s.table, s.rows, s.id_format, s.value_format, bytes(s.ids), bytes(s.values)) for s in message.sections]
    return message.kind, message.generation, message.rank, message.step, message.value, parts


def sizes(message: Message) -> list[tuple[int, int]]:
    return [(s.ids.size, s.values.size) for s in message.sections]


@examples()
@given(messages)
def test_what_is_packed_comes_back_as_views_without_gaps_and_raw_parts_at_multiples_of_eight_bytes(
    message: Message,
) -> None:
    packed = pack(message)
    back = unpack(packed)
    assert plain(back) == plain(message) and bytes(pack(back)) == bytes(packed)
    for part in [s.ids for s in back.sections] + [s.values for s in back.sections]:
        assert not part.size or np.shares_memory(part, packed)
    at = read(packed)
    for area, parts, formats_S in (
        (at.ids_area, [s.ids for s in message.sections], at.id_formats_S),
        (at.values_area, [s.values for s in message.sections], at.value_formats_S),
    ):
        assert bytes(area) == b"".join(map(bytes, parts))
        assert not area.size or formats_S.any() or (area.ctypes.data - packed.ctypes.data) % 8 == 0
    assert packed.size == at.values_at_S1[-1]
    shifted = np.insert(packed, 0, 0)[1:]
    shifted.flags.writeable = False
    assert plain(unpack(shifted)) == plain(message)


def bits(*codes: tuple[int, int]) -> bytes:
    """Numbers as exponential Golomb codes of these orders; order -1 = four plain bits."""
    text = ""
    for number, order in codes:
        high, low = f"{(number >> max(order, 0)) + 1:b}"[::-1], f"{number:060b}"[::-1]
        text += low[:4] if order < 0 else (len(high) - 1) * "0" + "1" + high[:-1] + low[:order]
    return int(text[::-1], 2).to_bytes(-(-len(text) // 8), "little")


def test_the_bytes_on_the_wire_are_these_and_padding_is_zero() -> None:
    first = Section(table=0, rows=1, ids=array(b"\x07" + bytes(7)), values=array(b"\x01\x02\x03"), value_format=1)
    second = Section(table=3, rows=300, ids=array(b"\x05\x06"), values=array(b"\x04"), value_format=1)
    one = b"\x3d" + bits((0, 3), (1, 3), (0, -1), (0, 0), (0, 3), (1, 3), (8, 3), (3, 3))
    tables, rows = [(0, 3), (0, -1), (0, 0), (2, 0)], [(1, 3), (7, -1), (0, 7), (299, 7)]
    ids, values = [(8, 3), (11, -1), (0, 11), (2 * 2398 - 1, 11)], [(3, 3), (9, -1), (0, 9), (2 * 899 - 1, 9)]
    two = b"\x0c" + bits(*tables, *rows, (0, 3), (1, 3), *ids, *values)
    for _ in range(50):
        np.full(4096, 255, np.uint8)
        packed = pack(Message(Kind.PUSH, generation=3, rank=5, step=300, sections=(first,), value=-1))
        assert bytes(packed[:16]).hex() == "440305ac02" + 9 * "ff" + "01" + "01"
        directory = one + bytes(-(16 + len(one)) % 8)  # raw ids begin at a multiple of 8 bytes
        assert bytes(packed[16:]) == directory + b"\x07" + bytes(7) + b"\x01\x02\x03"
        packed = pack(Message(Kind.PUSH, 3, 5, 9, (first, second)))
        assert bytes(packed[:HEADER]).hex() == "440305090002"
        directory = two + bytes(-(HEADER + len(two)) % 8)
        assert bytes(packed[HEADER:]) == directory + b"\x07" + bytes(7) + b"\x05\x06" + b"\x01\x02\x03\x04"


def test_a_directory_of_many_tables_is_small() -> None:
    rows = np.arange(100, 126)
    columns = {"tables_S": np.arange(26), "rows_S": rows, "value_bytes_S": rows * 10, "value_formats_S": 4}
    raw = allocate(Kind.PUSH, generation=0, rank=0, step=0, id_bytes_S=rows * 8, **columns)
    assert raw.ids_at_S1[0] <= HEADER + 32
    coded = {"id_bytes_S": rows + rows % 3, "id_formats_S": rows % 5}
    assert allocate(Kind.PUSH, generation=0, rank=0, step=0, **coded, **columns).ids_at_S1[0] < HEADER + 60
    with pytest.raises(ProtocolError, match=r"a message of tables \[1, 1\]; allowed: tables that rise"):
        allocate(Kind.PUSH, generation=0, rank=0, step=0, tables_S=np.array([1, 1]), rows_S=np.array([1, 1]))


def test_a_value_is_replaced_if_it_takes_as_many_bytes_and_another_generation_gets_a_copy() -> None:
    packed = read(push())
    assert set_value(packed, 127) and read(packed.buffer).value == 127
    assert not set_value(packed, 128) and read(packed.buffer).value == 127
    moved = addressed(packed.buffer, 300)
    assert plain(unpack(moved))[1:] == (300, *plain(unpack(packed.buffer))[2:])
    assert not np.shares_memory(moved, packed.buffer) and read(packed.buffer).generation == 1


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
    with pytest.raises(CorruptMessage, match="the header has 65537 sections"):
        read(claiming(65537, directory([0] * 65537)))
    assert read(claiming(65536, directory([0] * 65536), 0)).tables_S.size == 65536


def test_every_flip_of_every_bit_is_corrupt_or_leaves_the_size() -> None:
    good = push()
    size, kept = sum(map(sum, sizes(unpack(good)))), 0
    for bit in range(8 * good.size):
        flipped = good.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            message = unpack(flipped)
        except CorruptMessage:
            continue
        kept += 1
        assert abs(sum(map(sum, sizes(message))) - size) < 8  # padding, or bits of the directory that it ends without
    assert kept >= 8 * size  # what is in ids and values is not the wire's business


def claiming(count: int, directory: bytes, area_bytes: int = 80) -> Bytes:
    """A message of a directory made by hand, with as many zeros behind it."""
    return array(bytes(pack(Message(Kind.PUSH, 1, 2, 3)))[:-1] + varint(count) + directory + bytes(area_bytes))


Sizes = tuple[list[int], list[int]]


def directory(rows: list[int], *, table: int = 0, tags: tuple[int, int] = (1, 1), widths: tuple[int, int] = (0, 0),
              sizes: Sizes | None = None, flags: int = 0x3D) -> bytes:  # fmt: skip
    """A directory of tables that follow each other, with formats that need no padding. `sizes`: of ids and of values,
    in place of the rows' `widths`."""
    codes = [(table, 3), (0, 3), (0, -1), *((count, 0) for count in rows), *((tag, 3) for tag in tags)]
    for kind in (0, 1):
        codes += [(widths[kind], 3)]
        if sizes is not None:
            codes += [(0, -1), *((2 * size, 0) for size in sizes[kind])]
    return bytes([flags if sizes is None else 0x0D]) + bits(*codes)


SIZE = st.one_of(st.integers(0, 80), st.sampled_from([2**31, 2**32 - 8, 2**32, 2**50]))


@examples(150)
@given(st.lists(st.tuples(SIZE, SIZE), min_size=1, max_size=3))
def test_sizes_that_a_directory_invents_give_parts_of_just_these_sizes_or_none(invented: list[tuple[int, int]]) -> None:
    columns = [ids for ids, _ in invented], [values for _, values in invented]
    buffer = claiming(len(invented), directory([0] * len(invented), sizes=columns))
    if sum(map(sum, invented)) == 80:
        assert sizes(unpack(buffer)) == invented
    else:
        with pytest.raises(CorruptMessage):
            unpack(buffer)


@examples(150)
@given(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**32 - 1)), min_size=1, max_size=3), SIZE, SIZE)
def test_widths_that_a_directory_invents_give_rows_of_just_these_widths_or_none(
    rows: list[int], id_width: int, value_width: int
) -> None:
    buffer = claiming(len(rows), directory(rows, widths=(id_width, value_width)))
    if max(id_width, value_width) > 2**20 or sum(rows) * (id_width + value_width) != 80:
        with pytest.raises(CorruptMessage):
            unpack(buffer)
    else:
        assert sizes(unpack(buffer)) == [(count * id_width, count * value_width) for count in rows]


NO_NUMBER, TOO_LONG = "has a number that cannot be", "the sections alone have more"
OUT_OF_BITS = bytes([0x3D]) + bits((0, 3), (0, 3), (0, -1)) + bytes(20)  # the code of rows has 64 zeros and more


@every(
    ("count", "content", "text"),
    [
        (1, directory([1], flags=0x3F), NO_NUMBER),
        (1, directory([1], flags=0x7D), NO_NUMBER),
        (1, OUT_OF_BITS, NO_NUMBER),
        (1, directory([2**32]), NO_NUMBER),
        (1, directory([0], tags=(256, 0)), NO_NUMBER),
        (1, directory([0], table=2**32), NO_NUMBER),
        (2, directory([0, 0], table=2**32 - 1), NO_NUMBER),
        (30, directory([0] * 9), "the directory ends too early"),
        (1, directory([127], widths=(127, 0)), TOO_LONG),
        (1, directory([2**32 - 1], widths=(0, 127)), TOO_LONG),
        (1, directory([2**32 - 1], widths=(2**20, 0)), TOO_LONG),
        (1, directory([1], widths=(2**20 + 1, 0)), NO_NUMBER),
        (1, directory([1], sizes=([2**40], [0])), TOO_LONG),
        (1, directory([1], widths=(64, 0)), "the sections add up to"),
        (2**32 - 1, directory([0]), "the header has 4294967295 sections"),
    ],
    ids=["a short form of rows", "an unknown flag", "a code of zeros", "rows", "an id format", "a table",
         "a table behind the last", "an early end", "ids", "values", "rows of ids", "a wide row",
         "2**40 bytes of ids", "a sum", "no end of sections"],
)  # fmt: skip
def test_what_is_wrong_with_a_directory_is_said_and_allocates_nothing(count: int, content: bytes, text: str) -> None:
    buffer = claiming(count, content, 0 if count == 30 else 80)
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


ODD = pack(Message(Kind.PUSH, 1, 2, 3, (Section(0, 3, array(bytes(33)), array(bytes(36))),)))
CODED = pack(Message(Kind.PUSH, 1, 2, 3, (Section(0, 3, array(bytes(9)), EMPTY, 1, 1),)))  # nothing is raw
PADDING = "the padding is not all zeros"


@every(
    ("buffer", "text"),
    [
        (EMPTY, "0 bytes are no message"),
        (np.zeros(64, np.uint8), "version 0, expected 4"),
        (np.zeros((8, 8), np.uint8), "64 bytes are no message"),
        (np.zeros(64, np.int8), "64 bytes are no message"),
        (push()[::2], "no message"),
        (changed(push(), 0, 0x4D), "unknown kind of message 13"),
        (array(b"\x44" + 9 * b"\xff"), "the header has numbers that cannot be"),
        (array(b"\x44\x01" + varint(2**32) + b"\x00\x00\x00"), "the header has numbers that cannot be"),
        (changed(ODD.copy(), read(ODD).ids_at_S1[0] - 1, 1), PADDING),
        (changed(ODD.copy(), read(ODD).ids_at_S1[1], 1), PADDING),
        (changed(CODED.copy(), read(CODED).ids_at_S1[0] - 1, CODED[read(CODED).ids_at_S1[0] - 1] | 0x80), PADDING),
    ],
    ids=["nothing", "zeros", "a matrix", "signed", "odd bytes", "kind", "header", "rank", "directory", "ids", "bits"],
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
