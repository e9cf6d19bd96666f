"""Admin calls as text: the words on the wire stay as they are, and each end reads what the other wrote."""

from __future__ import annotations

import pytest

from shardkeep.base.errors import ProtocolError
from shardkeep.ps.wire import admin
from shardkeep.ps.wire.admin import CALLS, Call, Reply, decode_call, decode_reply, encode_call, encode_reply
from tests.support.cases import every

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
