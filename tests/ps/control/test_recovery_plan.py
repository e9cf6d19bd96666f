"""The decision of a recovery, without a job: where it begins, what it loses, when it is refused."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, strategies as st

from shardkeep.ps.control.records import ResumeRange
from shardkeep.ps.control.recovery import Losses, RecoveryPlan, ResumePoint, agreed_start, plan_recovery
from tests.support.cases import every
from tests.support.examples import examples
from tests.support.recovering import held

CAUSE = "server 0 died"


def part(step: int) -> ResumeRange:
    return ResumeRange(step, step, holds=True, part=True)


@every(
    ("servers", "workers", "start"),
    [
        ([held(5, 5), held(5, 6)], [held(4, 6), held(3, 5)], ResumePoint(5, 0)),
        ([held(5, 5)], [held(5, 6), held(3, 4)], ResumePoint(5, 0, (1,))),  # killed while it kept the state of step 5
        ([held(5, 6), held(6, 6)], [held(4, 6), held(5, 7)], ResumePoint(6, 0)),
        ([held(0, 9)], [ResumeRange(), held(5, 11)], ResumePoint(9, 1, (0,))),
        ([held(0, 9)], [held(5, 8), ResumeRange(), ResumeRange()], ResumePoint(8, 0, (1, 2))),
        ([held(0, 9)], [held(5, 8), held(6, 9)], ResumePoint(9, 1, (0,))),
        ([held(0, 0)], [held(0, 0)], ResumePoint(0, 0)),
        ([held(4, 4), held(6, 6)], [held(3, 7)], None),  # a server came back from an older checkpoint
        ([held(5, 5)], [held(6, 8)], None),
        ([held(5, 5)], [ResumeRange()], None),  # nobody holds a tower
        ([], [held(2, 3)], ResumePoint(3, 0)),
        ([held(4, 6)], [part(5), part(5)], ResumePoint(5, 0)),
        ([held(4, 6)], [part(5), part(6)], None),  # one rank finished the step, and no other has its part
        ([held(4, 6)], [part(5), ResumeRange()], None),
        ([held(4, 4)], [part(5), part(5)], None),
    ],
)
def test_a_generation_begins_at_the_last_step_at_which_all_can(
    servers: list[ResumeRange], workers: list[ResumeRange], start: ResumePoint | None
) -> None:
    assert agreed_start(dict(enumerate(servers)), dict(enumerate(workers))) == start


SHORT = ResumeRange(0, 7, holds=True, lost_from=7)
"""A server whose journal was cut, in `bounded`."""


def planned(
    servers: Sequence[ResumeRange], workers: Sequence[ResumeRange], *, saved: int = 0, reached: int = 9, most: int = 99
) -> RecoveryPlan:
    by_index = dict(enumerate(servers)), dict(enumerate(workers))
    return plan_recovery(*by_index, saved=saved, reached=reached, losses=Losses(most=most), cause=CAUSE)


@every(
    ("servers", "workers", "start", "lost"),
    [
        ([held(5, 9)], [held(4, 9)], ResumePoint(9, 0), 0),
        ([ResumeRange()], [held(4, 9)], ResumePoint(9, 0), 0),
        ([held(5, 9)], [ResumeRange()], ResumePoint(6), 3),
        ([held(5, 5)], [held(7, 9)], ResumePoint(6), 3),
        ([held(5, 5)], [held(7, 12)], ResumePoint(6), 6),
        ([SHORT], [held(8, 9)], ResumePoint(9, 0), 2),
        ([SHORT], [held(6, 9)], ResumePoint(7, 0), 0),
        ([SHORT, held(0, 9)], [held(8, 9), held(8, 8)], ResumePoint(8, 0), 1),
        ([SHORT, ResumeRange(0, 5, holds=True, lost_from=5)], [held(6, 9)], ResumePoint(7, 0), 2),
        ([SHORT, ResumeRange(0, 5, holds=True)], [held(8, 9)], ResumePoint(6), 3),
        ([SHORT, held(9, 9)], [ResumeRange()], ResumePoint(6), 3),
    ],
    ids=[
        "all hold",
        "an empty server",
        "no tower",
        "apart",
        "further than told",
        "a server without its last updates",
        "that the workers still have",
        "beside others",
        "and a shorter one",
        "and one that cannot follow",
        "and no tower",
    ],
)
def test_a_plan_loses_what_lies_between_its_start_and_what_was_trained(
    servers: list[ResumeRange], workers: list[ResumeRange], start: ResumePoint, lost: int
) -> None:
    for most in range(8):
        plan = planned(servers, workers, saved=6, most=most)
        assert plan.start == start
        assert (plan.refusal is None) == (lost <= most)
        assert plan.refusal is None or plan.refusal.startswith(f"{CAUSE}; {lost} steps would be lost")


@every(("seen", "saved"), [((-1, -1), 6), ((4, -1), 4), ((4, 8), 8), ((0, 0), 0)])
def test_the_last_checkpoint_is_what_members_see_or_else_what_was_told(seen: tuple[int, int], saved: int) -> None:
    plan = planned([ResumeRange(saved=one) for one in seen], [ResumeRange()], saved=6)
    assert (plan.saved, plan.start) == (saved, ResumePoint(saved))


RANGES = st.builds(
    lambda first, more, holds: ResumeRange(first, first + more, holds=holds),
    st.integers(0, 12),
    st.integers(0, 5),
    st.booleans(),
)


@examples(200)
@given(servers=st.lists(RANGES, min_size=1, max_size=4), workers=st.lists(RANGES, min_size=1, max_size=4))
def test_a_plan_begins_where_every_server_can_and_its_source_has_the_tower(
    servers: list[ResumeRange], workers: list[ResumeRange]
) -> None:
    start = planned(servers, workers).start
    having = [i for i, one in enumerate(workers) if one.holds and one.first <= start.step <= one.last]
    if start.source < 0:
        assert start == ResumePoint(0)
        for step in range(20):
            everywhere = all(one.first <= step <= one.last for one in servers)
            assert not (everywhere and any(one.holds and one.first <= step <= one.last for one in workers))
    else:
        assert all(one.first <= start.step <= one.last for one in servers)
        assert start.source == having[0]
        assert start.lacking == tuple(i for i in range(len(workers)) if i not in having)
