#!/usr/bin/env python3
"""What do ranks and best items cost? CPU of one thread, for the ranks of many users, and for the best of a million.

The peer computes the same by torch alone: ranks by a comparison of all scores, best items by topk.
"""

# B = users, M = items, E = width of a vector

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import harness
import numpy as np
import psutil
import torch

from shardkeep.workers.retrieval.ranking import ItemIndex

WIDTH, K = 64, 100
USERS, ITEMS = 250_000, 50_000
SAMPLED, BATCH = 4_096, 2_048
"""Users that a round ranks, in batches of an evaluation; seconds are of all users."""
MANY_ITEMS = 1_000_000
TARGET_S, TARGET_MB = 120.0, 300.0
TARGET_MS = {1: 25.0, 64: 5.0}
"""CPU a query by the queries of a batch."""
PEER_BLOCK = 256


def vectors(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, WIDTH), np.float32)


def ranks(form: str, index: ItemIndex, seconds: float) -> harness.Figures:
    """CPU seconds of all users, and memory above the vectors."""
    users_BE, targets_B = vectors(SAMPLED, 1), np.random.default_rng(2).integers(0, ITEMS, SAMPLED)
    items_EM, process = torch.from_numpy(index.vectors_ME).T, psutil.Process()
    held = process.memory_info().rss
    peaks, done = [held], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peaks.append(process.memory_info().rss)

    def peer(users: np.ndarray, targets: np.ndarray) -> None:
        for start in range(0, len(users), PEER_BLOCK):
            scores_BM = torch.from_numpy(users[start : start + PEER_BLOCK]) @ items_EM
            own_B1 = scores_BM.gather(1, torch.from_numpy(targets[start : start + PEER_BLOCK])[:, None])
            (scores_BM >= own_B1).sum(1)

    find: Callable[[np.ndarray, np.ndarray], object] = index.ranks if form == "shardkeep" else peer
    watcher = threading.Thread(target=watch)
    watcher.start()
    find(users_BE[:BATCH], targets_B[:BATCH])
    done.set()
    watcher.join()
    count, began, until = 0, time.process_time(), time.monotonic() + seconds
    while not count or time.monotonic() < until:
        start = count % SAMPLED
        find(users_BE[start : start + BATCH], targets_B[start : start + BATCH])
        count += BATCH
    return {"cpu_s": (time.process_time() - began) / count * USERS, "mb": (max(peaks) - held) / 1e6}


def best(form: str, index: ItemIndex, queries: int, seconds: float) -> harness.Figures:
    """CPU milliseconds a query, in batches of `queries`."""
    users_BE, items_EM = vectors(queries, 3), torch.from_numpy(index.vectors_ME).T

    def find() -> None:
        if form == "shardkeep":
            index.top(users_BE, K, size=queries)
        else:
            (torch.from_numpy(users_BE) @ items_EM).topk(K)

    find()
    runs, began, until = 0, time.process_time(), time.monotonic() + seconds
    while not runs or time.monotonic() < until:
        find()
        runs += 1
    return {"cpu_ms_per_query": (time.process_time() - began) / runs / queries * 1e3}


def main() -> None:
    options = harness.parse(harness.arguments(__doc__ or ""))
    torch.set_num_threads(1)
    index, results = ItemIndex(vectors(ITEMS, 0)), dict[str, object]()
    forms = {form: partial(ranks, form, index) for form in ("shardkeep", "torch")}
    found = harness.alternate(forms, rounds=options.rounds, seconds=options.seconds)
    harness.show_ratio("CPU of ranks beside torch", harness.ratios(found, *forms, "cpu_s"), 1.0)
    results["ranks"] = {"rounds": found, "target_s": TARGET_S, "target_mb": TARGET_MB}
    index = ItemIndex(vectors(MANY_ITEMS, 0))
    for queries, target in TARGET_MS.items():
        forms = {form: partial(best, form, index, queries) for form in ("shardkeep", "torch")}
        found = harness.alternate(forms, rounds=options.rounds, seconds=options.seconds)
        harness.show_ratio(
            f"CPU a query of {queries} beside torch", harness.ratios(found, *forms, "cpu_ms_per_query"), 1.0
        )
        results[f"best, {queries}"] = {"rounds": found, "target_ms": target}
    shape = {"users": USERS, "items": ITEMS, "many_items": MANY_ITEMS, "dim": WIDTH, "k": K}
    harness.write(options.json, "retrieval_ranks", {"shape": shape, "cases": results})


if __name__ == "__main__":
    main()
