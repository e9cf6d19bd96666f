"""Damaged packets of the dense gradient, in two processes: who learns of them, and how."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from shardkeep.base.errors import ShardkeepError
from shardkeep.compression.tower.exchange import Exchange
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.dense import gradients as reduce
from shardkeep.workers.dense.tower import Tower, share
from tests.support.cases import every
from tests.support.layers import SPLITS, build
from tests.support.scenarios import Found, Rank, Scenario, played
from tests.support.towers import batch, part_of, train

WORLD = 2


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


def failure_of(tower: Tower, damage: Callable[[torch.Tensor], None]) -> tuple[str, str]:
    """Kind and text of the error that two more steps end with."""
    try:
        if tower.collective.rank == 0:
            with damaging(tower.collective, damage):
                step_of(tower)
        step_of(tower)
        step_of(tower)
    except ShardkeepError as error:
        return type(error).__name__, str(error)
    return "none", ""


def damaged(rank: Rank, case: str) -> tuple[tuple[str, str], bytes]:
    """How training fails, and the digest after another generation has trained on."""
    form, damage, several, _ = CASES[case]
    ddp = functools.partial(DistributedDataParallel, bucket_cap_mb=0.005) if several else DistributedDataParallel
    with mock.patch.object(reduce, "DistributedDataParallel", ddp):
        collective = rank.form()
        tower = build(collective, form)
        train(tower, SPLITS, steps=3)
        failed = failure_of(tower, damage)
        collective.close()
        tower.join(rank.form())
        share(tower, 0, [1])
        train(tower, SPLITS, first=3, steps=2)
    tower.collective.barrier()
    return failed, tower.digest_bytes()


SCENARIOS: dict[str, Scenario] = {case: functools.partial(damaged, case=case) for case in CASES}


@pytest.fixture(scope="module")
def processes() -> Iterator[Found]:
    """What each of two processes found, by case."""
    with played(SCENARIOS, WORLD, limit_s=150) as found:
        yield found


@pytest.mark.waits_for_processes
@every("case", CASES)
def test_a_packet_that_is_none_ends_the_backward_pass_with_a_line_that_names_its_sender(
    processes: Found, case: str
) -> None:
    (kind, text), _ = processes[case][0]
    assert kind == "CorruptMessage" and "\n" not in text
    assert text.startswith("the dense gradient of worker 1: ") and CASES[case][3] in text, text


@pytest.mark.waits_for_processes
@every("case", CASES)
def test_the_sender_hears_that_the_other_left_and_both_go_on_in_another_generation(processes: Found, case: str) -> None:
    (_, digest), ((kind, text), other_digest) = processes[case]
    assert kind == "MemberLost" and "\n" not in text  # and not DeadlineExceeded: it waited for no deadline
    assert text.startswith("worker 1 of 2: the sum of the dense gradients in generation"), text
    assert digest == other_digest
