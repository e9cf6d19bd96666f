"""Damaged packets of the dense gradient, in two processes: who learns of them, how, and how soon."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from shardkeep.base.errors import ShardkeepError
from shardkeep.compression.tower.exchange import Exchange
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.process_group import ProcessCollective
from shardkeep.workers.dense import gradients as reduce
from shardkeep.workers.dense.tower import Tower, share
from tests.support.layers import SPLITS, build
from tests.support.processes import in_processes
from tests.support.towers import batch, part_of, train

WORLD = 2
TIMEOUT_S = 60.0


def zeros(packet_R: torch.Tensor) -> None:
    packet_R.zero_()


def half(packet_R: torch.Tensor) -> None:
    packet_R[len(packet_R) // 2 :] = 0


def longer(packet_R: torch.Tensor) -> None:
    """A bit of a length, which is the whole packet: one that might well be."""
    if len(packet_R) == 8:
        packet_R[0] ^= 16


def ones(packet_R: torch.Tensor) -> None:
    """Of a code, not of its length."""
    if len(packet_R) != 8:
        packet_R.fill_(255)


CASES: dict[str, tuple[str, Callable[[torch.Tensor], None], bool, str]] = {
    "top-k without positions": ("topk", zeros, False, "0 positions came, not 80 of "),
    "top-k cut off": ("topk", half, False, "positions came, not 80 of "),
    "top-k in several buckets": ("topk", zeros, True, "0 positions came, not "),
    "a length with one bit wrong": ("lossless", longer, False, " float32s, or its length is damaged"),
    "a length of zeros": ("lossless", zeros, False, "a code of 0 bytes came for "),
    "a code of ones": ("lossless", ones, False, " are no coded float32s"),
    "codes in several buckets": ("lossless", ones, True, " are no coded float32s"),
}
"""Form, what happens to rank 1's packet on its way to rank 0, whether the gradients go in several buckets, and what
rank 0 says."""


def damaging(collective: Collective, damage: Callable[[torch.Tensor], None]) -> Any:
    """Makes this process receive damaged packets in its backward passes."""
    begin = collective.begin_exchange

    def begin_damaged(exchange: Exchange, **purpose: Any) -> Callable[[], torch.Tensor]:
        wait = begin(exchange, **purpose)

        def wait_damaged() -> torch.Tensor:
            packets_WR = wait()
            damage(packets_WR[1])
            return packets_WR

        return wait_damaged

    return mock.patch.object(collective, "begin_exchange", begin_damaged)


def step_of(tower: Tower) -> None:
    dense, leaves, label = part_of(batch(tower.step, 24), *SPLITS[tower.collective.rank])
    tower.backward(dense, leaves, label, 1 / 24)
    tower.update(tower.step)


def failure_of(tower: Tower, damage: Callable[[torch.Tensor], None]) -> tuple[str, str, float]:
    """Kind and text of the error that two more steps end with, and after how many seconds."""
    started = time.monotonic()
    try:
        if tower.collective.rank == 0:
            with damaging(tower.collective, damage):
                step_of(tower)
        step_of(tower)
        step_of(tower)
    except ShardkeepError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "none", "", time.monotonic() - started


def in_a_process(rank: int, store: Any) -> dict[Any, Any]:
    small_buckets = functools.partial(DistributedDataParallel, bucket_cap_mb=0.005)
    found: dict[Any, Any] = {}
    for number, (case, (form, damage, several, _)) in enumerate(CASES.items()):

        def join(generation: int) -> ProcessCollective:
            return ProcessCollective(store, rank=rank, world_size=WORLD, generation=generation, timeout_s=TIMEOUT_S)

        with mock.patch.object(
            reduce, "DistributedDataParallel", small_buckets if several else DistributedDataParallel
        ):
            collective = join(2 * number)
            tower = build(collective, form)
            train(tower, SPLITS, steps=3)
            failed = failure_of(tower, damage)
            collective.close()
            collective = join(2 * number + 1)
            tower.join(collective)
            share(tower, 0, [1])
            train(tower, SPLITS, first=3, steps=2)
        found[case] = failed, tower.digest_bytes()
        collective.barrier()
        collective.close()
    return found


@pytest.fixture(scope="module")
def processes() -> Iterator[list[dict[str, Any]]]:
    """What each of two processes found, in rank order."""
    with in_processes(in_a_process, WORLD, limit_s=150, store_s=TIMEOUT_S) as found:
        yield found


@pytest.mark.waits_for_processes
@pytest.mark.parametrize("case", CASES)
def test_a_packet_that_is_none_ends_the_backward_pass_with_a_line_that_names_its_sender(processes, case):
    (kind, text, waited_s), _ = processes[0][case]
    assert kind == "CorruptMessage" and "\n" not in text and waited_s < TIMEOUT_S / 2
    assert text.startswith("the dense gradient of worker 1: ") and CASES[case][3] in text, text


@pytest.mark.waits_for_processes
@pytest.mark.parametrize("case", CASES)
def test_the_sender_hears_at_once_that_the_other_left(processes, case):
    (kind, text, waited_s), _ = processes[1][case]
    assert kind == "MemberLost" and "\n" not in text and waited_s < TIMEOUT_S / 2
    assert text.startswith("worker 1 of 2: the sum of the dense gradients in generation"), text


@pytest.mark.waits_for_processes
@pytest.mark.parametrize("case", CASES)
def test_both_go_on_in_another_generation(processes, case):
    assert processes[0][case][1] == processes[1][case][1]


def dying(rank: int, _store: Any) -> dict[Any, Any]:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {}


@pytest.mark.waits_for_processes
def test_a_process_that_dies_without_its_results_fails_the_tests_that_read_them_at_once() -> None:
    began = time.monotonic()
    line = r"ended without a result \(rank, exit code\): \[\(1, -9\)\]"
    with pytest.raises(AssertionError, match=line), in_processes(dying, WORLD, limit_s=150):
        pass
    assert time.monotonic() - began < 75
