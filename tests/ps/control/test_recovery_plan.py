"""The decision of a recovery: where it begins, what it loses, when it is refused."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, strategies as st

from shardkeep.ps.control.records import ResumeRange
from shardkeep.ps.control.recovery import Losses, RecoveryPlan, ResumePoint, plan_recovery
from tests.support.cases import every
from tests.support.examples import examples
from tests.support.recovering import held

CAUSE = "server 0 died"


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
        ([ResumeRange(0, 9, holds=True, lost_from=7)], [held(4, 9)], ResumePoint(9, 0), 2),
    ],
    ids=["all hold", "an empty server", "no tower", "apart", "further than told", "a server without its last updates"],
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


@examples(300)
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
