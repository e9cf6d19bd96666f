"""What a cache could save at best, against a plain count."""

from __future__ import annotations

import numpy as np
import pytest

from shardkeep.estimate.rereads import Rereads, rereads

Reads = list[tuple[int, int, dict[str, np.ndarray]]]


def ids(*values: int) -> dict[str, np.ndarray]:
    return {"a": np.array(values, np.int64)}


@pytest.mark.parametrize(("reads", "again", "changed"), [
    ([], 0.0, 0.0),
    ([(0, 0, ids(1, 2)), (1, 0, ids(1, 3))], 1 / 4, 0.0),
    ([(0, 0, ids(7)), (0, 1, ids(7)), (1, 0, ids(7))], 1 / 3, 1 / 3),  # the other's push of the step of the first read
    ([(0, 0, ids(7)), (1, 0, ids(7)), (1, 1, ids(7))], 1 / 3, 0.0),  # pushed after the second read
    ([(0, 0, ids(7)), (1, 1, ids(7)), (5, 0, ids(7))], 1 / 3, 1 / 3),
    ([(0, 0, {"a": np.array([7])}), (1, 0, {"b": np.array([7])})], 0.0, 0.0),  # another table's id
    ([(0, 0, ids()), (1, 0, ids())], 0.0, 0.0),
])  # fmt: skip
def test_reads_by_hand(reads: Reads, again: float, changed: float) -> None:
    assert rereads(reads) == Rereads(pytest.approx(again), pytest.approx(changed))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_random_reads_are_counted_as_a_plain_loop_counts_them(workers: int) -> None:
    rng = np.random.default_rng(workers)
    reads: Reads = []
    last: dict[tuple[str, int, int], int] = {}
    pushed: dict[tuple[str, int], list[tuple[int, int]]] = {}
    total = again = changed = 0
    for step in range(12):
        now = []
        for worker in range(workers):
            drawn = {name: np.unique(rng.zipf(1.3, 20) % 60 - 5).astype(np.int64) for name in ("a", "b")}
            reads.append((step, worker, drawn))
            for name, ids_U in drawn.items():
                for id_ in ids_U.tolist():
                    total += 1
                    before = last.get((name, id_, worker))
                    if before is not None:
                        again += 1
                        others = [s for s, w in pushed.get((name, id_), []) if w != worker and s >= before]
                        changed += bool(others)
                    now.append((name, id_, worker))
        for name, id_, worker in now:
            last[name, id_, worker] = step
            pushed.setdefault((name, id_), []).append((step, worker))
    found = rereads(reads)
    assert (found.again, found.changed) == (pytest.approx(again / total), pytest.approx(changed / total))
    assert again and bool(changed) == (workers > 1)
