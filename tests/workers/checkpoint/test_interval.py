"""The steps between two checkpoints, over generations."""

from __future__ import annotations

from shardkeep.workers.checkpoint.interval import AUTO_AFTER_STEPS, CheckpointInterval
from shardkeep.workers.collectives.collective import Solo, ThreadCollective
from tests.support.ranks import run_ranks


def test_a_newcomer_takes_the_interval_that_another_rank_has_chosen() -> None:
    knows, newcomer = (CheckpointInterval(None, lambda: [0]) for _ in range(2))
    knows.enter(0, rank=0)
    chosen = knows.choose(AUTO_AFTER_STEPS, Solo())
    assert chosen is not None and knows.ends(chosen) and not newcomer.ends(chosen)
    run_ranks(ThreadCollective.group(2), lambda ranks: (newcomer, knows)[ranks.rank].share(ranks))
    assert newcomer.ends(chosen) and not newcomer.ends(chosen + 1)
    assert newcomer.choose(10**6, Solo()) is None


def test_an_open_interval_is_chosen_from_the_steps_of_its_generation() -> None:
    interval = CheckpointInterval(None, lambda: [0])
    interval.enter(10, rank=0)
    assert interval.choose(10 + AUTO_AFTER_STEPS - 1, Solo()) is None
    run_ranks(ThreadCollective.group(1), interval.share)
    interval.enter(200, rank=0)  # another generation, before any choice
    assert interval.choose(200 + AUTO_AFTER_STEPS - 1, Solo()) is None
    assert interval.choose(200 + AUTO_AFTER_STEPS, Solo()) is not None
