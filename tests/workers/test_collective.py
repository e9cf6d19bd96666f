"""Collectives: threads against definitions, failures that wake everybody, and real processes against threads."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from shardkeep.base.errors import DeadlineExceeded, MemberLost, ShardkeepError
from shardkeep.base.sockets import connections
from shardkeep.compression import dense_values
from shardkeep.compression.config import TowerCompressionConfig
from shardkeep.compression.exchange import Exchange
from shardkeep.compression.ledger import Ledger
from shardkeep.workers import reduce
from shardkeep.workers.collective import (
    Collective,
    Solo,
    ThreadCollective,
    run_ranks,
)
from shardkeep.workers.process_collective import ProcessCollective
from tests.support.processes import in_processes
from tests.workers.test_tower import Forgetful, seeded_model, tower_of, train

WORLD = 3


def every_call(collective: Collective) -> list[Any]:
    """What this rank gets from each call, in plain values."""
    rank = collective.rank
    later = collective.begin_all_gather(torch.tensor([rank]))
    summed = torch.tensor([1.0, 10.0 * rank])
    collective.all_reduce_sum(summed)
    sent = torch.tensor([7 if rank == 0 else 0])
    collective.broadcast(sent)
    collective.barrier(timeout_s=20.0)
    arrays = collective.gather_arrays(np.arange(rank * 3, dtype=np.float32))
    none = collective.gather_arrays(np.empty(0, np.int64))
    return [
        collective.all_gather(torch.full((2, 1), rank)).tolist(),
        collective.all_gather(torch.empty(0)).shape,
        summed.tolist(),
        sent.tolist(),
        collective.broadcast_object({"on": True, "why": "ä"} if rank == 0 else None),
        [(a.dtype.str, a.tolist()) for a in arrays],
        [(a.dtype.str, a.size) for a in none],
        collective.exchange(Exchange(torch.tensor([rank, 50], dtype=torch.uint8))).tolist(),
        collective.exchange(Exchange(10 * rank + torch.arange(3, dtype=torch.uint8).view(3, 1)))
        .view(-1)
        .sub(rank)
        .tolist(),
        later().tolist(),
    ]


EXPECTED = [
    [[[0], [0]], [[1], [1]], [[2], [2]]],
    torch.Size([3, 0]),
    [3.0, 30.0],
    [7],
    {"on": True, "why": "ä"},
    [("<f4", []), ("<f4", [0.0, 1.0, 2.0]), ("<f4", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])],
    [("<i8", 0)] * 3,
    [[0, 50], [1, 50], [2, 50]],
    [0, 10, 20],
    [[0], [1], [2]],
]


def test_ranks_as_threads_get_what_each_call_promises():
    for _ in range(20):
        assert run_ranks(ThreadCollective.group(WORLD), every_call) == [EXPECTED] * WORLD


def test_one_worker_alone_gets_its_own_values():
    assert every_call(Solo())[2:5] == [[1.0, 0.0], [7], {"on": True, "why": "ä"}]
    assert Solo().all_gather(torch.ones(2)).shape == (1, 2)


def test_what_a_rank_gathered_is_its_own():
    def work(collective: ThreadCollective) -> list[float]:
        parts = collective.all_gather(torch.ones(2))
        parts *= collective.rank
        collective.barrier()
        return parts.view(-1).tolist()

    assert run_ranks(ThreadCollective.group(2), work) == [[0.0] * 4, [1.0] * 4]


def test_a_wait_that_runs_out_names_the_missing_rank():
    first, _ = ThreadCollective.group(2, timeout_s=0.05)
    with pytest.raises(DeadlineExceeded, match=r"worker 1 did not join the others within 0\.05 s"):
        first.barrier()


@pytest.mark.parametrize("how", ["abort", "close"])
def test_a_member_that_leaves_wakes_those_who_wait(how):
    first, second = ThreadCollective.group(2, timeout_s=60.0)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            first.barrier()
        except MemberLost as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    second.abort("out of memory") if how == "abort" else second.close()
    thread.join(10.0)
    assert not thread.is_alive() and ("out of memory" if how == "abort" else "worker 1 left") in str(failures[0])


def test_the_first_failure_of_a_rank_is_the_one_that_is_raised():
    def work(collective: ThreadCollective) -> None:
        if collective.rank == 1:
            raise ValueError("the cause")
        collective.barrier()

    with pytest.raises(ValueError, match="the cause"):
        run_ranks(ThreadCollective.group(3), work)


SPLITS = [(0, 13), (13, 18), (18, 24)]
INT8 = TowerCompressionConfig(name="int8")


def trained(collective: Collective, *, forgetful: bool = False, **settings: Any) -> tuple[bytes, int]:
    """Digest after five steps of two micro-batches, and the bytes this rank sent for them."""
    model = Forgetful() if forgetful else seeded_model(collective.rank)
    tower = tower_of(model=model, collective=collective, **settings)
    ledger = Ledger()
    collective.sent.tell(ledger, "control")
    train(tower, SPLITS, micro=2)
    assert (tower._ddp is not None) == (collective.process_group is not None)
    collective.sent.tell(ledger, "tower")
    sent = ledger.totals()["tower"]
    return tower.digest_bytes(), sum(sent.values()) - sent["framing"]


def failure_of(call: Callable[[], Any]) -> tuple[str, str, float]:
    """Kind and text of the error that `call` ends with, and after how many seconds."""
    started = time.monotonic()
    try:
        call()
    except ShardkeepError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "none", "", time.monotonic() - started


def one_process(rank: int, port: int, results: Any) -> None:
    """Reports what `all_generations` found, or why it ended."""
    try:
        results.put(all_generations(rank, port))
    except BaseException:
        results.put({"rank": rank, "failed": traceback.format_exc()})


def all_generations(rank: int, port: int) -> dict[str, Any]:
    """A rank in a process of its own; in generation 3 rank 2 is silent, in generation 4 it leaves without a word."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))

    def form(generation: int, timeout_s: float = 60.0) -> ProcessCollective:
        return ProcessCollective(store, rank=rank, world_size=WORLD, generation=generation, timeout_s=timeout_s)

    def kernel_sent(collective: ProcessCollective) -> int:
        now = connections()
        return sum(now[ends].sent for ends in collective.connections)

    found: dict[str, Any] = {"rank": rank}
    collective = form(1)
    found["calls"] = every_call(collective)
    found["sync"] = trained(collective, sync=True)
    with mock.patch.object(dense_values, "ONE_ROUND_BYTES", 0):  # each rank adds a shard
        found["shards"] = trained(collective, sync=True)
        found["int8"] = trained(collective, sync=False, compression=INT8)
    moving = tower_of(model=seeded_model(rank), collective=collective)
    train(moving, SPLITS, steps=3, micro=2)
    collective.close()

    collective = form(2)
    moving.join(collective)
    train(moving, SPLITS, first=3, steps=2, micro=2)
    found["moved"] = moving.digest_bytes()
    found["bounded"] = trained(collective, sync=False)
    with mock.patch.object(reduce, "goes_direct", lambda _: False):
        found["ring"] = trained(collective, sync=False)
    found["forgetful"] = trained(collective, sync=True, forgetful=True)
    at_first = kernel_sent(collective)
    sent = collective.sent.total
    for num_values in (1, 2, 3, 7, 10, 1000, 70_000, 1_500_000):
        collective.all_reduce_sum(torch.ones(num_values))
        collective.all_gather(torch.ones(num_values))
        collective.broadcast(torch.ones(num_values), source=1)
        collective.barrier()
    collective.barrier()
    time.sleep(0.2)  # nobody sends any more
    found["wire"] = (collective.sent.total - sent, kernel_sent(collective) - at_first)
    listening = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    found["listens"] = sorted(set(listening))
    collective.close()

    if rank == 0:
        found["alone"] = failure_of(lambda: form(20, timeout_s=0.5))
    collective = form(3)
    if rank != 2:
        found["silent"] = failure_of(lambda: collective.barrier(timeout_s=0.3))
        store.set(f"gave up {rank}", "")
    else:
        store.wait(["gave up 0", "gave up 1"])
    collective.close()

    collective = form(4)
    moving.join(collective)
    train(moving, SPLITS, first=5, steps=2)
    if rank != 2:
        found["lost"] = failure_of(lambda: train(moving, SPLITS, first=7))
    collective.close()

    collective = form(5)
    question = collective.begin_all_gather(torch.ones(1))
    if rank == 0:
        collective.close()
        store.wait(["lost 1", "lost 2"])
        assert callable(question)  # somebody still has it
    else:
        found["left open"] = failure_of(lambda: collective.barrier())
        store.set(f"lost {rank}", "")
    return found


@pytest.fixture(scope="module")
def processes():
    """What each of three processes found, in rank order."""
    with in_processes(one_process, WORLD, limit_s=120) as found:
        yield found


@pytest.mark.processes
def test_processes_get_what_threads_get(processes):
    assert [found["calls"] for found in processes] == [EXPECTED] * WORLD


@pytest.mark.processes
def test_processes_in_sync_mode_train_bit_for_bit_as_threads(processes):
    models = [seeded_model(rank) for rank in range(WORLD)]

    def work(collective: ThreadCollective) -> bytes:
        tower = tower_of(model=models[collective.rank], collective=collective)
        train(tower, SPLITS, micro=2)
        return tower.digest_bytes()

    expected = run_ranks(ThreadCollective.group(WORLD), work)
    assert [found["sync"][0] for found in processes] == expected
    assert [found["moved"] for found in processes] == expected  # a generation more on the way
    assert [found["shards"][0] for found in processes] == expected


@pytest.mark.processes
def test_shards_of_int8_are_added_by_processes_as_by_threads(processes, monkeypatch):
    monkeypatch.setattr(dense_values, "ONE_ROUND_BYTES", 0)
    models = [seeded_model(rank) for rank in range(WORLD)]

    def work(collective: ThreadCollective) -> bytes:
        tower = tower_of(model=models[collective.rank], collective=collective, compression=INT8)
        train(tower, SPLITS, micro=2)
        return tower.digest_bytes()

    assert [found["int8"][0] for found in processes] == run_ranks(ThreadCollective.group(WORLD), work)


@pytest.mark.processes
def test_replicas_are_equal_in_every_mode_and_with_parameters_left_out(processes):
    for case in ("bounded", "ring", "forgetful"):
        assert len({found[case][0] for found in processes}) == 1


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells its counters on Linux")
def test_what_is_counted_as_sent_is_what_the_kernel_saw(processes):
    counted, seen = (sum(found["wire"][i] for found in processes) for i in (0, 1))
    assert seen > 30e6
    assert counted == pytest.approx(seen, abs=500)


@pytest.mark.processes
def test_sent_bytes_count_every_reduced_gradient(processes):
    values = sum(p.numel() for p in seeded_model().parameters())
    tensors = len(list(seeded_model().parameters()))
    first = 2 * (4 * values + tensors)  # the first step goes flat and says which parameters are used
    assert {found["sync"][1] for found in processes} == {first + 4 * 2 * 4 * values}
    share = sum(-(-p.numel() // WORLD) for p in seeded_model().parameters())  # a rank adds one and gives back the sum
    assert {found["shards"][1] for found in processes} == {5 * 2 * 2 * 4 * share + 2 * tensors}
    assert all(abs(found["ring"][1] - first - 4 * 4 * values * 4 / 3) <= 16 for found in processes)


@pytest.mark.processes
def test_small_gradients_are_added_in_rank_order_in_every_mode(processes):
    assert [found["bounded"] for found in processes] == [found["sync"] for found in processes]


@pytest.mark.processes
def test_listeners_are_bound_to_loopback_only(processes):
    assert {ip for found in processes for ip in found["listens"]} == {"127.0.0.1"}


@pytest.mark.processes
def test_a_silent_process_is_reported_when_the_deadline_is_over(processes):
    for found in processes[:2]:
        kind, text, waited_s = found["silent"]
        assert kind == "DeadlineExceeded" and waited_s < 20.0
        assert text.startswith(f"worker {found['rank']} of 3: barrier in generation 3 failed after"), text


@pytest.mark.processes
def test_a_rank_whom_nobody_met_says_so_and_meets_the_others_in_the_next_generation(processes):
    kind, text, waited_s = processes[0]["alone"]
    assert kind == "DeadlineExceeded" and waited_s < 20.0
    assert text.startswith("worker 0 of 3: forming the group in generation 20 failed after"), text
    assert [found["rank"] for found in processes] == [0, 1, 2]


@pytest.mark.processes
def test_a_process_that_goes_away_during_the_backward_pass_is_reported_at_once(processes):
    for found in processes[:2]:
        kind, text, waited_s = found["lost"]
        assert kind == "MemberLost" and "\n" not in text and waited_s < 20.0
        assert text.startswith(f"worker {found['rank']} of 3: the sum of the dense gradients in generation 4"), text


@pytest.mark.processes
def test_a_process_that_leaves_with_a_question_open_is_reported_at_once(processes):
    for found in processes[1:]:
        kind, _, elapsed_s = found["left open"]
        assert kind == "MemberLost" and elapsed_s < 10.0
