"""Admission while several threads push the same new ids, as the threads of a server do in `bounded` and `async`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.table.initializers.config import InitConfig
from shardkeep.ps.server.table.optimizers.sgd import SgdConfig
from shardkeep.ps.server.table.policies.config import AdmitConfig
from shardkeep.ps.server.tables import Tables
from tests.support.tables import gradients

THREADS, PUSHES, IDS, ROUNDS = 4, 5, 8, 30
MIN_COUNT = 3


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as the interpreter lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
def test_pushes_at_once_admit_each_id_once_and_lose_no_gradient_after_it() -> None:
    specs = [
        TableSpec(
            name=name,
            dim=2,
            optimizer=SgdConfig(lr=1.0),
            init=InitConfig(name="zeros"),
            admit=AdmitConfig(min_count=MIN_COUNT),
        )
        for name in ("a", "b", "c")
    ]
    tables, together = Tables(specs, seed=3), threading.Barrier(THREADS)

    def push(ids: np.ndarray) -> None:
        parts = {t: (ids, np.ones((ids.size, 2), np.float32)) for t in range(len(specs))}
        together.wait(90)
        for _ in range(PUSHES):
            tables.apply([gradients(parts)], step=0)

    with ThreadPoolExecutor(THREADS) as threads:
        for first in range(0, ROUNDS * IDS, IDS):
            for done in [threads.submit(push, np.arange(first, first + IDS)) for _ in range(THREADS)]:
                done.result(90)

    ids, pushes = np.arange(ROUNDS * IDS), THREADS * PUSHES
    for table, candidates in zip(list(tables)[: len(specs)], list(tables)[len(specs) :], strict=True):
        assert table.num_rows == table.counts()["admitted_rows"] == ids.size and candidates.num_rows == 0
        assert table.counts()["refused_rows"] == (MIN_COUNT - 1) * ids.size
    pulled = np.empty(len(specs) * ids.size * 2, np.float32)
    tables.pull(gradients(dict.fromkeys(range(len(specs)), (ids, pulled))).sections, pulled)
    assert (pulled == -(pushes - MIN_COUNT + 1)).all()
