"""A server under messages that nobody of ours would send: every one is answered, refused ones change nothing."""

from __future__ import annotations

import itertools
import re
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardkeep.base.arrays import Bytes
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.wire.message import Kind, text_message
from tests.support.cases import every
from tests.support.examples import examples
from tests.support.messages import Message, Section, pack, text_of, unpack
from tests.support.services import IDS, answer, gradient, make_service, pull, push, raw, wanted

VALID: dict[str, Bytes] = {
    "a push": pack(Message(Kind.PUSH, 0, 0, 1, (gradient(0), gradient(1)))),
    "a push in halves": pack(Message(Kind.PUSH, 0, 0, 1, (gradient(1, codec="fp16"),))),
    "a push in int4": pack(Message(Kind.PUSH, 0, 0, 1, (gradient(1, codec="int4"),))),
    "a pull": pack(Message(Kind.PULL, 0, 0, 1, (wanted(0), wanted(1, IDS[:2])))),
    "a fence": pack(Message(Kind.PULL, 0, 0, 1)),
    "a read": pack(Message(Kind.READ, 0, 0, 0, (wanted(1),))),
    "a question": text_message(Kind.ASK, '{"ask": "report"}'),
    "a snapshot": text_message(Kind.ASK, '{"ask": "snapshot", "step": 1}'),
}
MODES = ["sync", "bounded", "async"]
BASE_BYTES, TIMES = 1 << 20, 40
"""What a message may cost, beside its own size: an answer's objects, and rows that are wider than ids."""

WORD = st.one_of(st.integers(0, 40), st.sampled_from([255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 8, 2**32 - 1]))


@st.composite
def mutated(draw: Any) -> bytes:
    """A valid message with bytes changed, cut out, put in or cut off."""
    message = bytearray(draw(st.sampled_from(sorted(VALID.values(), key=bytes))).tobytes())
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(message) - 1, 0)))
        match draw(st.sampled_from(["byte", "word", "cut", "insert", "end"])):
            case "byte" if message:
                message[at] = draw(st.integers(0, 255))
            case "word":
                message[at & ~3 : (at & ~3) + 4] = draw(WORD).to_bytes(4, "little")
            case "cut":
                del message[at : at + draw(st.integers(1, 24))]
            case "insert":
                message[at:at] = draw(st.binary(min_size=1, max_size=24))
            case "end":
                del message[at:]
    return bytes(message)


@st.composite
def invented(draw: Any) -> bytes:
    """A whole message of the right form whose numbers are not to be trusted."""
    sections = []
    for table in sorted(draw(st.sets(st.one_of(st.integers(0, 2), WORD), max_size=3))):
        ids = draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5))
        sections.append(
            Section(
                table=table,
                rows=draw(st.one_of(st.just(len(ids)), WORD)),
                ids=raw(np.array(sorted(set(ids)) if draw(st.booleans()) else ids, dtype=np.int64)),
                values=np.frombuffer(draw(st.binary(max_size=80)), dtype=np.uint8),
                id_format=draw(st.sampled_from([0, 0, 1, 255])),
                value_format=draw(st.integers(0, 17)),
            )
        )
    kind = draw(st.sampled_from([Kind.PULL, Kind.READ, Kind.PUSH, Kind.ASK]))
    step = draw(st.one_of(st.integers(-2, 8), st.sampled_from([-(2**63), 2**62, 2**63 - 1])))
    return pack(Message(kind, draw(st.integers(0, 1)), draw(st.integers(0, 2)), step, tuple(sections))).tobytes()


DEEP = ["[" * 3000, '{"a":' * 3000, "9" * 5000]
QUESTIONS = st.one_of(st.text(max_size=40), st.sampled_from(DEEP)).map(lambda t: text_message(Kind.ASK, t).tobytes())


@pytest.fixture(scope="module", autouse=True)
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def state(service: ShardService) -> tuple[Any, ...]:
    return service.tables.digests(), [table.num_rows for table in service.tables]


def busy(mode: str) -> ShardService:
    service = make_service(mode, num_workers=2)
    for step in (0, 1):
        push(service, step, gradient(0), rank=1)
    pull(service, 0, wanted(0))
    return service


def check(service: ShardService, content: bytes) -> Kind | None:
    """The kind of the answer to a message; None = it waits for others."""
    before, buffer = state(service), np.frombuffer(content, dtype=np.uint8)
    tracemalloc.reset_peak()
    size_before = tracemalloc.get_traced_memory()[0]
    future = service.handle(buffer)
    cost = tracemalloc.get_traced_memory()[1] - size_before
    assert cost <= BASE_BYTES + TIMES * len(content), f"{cost} bytes for a message of {len(content)}"
    if not future.done():  # parked, as a valid pull or push that has to wait for others
        assert unpack(buffer).kind in (Kind.PULL, Kind.PUSH)
        return None
    message = answer(future)
    assert message.kind in (Kind.ACK, Kind.ROWS, Kind.ANSWER, Kind.ERROR)
    if message.kind is Kind.ERROR:
        told = text_of(message)
        assert told and "\n" not in told and len(told) < 400
        assert not re.match(r"[A-Z]\w*(Error|Exception|Exit): ", told), f"a defect of ours: {told}"
        assert state(service) == before
    assert answer(pull(service, 0, wanted(1), kind=Kind.READ)).kind is Kind.ROWS  # it lives on
    return message.kind


@examples(160)
@given(mode=st.sampled_from(MODES), content=st.one_of(mutated(), invented(), QUESTIONS, st.binary(max_size=200)))
def test_whatever_comes_is_answered_at_its_own_cost_and_a_refused_message_changes_nothing(
    mode: str, content: bytes
) -> None:
    check(busy(mode), content)


@every("name", ["a push", "a push in int4", "a pull", "a fence", "a snapshot"])
def test_a_header_that_claims_much_more_than_is_there_costs_nothing(name: str) -> None:
    whole, service, words = VALID[name].tobytes(), busy("async"), itertools.cycle([2**32 - 1, 2**20, 2**32 - 1])
    for at in range(min(len(whole) - 4, 30)):
        if check(service, whole[:at] + next(words).to_bytes(4, "little") + whole[at + 4 :]) is not Kind.ERROR:
            service = busy("async")
