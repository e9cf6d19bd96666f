"""A service's gate and parked pulls beside a walk over all messages: the same answers, in the same order."""

from __future__ import annotations

import itertools
from concurrent.futures import Future

from hypothesis import given, strategies as st

from shardkeep.base.arrays import Bytes
from shardkeep.ps.wire.message import Kind, read
from tests.support.cases import every
from tests.support.examples import examples
from tests.support.messages import Message, pack
from tests.support.services import make_service

BOUND, RANKS = 1, 2
MOVES = ("push", "pull", "pull", "push, then pull", "push the next but one", "ask", "tell", "begin")


class Walk:
    """What the modes promise, without any state but the messages themselves."""

    def __init__(self, mode: str) -> None:
        self.mode, self.told, self.pulled = mode, 0, [0] * RANKS
        self.pushed: list[set[int]] = [set() for _ in range(RANKS)]
        self.waiting: list[tuple[int, int, bool]] = []  # number, step, whether the arrival of pushes is enough

    def first_missing(self, rank: int) -> int:
        return next(step for step in itertools.count() if step not in self.pushed[rank])

    def received(self) -> int:
        return min(map(self.first_missing, range(RANKS)))

    def applied(self) -> int:
        return max(self.told, min(self.pulled)) if self.mode == "sync" else self.received()

    def answers(self) -> list[tuple[int, int]]:
        """The numbers of the messages that may be answered now, each with its staleness."""
        limit = self.applied() + {"sync": 0, "bounded": BOUND, "async": 99}[self.mode]
        ready = [each for each in self.waiting if each[1] <= (self.received() if each[2] else limit)]
        self.waiting = [each for each in self.waiting if each not in ready]
        return [(number, 0 if asks else max(0, step - self.applied())) for number, step, asks in ready]

    def begin(self, step: int) -> None:
        self.waiting, self.told, self.pulled = [], step, [0] * RANKS
        self.pushed = [set(range(step)) | (set() if self.mode == "sync" else pushed) for pushed in self.pushed]


@every("mode", ["sync", "bounded", "async"])
@examples(80)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(MOVES), st.integers(0, RANKS - 1), st.integers(0, 4)), min_size=30, max_size=40
    )
)
def test_what_is_parked_is_answered_as_soon_as_it_may_be_in_the_order_of_arrival(
    mode: str, moves: list[tuple[str, int, int]]
) -> None:
    service, walk = make_service(mode, num_workers=RANKS, staleness=BOUND), Walk(mode)
    generation, sent, ended, expected = 0, itertools.count(), list[tuple[int, int]](), list[tuple[int, int]]()

    def note(number: int, reply: Future[Bytes]) -> None:
        ended.append((number, -1 if reply.exception() else read(reply.result()).value))

    for move, rank, more in moves:
        step = walk.first_missing(rank)
        push, pull = move.startswith("push"), move.endswith("pull")
        if move == "begin":
            step = walk.applied() if mode == "sync" and more % 2 else walk.received()
            lost = mode != "sync" and all(step in pushed or step + 1 not in pushed for pushed in walk.pushed)
            step += lost and more > 2
            expected += [(number, -1) for number, _, _ in walk.waiting]
            service.life.suspend("a member was lost")
            generation += 1
            service.life.begin(generation, step)
            walk.begin(step)
        if push and (mode != "sync" or step <= walk.applied()):
            step += mode != "sync" and move == "push the next but one"
            walk.pushed[rank].add(step)
        elif push:
            continue
        messages = [pack(Message(Kind.PUSH, generation, rank, step))] if push else []
        if pull or move in ("ask", "tell"):
            step = walk.received() if move == "tell" else walk.first_missing(rank)
            step += more if pull and mode != "sync" else 0
            walk.waiting.append((next(sent), step, move == "ask"))
            walk.told = max(walk.told, step) if move == "tell" else walk.told
            walk.pulled[rank] = max(walk.pulled[rank], step) if pull else walk.pulled[rank]
            kind = Kind.PULL if pull else Kind.FENCE
            messages.append(pack(Message(kind, generation, rank, step, value=int(move == "tell"))))
        if messages:
            reply = service.handle(*messages)
            if len(messages) > push:
                reply.add_done_callback(lambda done, number=walk.waiting[-1][0]: note(number, done))
        expected += walk.answers()
        assert ended == expected
        assert service.figures()["parked_pulls"] == len(walk.waiting)
        assert service.life.resume_range[1] == walk.received()


def test_a_fence_that_completes_a_step_waits_until_another_thread_has_applied_it() -> None:
    service = make_service("sync")
    pulls, gate = service.pulls, service.applier.gate
    service.handle(pack(Message(Kind.PUSH, 0, 0, 0)))
    fence = pulls.park(read(pack(Message(Kind.FENCE, 0, 0, 1, value=1))), gate)
    work = gate.take()
    assert work is not None and pulls.admitted(gate) == []
    gate.done(work)
    assert [parked.future for parked, _ in pulls.admitted(gate)] == [fence]
