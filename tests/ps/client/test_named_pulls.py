"""Several pulls under way: a push names those that it answers, and their answers come in any order."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import numpy as np
from hypothesis import given, strategies as st

from shardkeep.base.arrays import Bytes
from shardkeep.ps.client.row_client import PullHandle
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.wire.message import MAX_PULLS, Kind, read
from tests.support.cases import every
from tests.support.clients import DIMS, SUMS, Arrays, Job
from tests.support.examples import examples

FORMS: dict[str, dict[str, Any]] = {
    "raw": {},
    "coded": {"ids": "coded"},
    "cache": {"pull": {"cache_rows": 100, "lease": 2}},
    "coded cache": {"ids": "coded", "pull": {"cache_rows": 100, "lease": 2}},
}


class Posted:
    """A server's handler. Messages of some kinds wait until they are delivered; others arrive at once."""

    def __init__(self, service: ShardService, kinds: Collection[Kind]) -> None:
        self.waiting: list[tuple[Bytes, Future[Bytes]]] = []
        self._service, self._kinds = service, kinds

    def __call__(self, message: Bytes, then: Bytes | None = None) -> Future[Bytes]:
        if read(message).kind not in self._kinds:
            return self._service.handle(message, then)
        reply: Future[Bytes] = Future()
        self.waiting.append((message, reply))
        return reply

    def deliver(self, place: int) -> None:
        """Delivers one of the messages that wait, and its answer."""
        message, reply = self.waiting.pop(place)
        reply.set_result(self._service.handle(message).result(90))


class PostedJob(Job):
    """One worker, and servers that the test delivers pulls to, and pushes if they are among `kinds`."""

    def __init__(self, form: str, *, kinds: Collection[Kind] = (Kind.PULL,), **settings: Any) -> None:
        self.posted: list[Posted] = []

        def handler(service: ShardService) -> Posted:
            self.posted.append(Posted(service, kinds))
            return self.posted[-1]

        own = {"big": SUMS, "small": SUMS, "wide": {"freeze": True}}
        super().__init__(own, handler=handler, **FORMS[form], **settings)

    def pull(self, step: int, ids: Arrays, **how: Any) -> PullHandle:
        return self.client.pull(step, self.client.request(ids), **how)

    def delivered(self, step: int, ids: Arrays, **how: Any) -> PullHandle:
        """A pull with its answer."""
        pull = self.pull(step, ids, **how)
        self.deliver()
        pull.result()
        return pull

    def deliver(self, *, last_first: bool = False) -> None:
        for posted in self.posted:
            while posted.waiting:
                posted.deliver(-1 if last_first else 0)

    def push(self, step: int, ids: Arrays, pulls: list[PullHandle], value: float = 1.0) -> None:
        """Subtracts `value` times the id from each row."""
        grads = {n: np.repeat(value * ids_U[:, None], DIMS[n], 1).astype(np.float32) for n, ids_U in ids.items()}
        self.client.push(step, self.client.request(ids), grads, pulls=pulls)

    def rows(self, ids: Arrays) -> dict[str, list[float]]:
        self.client.wait_acknowledged()
        return {name: rows[:, 0].tolist() for name, rows in self.client.read(self.client.request(ids)).result().items()}

    @property
    def remembered(self) -> int:
        return sum(service.pulls.num_remembered for service in self.services)


def both(*parts: Arrays) -> Arrays:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: np.unique(np.concatenate([part[name] for part in parts if name in part])) for name in names}


LEFT: Arrays = {"big": np.array([1, 2, 3])}
RIGHT: Arrays = {"big": np.array([3, 101, 102, 103]), "small": np.array([-7, 5])}


@every("mode", ["bounded", "async"])
def test_pushes_that_overtake_each_other_name_their_own_pulls(mode: str) -> None:
    job = PostedJob("coded", mode=mode, kinds=(Kind.PULL, Kind.PUSH))
    pulls = [job.pull(step, ids) for step, ids in enumerate((LEFT, RIGHT))]
    job.deliver()
    for step, (pull, ids) in enumerate(zip(pulls, (LEFT, RIGHT), strict=True)):
        pull.result()
        job.push(step, ids, [pull])
    job.deliver(last_first=True)
    assert job.rows(LEFT) == {"big": [-1.0, -2.0, -6.0]} and job.rows({"small": RIGHT["small"]}) == {
        "small": [7.0, -5.0]
    }
    assert job.remembered == 0


def test_a_pull_whose_rows_are_not_there_yet_is_not_named() -> None:
    job = PostedJob("coded")
    late = job.pull(0, LEFT)
    job.push(0, LEFT, [late])
    assert job.rows(LEFT) == {"big": [-1.0, -2.0, -3.0]}
    job.deliver()
    assert job.pull(1, LEFT) is not None and late.result()["big"].shape == (3, 8)


def test_lookups_that_no_push_follows_leave_nothing_behind() -> None:
    job = PostedJob("coded", mode="async")
    for number in range(MAX_PULLS + 5):
        job.delivered(0, LEFT, for_push=False)
        job.delivered(0, {"wide": np.array([number])})
    assert job.remembered == 0
    for _ in range(MAX_PULLS + 5):
        pull = job.delivered(0, LEFT)
    for step in range(1, MAX_PULLS + 5):
        job.delivered(step, LEFT)
    assert job.remembered <= MAX_PULLS + 2
    job.push(0, LEFT, [pull])
    assert job.rows(LEFT) == {"big": [-1.0, -2.0, -3.0]}
    for step in (1, 2):
        job.push(step, LEFT, [])
    assert job.remembered == 0


@st.composite
def some_ids(draw: Any) -> Arrays:
    names = draw(st.sets(st.sampled_from(["big", "small"]), min_size=1))
    ids = {name: sorted(draw(st.sets(st.integers(-4, 12), min_size=1))) for name in sorted(names)}
    return {name: np.array(numbers, dtype=np.int64) for name, numbers in ids.items()}


@examples(80)
@given(
    data=st.data(),
    form=st.sampled_from(list(FORMS)),
    mode=st.sampled_from(["sync", "bounded", "async"]),
    servers=st.integers(1, 3),
)
def test_any_order_of_pulls_answers_and_pushes_trains_the_rows_that_were_meant(
    data: st.DataObject, form: str, mode: str, servers: int
) -> None:
    """A model of the rows: every value that a row has had, by table and id."""
    job = PostedJob(form, mode=mode, servers=servers)
    values: dict[tuple[str, int], list[float]] = {}
    under_way: list[tuple[int, Arrays, PullHandle]] = []
    ahead = 0 if mode == "sync" else 2
    for step in range(3):
        for _ in range(data.draw(st.integers(mode == "sync", 3))):
            later = step + data.draw(st.integers(0, ahead))
            ids = data.draw(some_ids())
            under_way.append((later, ids, job.pull(later, ids)))
        for posted in job.posted:
            while posted.waiting:
                posted.deliver(data.draw(st.integers(0, len(posted.waiting) - 1)))
        taken = data.draw(st.permutations(under_way))
        for _, ids, pull in taken[: data.draw(st.integers(0, len(taken)))]:
            for name, rows in pull.result().items():
                for id_, row in zip(ids[name].tolist(), rows, strict=True):
                    assert row[0] in values.get((name, id_), [0.0]) and (row == row[0]).all()
        mine = [(ids, pull) for at, ids, pull in under_way if at == step and pull.received]
        chosen = data.draw(st.lists(st.sampled_from(mine), unique_by=id)) if mine else []
        ids = both(*(ids for ids, _ in chosen), data.draw(some_ids()))
        job.push(step, ids, [pull for _, pull in chosen], value=1.0 + step)
        for name, ids_U in ids.items():
            for id_ in ids_U.tolist():
                had = values.setdefault((name, id_), [0.0])
                had.append(had[-1] - (1.0 + step) * id_)
    job.client.fence(3)
    for name, rows in job.rows({name: np.arange(-4, 13) for name in ("big", "small")}).items():
        assert rows == [values.get((name, id_), [0.0])[-1] for id_ in range(-4, 13)]
    assert job.remembered <= 2 * MAX_PULLS
