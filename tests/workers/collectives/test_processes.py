"""Collectives of real processes: as those of threads, and what each gets when another is late, silent or gone."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import time
from datetime import timedelta
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from shardkeep.base.errors import MemberLost, ShardkeepError
from shardkeep.base.net.sockets import connections
from shardkeep.compression.config import TowerCompressionConfig
from shardkeep.compression.tower import formats as dense_values
from shardkeep.ps.transport.metered import LedgerMeter, WorkerTraffic
from shardkeep.workers.collectives import process_group
from shardkeep.workers.collectives.collective import ThreadCollective
from shardkeep.workers.collectives.metered import MeteredCollective
from shardkeep.workers.collectives.operations import (
    all_gather,
    all_reduce_sum,
    begin_all_gather,
    broadcast_object,
    gather_arrays,
)
from shardkeep.workers.dense import gradients as reduce
from tests.support.collective_calls import EXPECTED, WORLD, every_call
from tests.support.ranks import run_ranks
from tests.support.scenarios import LIMIT_S, played
from tests.support.towers import seeded_model, tower_of, train

pytestmark = pytest.mark.waits_for_processes

SPLITS = [(0, 13), (13, 18), (18, 24)]
TOPK = TowerCompressionConfig(name="topk")


def trained(rank, *, make_model=seeded_model, ring=False, shards=False, **settings):
    """Digest after five steps of two micro-batches, and the bytes this rank sent for them."""
    with contextlib.ExitStack() as changes:
        if ring:
            changes.enter_context(mock.patch.object(reduce, "goes_direct", lambda _: False))
        if shards:  # each rank adds one
            changes.enter_context(mock.patch.object(dense_values, "ONE_ROUND_BYTES", 0))
        collective, traffic = rank.form(), WorkerTraffic()
        metered = MeteredCollective(collective, LedgerMeter(traffic))
        tower = tower_of(model=make_model(collective.rank), collective=metered, **settings)
        train(tower, SPLITS, micro=2)
    assert tower.sums.by_ddp
    sent = traffic.ledger.totals()["tower"]
    return tower.digest_bytes(), sum(sent.values()) - sent["framing"]


def failure_of(call):
    """Kind and text of the error that `call` ends with, and after how many seconds."""
    started = time.monotonic()
    try:
        call()
    except ShardkeepError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "none", "", time.monotonic() - started


def wide_model(rank):
    """Its gradients, 32 kB, are small for one peer and not for two."""
    return seeded_model(rank, hidden=[600])


def trained_with_torchs_checks(rank):
    """As with TORCH_DISTRIBUTED_DEBUG=DETAIL, which torch reads when it is imported."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return trained(rank, sync=True)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def moved(rank):
    """A tower that has trained five steps in two generations, and the collective of the second."""
    collective = rank.form()
    tower = tower_of(model=seeded_model(rank.number), collective=collective)
    train(tower, SPLITS, steps=3, micro=2)
    collective.close()
    collective = rank.form()
    tower.join(collective)
    train(tower, SPLITS, first=3, steps=2, micro=2)
    return tower, collective


def digest_of_moved(rank):
    return moved(rank)[0].digest_bytes()


def calls(rank):
    return every_call(rank.form())


def with_a_gpu_on_rank_0_alone(rank):
    """The agreed backend, a sum over the ranks, and the addresses that this process listens at."""
    collective = rank.form(backend="nccl" if rank.number == 0 else "gloo")
    total = torch.tensor([float(rank.number)])
    all_reduce_sum(collective, total, purpose="agreements")
    listening = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}
    return collective.backend, total.item(), listening


def bytes_on_the_wire(rank):
    """Bytes that are booked for some calls, and that the kernel has counted."""
    formed, traffic = rank.form(), WorkerTraffic()
    collective = MeteredCollective(formed, LedgerMeter(traffic))

    def kernel_sent():
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


def first_alone(rank):
    """How rank 0 fails to form a generation that no other rank knows, and the number of the next, which all form."""
    failure = None
    if rank.number == 0:
        failure = failure_of(lambda: rank.form(timeout_s=0.5))
    else:
        rank.skip()
    rank.form().barrier()
    return failure, rank.generation


def rank_2_dies_before_it_connects(rank):
    """It has met the others in the store."""
    with mock.patch.object(process_group, "MESH_S", 0.5):
        if rank.number != 2:
            return failure_of(rank.form)
        with mock.patch.object(process_group.dist, "init_process_group", side_effect=MemberLost("died")):
            return failure_of(rank.form)


def late_rank_2(rank):
    """The sum that the others wait for, longer than they had to connect."""
    with mock.patch.object(process_group, "MESH_S", 2.0):
        collective = rank.form()
    if rank.number == 2:
        time.sleep(2.5)
    total = torch.tensor([float(rank.number)])
    all_reduce_sum(collective, total, purpose="agreements")
    return total.item()


def silent_rank_2(rank):
    collective = rank.form()
    if rank.number == 2:
        rank.store.wait(["gave up 0", "gave up 1"])
        return None
    failure = failure_of(lambda: collective.barrier(timeout_s=0.3))
    rank.store.set(f"gave up {rank.number}", "")
    return failure


def silent_rank_2_with_two_questions_open(rank):
    """How both questions of the others fail; of one gloo says its deadline, of the other that a pair is closed."""
    collective = rank.form()
    _set_pg_timeout(timedelta(seconds=0.3), dist.group.WORLD)
    if rank.number == 2:
        rank.store.wait(["has asked 0", "has asked 1"])
        return []

    def answer(wait):
        with collective.guard("sum"):
            wait()

    waits = [collective.begin_all_reduce_sum(torch.ones(1)) for _ in range(2)]
    failures = [failure_of(functools.partial(answer, wait)) for wait in waits]
    rank.store.set(f"has asked {rank.number}", "")
    return failures


def rank_2_leaves_while_others_train(rank):
    tower, collective = moved(rank)
    if rank.number == 2:
        collective.close()
        return None, rank.generation
    return failure_of(lambda: train(tower, SPLITS, first=5)), rank.generation


def rank_0_leaves_with_a_question_open(rank):
    collective = rank.form()
    question = begin_all_gather(collective, torch.ones(1), purpose="agreements")
    if rank.number != 0:
        failure = failure_of(collective.barrier)
        rank.store.set(f"lost {rank.number}", "")
        return failure[0]
    collective.close()
    rank.store.wait(["lost 1", "lost 2"])
    assert callable(question)  # somebody still has it
    return None


SCENARIOS = {
    "calls": calls,
    "sync": functools.partial(trained, sync=True),
    "shards": functools.partial(trained, shards=True, sync=True),
    "topk": functools.partial(trained, shards=True, sync=False, compression=TOPK),
    "moved": digest_of_moved,
    "bounded": functools.partial(trained, sync=False),
    "ring": functools.partial(trained, ring=True, sync=False),
    "wide": functools.partial(trained, sync=False, make_model=wide_model),
    "wire": bytes_on_the_wire,
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
def processes():
    with played(SCENARIOS, WORLD, limit_s=120) as found:
        yield found


def test_processes_get_what_threads_get_and_ranks_with_and_without_a_gpu_form_one_group(processes):
    assert processes["calls"] == [EXPECTED] * WORLD
    assert processes["mixed"] == [("gloo", float(sum(range(WORLD))), {"127.0.0.1"})] * WORLD, "on loopback only"


def threads(**settings):
    """The digests of ranks that are threads."""

    def work(collective):
        tower = tower_of(model=models[collective.rank], collective=collective, **settings)
        train(tower, SPLITS, micro=2)
        return tower.digest_bytes()

    models = [seeded_model(rank) for rank in range(WORLD)]
    return run_ranks(ThreadCollective.group(WORLD), work)


def test_processes_train_bit_for_bit_as_threads(processes, monkeypatch):
    expected = threads()
    assert [digest for digest, _ in processes["sync"]] == expected
    assert processes["moved"] == expected  # a generation more on the way
    assert [digest for digest, _ in processes["shards"]] == expected
    assert processes["bounded"] == processes["sync"], "small gradients are added in rank order in every mode"
    assert processes["checked"] == processes["sync"], "torch's checks of level DETAIL end no worker"
    assert len({digest for digest, _ in processes["ring"]}) == 1
    monkeypatch.setattr(dense_values, "ONE_ROUND_BYTES", 0)
    assert [digest for digest, _ in processes["topk"]] == threads(compression=TOPK)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the counters of a socket")
def test_what_is_counted_as_sent_is_what_the_kernel_saw(processes):
    counted, seen = map(sum, zip(*processes["wire"], strict=True))
    assert seen > 30e6
    assert counted == pytest.approx(seen, abs=500)


def test_sent_bytes_count_every_reduced_gradient(processes):
    for case, model in (("sync", seeded_model()), ("ring", seeded_model()), ("wide", wide_model(0))):
        sizes = [p.numel() for p in model.parameters()]
        first = 2 * (4 * sum(sizes) + len(sizes))  # the first step goes flat and says which parameters are used
        later = 4 * 4 * sum(sizes) * (2 if case == "sync" else 4 / 3)  # large buckets go around the ring
        assert all(abs(sent - first - later) <= (0 if case == "sync" else 16) for _, sent in processes[case]), case
    sizes = [p.numel() for p in seeded_model().parameters()]
    share = sum(-(-size // WORLD) for size in sizes)  # a rank adds one and gives back the sum
    assert {sent for _, sent in processes["shards"]} == {5 * 2 * 2 * 4 * share + 2 * len(sizes)}


def test_a_rank_that_dies_before_it_connects_holds_up_the_others_for_no_step_timeout(processes):
    for kind, text, waited_s in processes["unconnected"][:2]:
        assert kind in ("DeadlineExceeded", "MemberLost") and waited_s < LIMIT_S, text
        assert "forming the group in generation" in text
    assert processes["late"] == [3.0] * WORLD, "ranks that are connected wait to the deadline of a call"


def test_a_silent_process_is_reported_when_the_deadline_is_over(processes):
    for rank, (kind, text, waited_s) in enumerate(processes["silent"][:2]):
        assert kind == "DeadlineExceeded" and waited_s < LIMIT_S
        assert re.match(rf"worker {rank} of 3: barrier in generation \d+ failed after", text), text
    for failures in processes["two open"][:2]:
        assert {kind for kind, _, _ in failures} <= {"DeadlineExceeded", "MemberLost"} and len(failures) == 2


def test_a_rank_whom_nobody_met_says_so_and_meets_the_others_in_the_next_generation(processes):
    ((kind, text, waited_s), number), *_ = processes["alone"]
    assert kind == "DeadlineExceeded" and waited_s < LIMIT_S
    assert text.startswith(f"worker 0 of 3: forming the group in generation {number - 1} failed after"), text
    assert [of_all for _, of_all in processes["alone"]] == [number] * WORLD


def test_a_process_that_goes_away_is_reported_at_once(processes):
    for rank, ((kind, text, _), number) in enumerate(processes["lost"][:2]):  # during the backward pass
        assert kind == "MemberLost" and "\n" not in text  # and not DeadlineExceeded: it waited for no deadline
        assert text.startswith(f"worker {rank} of 3: the sum of the dense gradients in generation {number}"), text
    assert processes["left open"][1:] == ["MemberLost"] * 2  # with a question open
