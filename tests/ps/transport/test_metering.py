"""MeteredTransport: when and where it books what passes; tests/ps/client/test_client.py has the bytes."""

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
GARBAGE = np.arange(99, dtype=np.uint8)


class Booked:
    """A meter that notes what is booked, and whether the caller's future was done by then."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, int, bool]] = []
        self.future: Future[Bytes] | None = None
        self.was_done: bool | None = None

    def book(self, server: int, direction: str, step: int, parts: Parts, *, answer: bool) -> None:
        self.entries.append((direction, step, answer))
        if answer and self.future is not None:
            self.was_done = self.future.done()


class Later:
    """A transport to one server that answers when the test says so."""

    num_servers = 1

    def __init__(self) -> None:
        self.answer: Future[Bytes] = Future()

    def send(self, server: int, message: Bytes, then: Bytes | None = None, *, timeout_s: float) -> Future[Bytes]:
        return self.answer

    def close(self) -> None:
        pass


def message(kind: Kind, step: int = 0) -> Bytes:
    return pack(Message(kind, 0, 0, step, (Section(0, 2, np.zeros(16, np.uint8), EMPTY),)))


def test_an_answer_is_booked_before_its_future_is_done_and_after_two_messages_as_the_pulls() -> None:
    later, booked = Later(), Booked()
    booked.future = MeteredTransport(later, booked).send(0, message(Kind.PULL, 3), timeout_s=LIMIT_S)
    assert booked.entries == [("pull", 3, False)] and not booked.future.done()
    rows = pack(Message(Kind.ROWS, 0, 0, 3))
    later.answer.set_result(rows)
    assert booked.was_done is False and booked.future.result(0) is rows
    assert booked.entries == [("pull", 3, False), ("pull", 3, True)]

    booked, rows = Booked(), pack(Message(Kind.ROWS, 0, 0, 4))
    later = Later()
    later.answer.set_result(rows)
    MeteredTransport(later, booked).send(0, message(Kind.PUSH, 3), message(Kind.PULL, 4), timeout_s=LIMIT_S)
    assert booked.entries == [("push", 3, False), ("pull", 4, False), ("pull", 4, True)]


@every("at_once", [True, False])
def test_a_failure_and_an_answer_that_is_no_message_reach_the_caller_and_are_not_booked(at_once: bool) -> None:
    later, booked, lost = Later(), Booked(), TransportError("server 0 was lost")
    if at_once:
        later.answer.set_exception(lost)
    future = MeteredTransport(later, booked).send(0, message(Kind.READ), timeout_s=LIMIT_S)
    if not at_once:
        later.answer.set_exception(lost)
    assert future.exception(0) is lost and booked.entries == [("read", 0, False)]

    later, booked = Later(), Booked()
    if at_once:
        later.answer.set_result(GARBAGE)
    future = MeteredTransport(later, booked).send(0, message(Kind.READ), timeout_s=LIMIT_S)
    if not at_once:
        later.answer.set_result(GARBAGE)
    assert future.result(0) is GARBAGE and booked.entries == [("read", 0, False)]


def test_questions_are_control_and_a_late_answer_of_a_lost_generation_is_no_retry() -> None:
    traffic, later = WorkerTraffic(), Later()
    later.answer.set_result(text_message(Kind.ANSWER, "{}"))
    MeteredTransport(later, LedgerMeter(traffic)).send(0, text_message(Kind.ASK, "{}"), timeout_s=LIMIT_S)
    totals = traffic.ledger.totals()
    assert totals["control"] == totals["total"] == totals["to_servers"] + totals["from_servers"]
    assert totals["to_servers"] > 0 and totals["from_servers"] > 0

    traffic, later = WorkerTraffic(), Later()
    future = MeteredTransport(later, LedgerMeter(traffic)).send(0, message(Kind.PULL, 3), timeout_s=LIMIT_S)
    after = LedgerMeter(traffic)
    later.answer.set_result(pack(Message(Kind.ROWS, 0, 0, 3)))
    assert future.done() and "retries" not in traffic.ledger.totals()["pull"]
    after.book(0, "pull", 3, {"ids": 16}, answer=False)
    assert traffic.ledger.totals()["pull"]["retries"] == 16
