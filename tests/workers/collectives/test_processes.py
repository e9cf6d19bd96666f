"""Collectives of real processes: as those of threads, and what each gets when another is late, silent or gone."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from shardkeep.base.errors import MemberLost, ShardkeepError
from shardkeep.base.net.sockets import connections
from shardkeep.compression.config import TowerCompressionConfig
from shardkeep.compression.tower import formats as dense_values
from shardkeep.ps.transport.metered import LedgerMeter, WorkerTraffic
from shardkeep.workers.collectives import process_group
from shardkeep.workers.collectives.collective import (
    Collective,
    ThreadCollective,
)
from shardkeep.workers.collectives.metered import MeteredCollective
from shardkeep.workers.collectives.operations import (
    all_gather,
    all_reduce_sum,
    begin_all_gather,
    broadcast_object,
    gather_arrays,
)
from shardkeep.workers.collectives.process_group import ProcessCollective
from shardkeep.workers.dense import gradients as reduce
from tests.support.cases import every
from tests.support.collective_calls import EXPECTED, WORLD, every_call
from tests.support.ranks import run_ranks
from tests.support.scenarios import LIMIT_S, Found, Rank, Scenario, played
from tests.support.towers import Forgetful, seeded_model, tower_of, train

pytestmark = pytest.mark.waits_for_processes

SPLITS = [(0, 13), (13, 18), (18, 24)]
INT8 = TowerCompressionConfig(name="int8")


class Wide(nn.Module):
    """Its gradients, 32 kB, are small for one peer and not for two."""

    def __init__(self, _rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2000)

    def forward(self, dense: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.layer(dense).mean(1, keepdim=True) + sum(e.sum(1, keepdim=True) for e in embeddings.values())


def forgetful_model(_rank: int) -> nn.Module:
    return Forgetful()


def trained(
    collective: Collective, *, make_model: Callable[[int], nn.Module] = seeded_model, **settings: Any
) -> tuple[bytes, int]:
    """Digest after five steps of two micro-batches, and the bytes this rank sent for them."""
    model = make_model(collective.rank)
    traffic = WorkerTraffic()
    tower = tower_of(model=model, collective=MeteredCollective(collective, LedgerMeter(traffic)), **settings)
    train(tower, SPLITS, micro=2)
    assert (tower.sums.by_ddp) == (collective.process_group is not None)
    sent = traffic.ledger.totals()["tower"]
    return tower.digest_bytes(), sum(sent.values()) - sent["framing"]


Failure = tuple[str, str, float]


NO_FAILURE: Failure = ("none", "", 0.0)


def failure_of(call: Callable[[], Any]) -> Failure:
    """Kind and text of the error that `call` ends with, and after how many seconds."""
    started = time.monotonic()
    try:
        call()
    except ShardkeepError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "none", "", time.monotonic() - started


def trained_anew(rank: Rank, *, ring: bool = False, **settings: Any) -> tuple[bytes, int]:
    with mock.patch.object(reduce, "goes_direct", lambda _: False) if ring else contextlib.nullcontext():
        return trained(rank.form(), **settings)


def trained_in_shards(rank: Rank, **settings: Any) -> tuple[bytes, int]:
    with mock.patch.object(dense_values, "ONE_ROUND_BYTES", 0):  # each rank adds a shard
        return trained(rank.form(), **settings)


def moved(rank: Rank) -> tuple[Any, ProcessCollective]:
    """A tower that has trained five steps in two generations, and the collective of the second."""
    collective = rank.form()
    tower = tower_of(model=seeded_model(rank.number), collective=collective)
    train(tower, SPLITS, steps=3, micro=2)
    collective.close()
    collective = rank.form()
    tower.join(collective)
    train(tower, SPLITS, first=3, steps=2, micro=2)
    return tower, collective


def calls(rank: Rank) -> list[Any]:
    return every_call(rank.form())


def with_a_gpu_on_rank_0_alone(rank: Rank) -> tuple[str, float]:
    """The agreed backend, and a sum over the ranks."""
    collective = rank.form(backend="nccl" if rank.number == 0 else "gloo")
    total = torch.tensor([float(rank.number)])
    all_reduce_sum(collective, total, purpose="agreements")
    return collective.backend, total.item()


def digest_of_moved(rank: Rank) -> bytes:
    digest: bytes = moved(rank)[0].digest_bytes()
    return digest


def bytes_on_the_wire(rank: Rank) -> tuple[int, int]:
    """Bytes that are booked for some calls, and that the kernel has counted."""
    formed, traffic = rank.form(), WorkerTraffic()
    collective = MeteredCollective(formed, LedgerMeter(traffic))

    def kernel_sent() -> int:
        now = connections()
        return sum(now[ends].sent for ends in formed.connections)

    at_first = kernel_sent()
    for num_values in (1, 2, 3, 7, 10, 1000, 70_000, 1_500_000):
        all_reduce_sum(collective, torch.ones(num_values), purpose="gradients")
        all_gather(collective, torch.ones(num_values), purpose="gradients")
        collective.broadcast(torch.ones(num_values), source=1, purpose="buffers")
        collective.barrier(purpose="agreements")
    broadcast_object(collective, {"why": "ä" * 1000} if rank.number == 2 else None, source=2, purpose="agreements")
    gather_arrays(collective, np.ones(1000 * rank.number), purpose="metrics")
    collective.barrier(purpose="agreements")
    rank.store.set(f"sent {rank.number}", "")
    rank.store.wait([f"sent {other}" for other in range(WORLD)])  # nobody sends any more
    found = traffic.ledger.totals()["total"], kernel_sent() - at_first
    formed.barrier()  # the connections of a rank that leaves are gone
    return found


def listening_addresses(rank: Rank) -> set[str]:
    rank.form()
    return {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}


def first_alone(rank: Rank) -> tuple[Failure, int]:
    """How rank 0 fails to form a generation that no other rank knows, and the number of the next, which all form."""
    if rank.number == 0:
        failure = failure_of(lambda: rank.form(timeout_s=0.5))
    else:
        failure = NO_FAILURE
        rank.skip()
    rank.form().barrier()
    return failure, rank.generation


def rank_2_dies_before_it_connects(rank: Rank) -> Failure:
    """It has met the others in the store."""
    with mock.patch.object(process_group, "MESH_S", 0.5):
        if rank.number != 2:
            return failure_of(rank.form)
        with mock.patch.object(process_group.dist, "init_process_group", side_effect=MemberLost("died")):
            return failure_of(rank.form)


def late_rank_2(rank: Rank) -> float:
    """The sum that the others wait for, longer than they had to connect."""
    with mock.patch.object(process_group, "MESH_S", 2.0):
        collective = rank.form()
    if rank.number == 2:
        time.sleep(2.5)
    total = torch.tensor([float(rank.number)])
    all_reduce_sum(collective, total, purpose="agreements")
    return total.item()


def silent_rank_2(rank: Rank) -> Failure:
    collective = rank.form()
    if rank.number == 2:
        rank.store.wait(["gave up 0", "gave up 1"])
        return NO_FAILURE
    failure = failure_of(lambda: collective.barrier(timeout_s=0.3))
    rank.store.set(f"gave up {rank.number}", "")
    return failure


def _guarded_wait(collective: Collective, wait: Callable[[], object]) -> None:
    with collective.guard("sum"):
        wait()


def silent_rank_2_with_two_questions_open(rank: Rank) -> list[Failure]:
    """How both questions of the others fail; of one gloo says its deadline, of the other that a pair is closed."""
    collective = rank.form()
    _set_pg_timeout(timedelta(seconds=0.3), dist.group.WORLD)
    if rank.number == 2:
        rank.store.wait(["has asked 0", "has asked 1"])
        return []
    waits = [collective.begin_all_reduce_sum(torch.ones(1)) for _ in range(2)]
    failures = [failure_of(lambda wait=wait: _guarded_wait(collective, wait)) for wait in waits]  # type: ignore[misc]
    rank.store.set(f"has asked {rank.number}", "")
    return failures


def rank_2_leaves_while_others_train(rank: Rank) -> tuple[Failure, int]:
    tower, collective = moved(rank)
    if rank.number == 2:
        collective.close()
        return NO_FAILURE, rank.generation
    return failure_of(lambda: train(tower, SPLITS, first=5)), rank.generation


def rank_0_leaves_with_a_question_open(rank: Rank) -> Failure:
    collective = rank.form()
    question = begin_all_gather(collective, torch.ones(1), purpose="agreements")
    if rank.number != 0:
        failure = failure_of(collective.barrier)
        rank.store.set(f"lost {rank.number}", "")
        return failure
    collective.close()
    rank.store.wait(["lost 1", "lost 2"])
    assert callable(question)  # somebody still has it
    return NO_FAILURE


def trained_with_torchs_checks(rank: Rank) -> tuple[bytes, int]:
    """As with TORCH_DISTRIBUTED_DEBUG=DETAIL, which torch reads when it is imported."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return trained_anew(rank, sync=True)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


SCENARIOS: dict[str, Scenario] = {
    "calls": calls,
    "sync": functools.partial(trained_anew, sync=True),
    "shards": functools.partial(trained_in_shards, sync=True),
    "int8": functools.partial(trained_in_shards, sync=False, compression=INT8),
    "moved": digest_of_moved,
    "bounded": functools.partial(trained_anew, sync=False),
    "ring": functools.partial(trained_anew, ring=True, sync=False),
    "wide": functools.partial(trained_anew, sync=False, make_model=Wide),
    "forgetful": functools.partial(trained_anew, sync=True, make_model=forgetful_model),
    "wire": bytes_on_the_wire,
    "listens": listening_addresses,
    "mixed": with_a_gpu_on_rank_0_alone,
    "alone": first_alone,
    "unconnected": rank_2_dies_before_it_connects,
    "late": late_rank_2,
    "silent": silent_rank_2,
    "two open": silent_rank_2_with_two_questions_open,
    "lost": rank_2_leaves_while_others_train,
    "left open": rank_0_leaves_with_a_question_open,
    "checked": trained_with_torchs_checks,
}


@pytest.fixture(scope="module")
def processes() -> Iterator[Found]:
    with played(SCENARIOS, WORLD, limit_s=120) as found:
        yield found


def test_processes_get_what_threads_get(processes):
    assert processes["calls"] == [EXPECTED] * WORLD


def test_ranks_with_and_without_a_gpu_form_one_group_over_gloo(processes):
    assert processes["mixed"] == [("gloo", float(sum(range(WORLD))))] * WORLD


def threads(**settings: Any) -> list[bytes]:
    """The digests of ranks that are threads."""

    def work(collective: ThreadCollective) -> bytes:
        tower = tower_of(model=models[collective.rank], collective=collective, **settings)
        train(tower, SPLITS, micro=2)
        return tower.digest_bytes()

    models = [seeded_model(rank) for rank in range(WORLD)]
    return run_ranks(ThreadCollective.group(WORLD), work)


def test_processes_in_sync_mode_train_bit_for_bit_as_threads(processes):
    expected = threads()
    assert [digest for digest, _ in processes["sync"]] == expected
    assert processes["moved"] == expected  # a generation more on the way
    assert [digest for digest, _ in processes["shards"]] == expected


def test_shards_of_int8_are_added_by_processes_as_by_threads(processes, monkeypatch):
    monkeypatch.setattr(dense_values, "ONE_ROUND_BYTES", 0)
    assert [digest for digest, _ in processes["int8"]] == threads(compression=INT8)


def test_the_checks_of_torchs_debug_level_detail_end_no_worker(processes):
    assert processes["checked"] == processes["sync"]


@every("case", ["bounded", "ring", "forgetful"])
def test_replicas_are_equal_in_every_mode_and_with_parameters_left_out(processes, case):
    assert len({digest for digest, _ in processes[case]}) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the counters of a socket")
def test_what_is_counted_as_sent_is_what_the_kernel_saw(processes):
    counted, seen = map(sum, zip(*processes["wire"], strict=True))
    assert seen > 30e6
    assert counted == pytest.approx(seen, abs=500)


def test_sent_bytes_count_every_reduced_gradient(processes):
    values = sum(p.numel() for p in seeded_model().parameters())
    tensors = len(list(seeded_model().parameters()))
    first = 2 * (4 * values + tensors)  # the first step goes flat and says which parameters are used
    assert {sent for _, sent in processes["sync"]} == {first + 4 * 2 * 4 * values}
    share = sum(-(-p.numel() // WORLD) for p in seeded_model().parameters())  # a rank adds one and gives back the sum
    assert {sent for _, sent in processes["shards"]} == {5 * 2 * 2 * 4 * share + 2 * tensors}
    assert all(abs(sent - first - 4 * 4 * values * 4 / 3) <= 16 for _, sent in processes["ring"])


def test_what_is_small_for_each_peer_and_large_for_all_goes_around_the_ring(processes):
    values = 4 * 2000
    first = 2 * (4 * values + 2)  # the first step goes flat
    assert all(abs(sent - first - 4 * 4 * values * 4 / 3) <= 16 for _, sent in processes["wide"])


def test_small_gradients_are_added_in_rank_order_in_every_mode(processes):
    assert processes["bounded"] == processes["sync"]


def test_listeners_are_bound_to_loopback_only(processes):
    assert processes["listens"] == [{"127.0.0.1"}] * WORLD


def test_a_rank_that_dies_before_it_connects_holds_up_the_others_for_no_step_timeout(processes):
    for kind, text, waited_s in processes["unconnected"][:2]:
        assert kind in ("DeadlineExceeded", "MemberLost") and waited_s < LIMIT_S, text
        assert "forming the group in generation" in text


def test_ranks_that_are_connected_wait_for_each_other_to_the_deadline_of_a_call(processes):
    assert processes["late"] == [3.0] * WORLD


def test_a_silent_process_is_reported_when_the_deadline_is_over(processes):
    for rank, (kind, text, waited_s) in enumerate(processes["silent"][:2]):
        assert kind == "DeadlineExceeded" and waited_s < LIMIT_S
        assert re.match(rf"worker {rank} of 3: barrier in generation \d+ failed after", text), text


def test_every_question_that_a_silent_process_leaves_open_fails_as_the_groups(processes):
    for failures in processes["two open"][:2]:
        assert {kind for kind, _, _ in failures} <= {"DeadlineExceeded", "MemberLost"} and len(failures) == 2


def test_a_rank_whom_nobody_met_says_so_and_meets_the_others_in_the_next_generation(processes):
    ((kind, text, waited_s), number), *_ = processes["alone"]
    assert kind == "DeadlineExceeded" and waited_s < LIMIT_S
    assert text.startswith(f"worker 0 of 3: forming the group in generation {number - 1} failed after"), text
    assert [of_all for _, of_all in processes["alone"]] == [number] * WORLD


def test_a_process_that_goes_away_during_the_backward_pass_is_reported_at_once(processes):
    for rank, ((kind, text, _), number) in enumerate(processes["lost"][:2]):
        assert kind == "MemberLost" and "\n" not in text  # and not DeadlineExceeded: it waited for no deadline
        assert text.startswith(f"worker {rank} of 3: the sum of the dense gradients in generation {number}"), text


def test_a_process_that_leaves_with_a_question_open_is_reported_at_once(processes):
    assert [kind for kind, _, _ in processes["left open"][1:]] == ["MemberLost"] * 2
