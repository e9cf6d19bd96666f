"""Two records of a process as one: counts are the second's, and means are those of both intervals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.run.merged_records import merged

finite = st.floats(0.0, 1e3)
intervals = st.lists(
    st.fixed_dictionaries({"steps": st.integers(0, 50), "loss": finite, "pull_wait": finite, "push": finite}),
    min_size=2,
    max_size=6,
)


def worker(steps: int = 10, total: float = 100.0, **more: Any) -> dict[str, Any]:
    return {"every_s": 5.0, "steps": steps, "step_ms": {"total": total, "push": total}, "wait_ms": {}, **more}


@given(intervals=intervals)
def test_sums_over_steps_survive_any_number_of_merges(intervals: list[dict[str, Any]]) -> None:
    records = [
        worker(
            at["steps"],
            step_ms={"total": at["pull_wait"] + at["push"], "pull_wait": at["pull_wait"], "push": at["push"]},
            loss=at["loss"] if at["steps"] else None,
        )
        for at in intervals
    ]
    last = records[0]
    for record in records[1:]:
        last = merged(last, record)
    steps = sum(at["steps"] for at in intervals)
    assert last["steps"] == steps and last["every_s"] == 5.0 * len(records)
    for part in ("pull_wait", "push"):
        milliseconds = sum(at["steps"] * at[part] for at in intervals)
        assert last["step_ms"][part] * steps == pytest.approx(milliseconds, abs=1e-3 * (1 + steps))
    losses = sum(at["steps"] * at["loss"] for at in intervals)
    assert (last["loss"] or 0.0) * steps == pytest.approx(losses, abs=1e-5 * (1 + steps))


def test_counts_so_far_and_figures_of_now_are_those_of_the_second() -> None:
    first = worker(step=10, time="a", ids=5, bytes={"total": 1}, rss_bytes=7, unsent_share=0.5)
    second = worker(step=20, time="b", ids=9, bytes={"total": 3}, rss_bytes=6, unsent_share=None)
    found = merged(first, second)
    assert found.keys() == second.keys()
    for key in ("step", "time", "ids", "bytes", "rss_bytes", "unsent_share"):
        assert found[key] == second[key]


def test_a_loss_that_was_not_finite_is_not_hidden_by_one_that_is() -> None:
    assert merged(worker(loss=None), worker(loss=0.5))["loss"] is None
    assert merged(worker(steps=0, loss=None), worker(loss=0.5))["loss"] == 0.5
    assert merged(worker(steps=1, loss=0.2), worker(steps=3, loss=0.6))["loss"] == 0.5


def test_a_rate_is_that_of_the_samples_over_the_seconds_of_both() -> None:
    slow, fast = worker(10, 900.0, samples_per_s=100.0), worker(10, 100.0, samples_per_s=900.0)
    assert merged(slow, fast)["samples_per_s"] == 180.0  # 900 + 900 samples in 9 + 1 seconds


def test_a_server_that_was_waited_for_in_one_of_them_counts_for_all_steps() -> None:
    one, other = worker(10, wait_ms={"server 0": 2.0}), worker(30, wait_ms={"server 1": 4.0})
    assert merged(one, other)["wait_ms"] == {"server 0": 0.5, "server 1": 3.0}


def test_times_of_requests_are_weighted_by_the_requests_of_their_interval() -> None:
    first = {"pulls": 130, "pushes": 70, "request_ms": 1.0, "every_s": 5.0}
    second = {"pulls": 330, "pushes": 170, "request_ms": 5.0, "every_s": 5.0}
    assert merged(first, second, requests_before=100.0) == {**second, "every_s": 10.0, "request_ms": 4.0}
    idle = {**second, "request_ms": None}
    assert merged(second, idle)["request_ms"] == 5.0
    assert merged(idle, {**idle})["request_ms"] is None


def test_records_without_keys_merge_to_what_they_have() -> None:
    assert merged({}, {"time": "b"}) == {"time": "b"}
    assert merged({"steps": "many", "step_ms": 3}, {"steps": 2, "loss": 0.5}) == {"steps": 2, "loss": 0.5}
