"""Admin calls as text: the words on the wire stay as they are, and each end reads what the other wrote."""

from __future__ import annotations

import pytest

from shardkeep.base.errors import ProtocolError
from shardkeep.ps.wire.admin import (
    CALLS,
    Call,
    CheckFolder,
    CheckpointSaved,
    Done,
    DropSnapshot,
    GetCpuTime,
    GetJournalSize,
    GetReport,
    JournalSize,
    LoadRows,
    Reply,
    ServerCpuTime,
    SnapshotFiles,
    TakeSnapshot,
    WriteSnapshot,
    decode_call,
    decode_reply,
    encode_call,
    encode_reply,
)
from tests.support.cases import every

TEXTS: dict[str, Call] = {
    '{"ask": "report"}': GetReport(),
    '{"ask": "report", "digest": false}': GetReport(digest=False),
    '{"ask": "cpu"}': GetCpuTime(),
    '{"ask": "see", "token": "a7"}': CheckFolder("a7"),
    '{"ask": "see", "token": "a7", "folder": "/f"}': CheckFolder("a7", "/f"),
    '{"ask": "mark", "step": 4, "base": ""}': TakeSnapshot(4, ""),
    '{"ask": "snapshot", "step": 4}': WriteSnapshot(4),
    '{"ask": "snapshot", "step": 4, "folder": "/f"}': WriteSnapshot(4, "/f"),
    '{"ask": "unmark"}': DropSnapshot(),
    '{"ask": "saved", "step": 4, "id": "c1"}': CheckpointSaved(4, "c1"),
    '{"ask": "load", "folder": "/f", "step": 4, "servers": 2}': LoadRows("/f", 4, 2),
    '{"ask": "journal"}': GetJournalSize(),
}
REPLIES: dict[str, Reply] = {
    "{}": Done(),
    '{"pid": 7, "cpu_s": 1.5}': ServerCpuTime(7, 1.5),
    '{"bytes": 12}': JournalSize(12),
    '{"files": [{"path": "a"}], "full": false, "removes": true}': SnapshotFiles([{"path": "a"}], False, True),
    '{"shard": 0}': {"shard": 0},
}


@every("text", TEXTS)
def test_a_call_keeps_its_bytes_and_is_read_back(text: str) -> None:
    assert encode_call(TEXTS[text]) == text
    assert decode_call(text) == TEXTS[text]


def test_every_call_stands_in_the_table_under_its_word() -> None:
    assert len(set(CALLS.values())) == len(CALLS)
    assert {type(call) for call in TEXTS.values()} == set(CALLS.values())


@every("text", REPLIES)
def test_a_reply_keeps_its_bytes_and_is_read_back(text: str) -> None:
    reply = REPLIES[text]
    assert encode_reply(reply) == text
    assert decode_reply(text, type(reply)) == reply


def test_a_mark_without_a_base_is_one_of_all_rows() -> None:
    assert decode_call('{"ask": "mark", "step": 4}') == TakeSnapshot(4, "")


@every("text", ["", "[]", "3", "[" * 100_000, '{"ask": []}', '{"ask": "time"}', '{"step": 1}'])
def test_an_unknown_call_is_refused_with_the_words_that_are_allowed(text: str) -> None:
    with pytest.raises(ProtocolError, match=r"unknown; allowed: .*report\|cpu\|see\|mark"):
        decode_call(text)


@every("text", ["", "{", "[" * 100_000, '{"pid": 7}', '{"pid": 7, "cpu_s": 1, "more": 2}', "[]", "7"])
def test_a_reply_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="is not a ServerCpuTime"):
        decode_reply(text, ServerCpuTime)
