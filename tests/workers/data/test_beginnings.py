"""Beginnings: targets of evaluation rows that training lists give away are found, and chance finds none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardkeep.workers.data.beginnings import known_targets, shares
from shardkeep.workers.data.sides import sides_of
from tests.support.cases import every
from tests.support.retrieval import NEXT, Takes

DRAW = np.random.default_rng(0)
WALKS = [np.cumsum(np.where(DRAW.random(12) < 0.8, 1, DRAW.integers(0, 40, 12))) % 40 for _ in range(400)]
HISTORIES: dict[str, list[Any]] = {
    "by chance": [DRAW.integers(0, 150, 12) for _ in range(400)],
    "walks": WALKS,  # two of three next items are known
    "few items": [DRAW.integers(0, 4, 12) for _ in range(400)],
    "popular items": [np.minimum(DRAW.zipf(1.5, DRAW.integers(2, 10)), 30) for _ in range(900)],
    "equal histories": [np.arange(start, start + 12) % 20 for start in DRAW.integers(0, 20, 400)],
}
Rows = list[tuple[Any, int]]


class Lists(Takes):
    """Rows with these lists and items."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(NEXT, len(rows))
        self.item = np.array([item for _, item in rows])
        self.lengths = np.array([len(entries) for entries, _ in rows], np.int32)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        self.seen = np.concatenate([entries for entries, _ in rows])


def rows_of(histories: list[Any]) -> Rows:
    """A row for each beginning of a history."""
    return [(entries[:k], entries[k]) for entries in histories for k in range(1, len(entries))]


def told(train: Rows, held: Rows) -> list[str]:
    return known_targets(Lists(train), Lists(held), sides_of(NEXT, ["item"]))


@every(("name", "histories"), HISTORIES.items(), ids=HISTORIES)
def test_rows_of_one_history_on_both_sides_are_found_and_users_on_one_side_are_not(name: str, histories: Any) -> None:
    rows = rows_of(histories)
    held_N = np.random.default_rng(1).random(len(rows)) < 0.1
    parts = [[row for row, held in zip(rows, held_N, strict=True) if held == side] for side in (False, True)]
    assert len(told(*parts)) == (name != "equal histories")  # of which chance gives all
    users = len(histories) * 9 // 10
    assert told(rows_of(histories[:users]), rows_of(histories[users:])) == []
    assert told([(h[:-2], h[-2]) for h in histories if len(h) > 2], [(h[:-1], h[-1]) for h in histories]) == []
    assert told([row for h in histories for row in rows_of([h])[:-1]], [rows_of([h])[-1] for h in histories]) == []


def test_the_share_is_that_of_a_search_through_all_lists_and_few_rows_are_no_share() -> None:
    rows = rows_of(HISTORIES["by chance"][:40])
    train, held = rows[::3] + rows[1::3], rows[2::3]
    lists = [tuple(entries) for entries, _ in train]
    known = [any(each[: len(own) + 1] == (*own, item) for each in lists) for own, item in held]
    assert shares(Lists(train), Lists(held), "seen_item", "item")[0] == pytest.approx(np.mean(known))
    assert told(train, held)[0].startswith(f"{np.mean(known):.0%} of the evaluation targets stand in training lists")
    assert shares(Lists(train), Lists(held[:49]), "seen_item", "item") == (0.0, 0.0)
