"""MeteredTransport: when and where it books what passes; tests/ps/client/test_client_bytes.py has the bytes."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import TransportError
from shardkeep.ps.transport.metered import LedgerMeter, MeteredTransport, Parts, WorkerTraffic
from shardkeep.ps.wire.message import EMPTY, Kind, text_message
from tests.support.cases import every
from tests.support.messages import Message, Section, pack

LIMIT_S = 90.0


class Booked:
    """A meter that notes what is booked, and a transport to one server that answers when the test says so."""

    num_servers = 1

    def __init__(self) -> None:
        self.entries: list[tuple[str, int, bool]] = []
        self.answer: Future[Bytes] = Future()
        self.future: Future[Bytes] | None = None
        """The caller's."""
        self.done_by_then: bool | None = None

    def book(self, server: int, direction: str, step: int, parts: Parts, *, answer: bool) -> None:
        self.entries.append((direction, step, answer))
        if answer and self.future is not None:
            self.done_by_then = self.future.done()

    def send(self, server: int, message: Bytes, then: Bytes | None = None, *, timeout_s: float) -> Future[Bytes]:
        return self.answer

    def close(self) -> None:
        pass


def message(kind: Kind, step: int = 0) -> Bytes:
    return pack(Message(kind, 0, 0, step, (Section(0, 2, np.zeros(16, np.uint8), EMPTY),)))


def test_an_answer_is_booked_before_its_future_is_done_and_after_two_messages_as_the_pulls() -> None:
    booked, rows = Booked(), pack(Message(Kind.ROWS, 0, 0, 3))
    booked.future = MeteredTransport(booked, booked).send(0, message(Kind.PULL, 3), timeout_s=LIMIT_S)
    assert booked.entries == [("pull", 3, False)] and not booked.future.done()
    booked.answer.set_result(rows)
    assert booked.done_by_then is False and booked.future.result(0) is rows
    assert booked.entries == [("pull", 3, False), ("pull", 3, True)]

    booked = Booked()
    booked.answer.set_result(pack(Message(Kind.ROWS, 0, 0, 4)))
    MeteredTransport(booked, booked).send(0, message(Kind.PUSH, 3), message(Kind.PULL, 4), timeout_s=LIMIT_S)
    assert booked.entries == [("push", 3, False), ("pull", 4, False), ("pull", 4, True)]


@every("at_once", [True, False])
@every("answer", [TransportError("server 0 was lost"), np.arange(99, dtype=np.uint8)], ids=["a failure", "no message"])
def test_a_failure_and_an_answer_that_is_no_message_reach_the_caller_and_are_not_booked(
    answer: TransportError | Bytes, at_once: bool
) -> None:
    booked = Booked()
    act = booked.answer.set_exception if isinstance(answer, TransportError) else booked.answer.set_result
    if at_once:
        act(answer)
    future = MeteredTransport(booked, booked).send(0, message(Kind.READ), timeout_s=LIMIT_S)
    if not at_once:
        act(answer)
    assert answer is (future.exception(0) or future.result(0)) and booked.entries == [("read", 0, False)]


def test_questions_are_control_and_a_late_answer_of_a_lost_generation_is_no_retry() -> None:
    traffic, asked = WorkerTraffic(), Booked()
    asked.answer.set_result(text_message(Kind.ANSWER, "{}"))
    MeteredTransport(asked, LedgerMeter(traffic)).send(0, text_message(Kind.ASK, "{}"), timeout_s=LIMIT_S)
    totals = traffic.ledger.totals()
    assert totals["control"] == totals["total"] == totals["to_servers"] + totals["from_servers"]
    assert totals["to_servers"] > 0 and totals["from_servers"] > 0

    traffic, late = WorkerTraffic(), Booked()
    future = MeteredTransport(late, LedgerMeter(traffic)).send(0, message(Kind.PULL, 3), timeout_s=LIMIT_S)
    after = LedgerMeter(traffic)
    late.answer.set_result(pack(Message(Kind.ROWS, 0, 0, 3)))
    assert future.done() and "retries" not in traffic.ledger.totals()["pull"]
    after.book(0, "pull", 3, {"ids": 16}, answer=False)
    assert traffic.ledger.totals()["pull"]["retries"] == 16
