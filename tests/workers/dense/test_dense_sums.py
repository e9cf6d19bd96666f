"""Compressed sums of the dense gradient in training: threads, DDP in two processes, overflow, rewind, damage."""

from __future__ import annotations

import copy
import functools
import math
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardkeep.base.errors import JobError, ShardkeepError
from shardkeep.compression.config import TowerCompressionConfig
from shardkeep.ps.transport.metered import LedgerMeter, WorkerTraffic
from shardkeep.workers.collectives.collective import ThreadCollective
from shardkeep.workers.collectives.metered import MeteredCollective
from shardkeep.workers.dense import gradients as reduce
from shardkeep.workers.dense.compile import why_no_compiler
from shardkeep.workers.dense.gradients import BucketSums, sum_bucket
from shardkeep.workers.dense.tower import share
from shardkeep.workers.rewind import Rewind
from tests.support.cases import every
from tests.support.ranks import run_ranks
from tests.support.scenarios import played
from tests.support.towers import CPU, FP16, Small, batch, part_of, tower_of, train

WORLD, SPLITS = 2, [(0, 13), (13, 24)]
FORMS = {
    "none": TowerCompressionConfig(),
    "lossless": TowerCompressionConfig(name="shardkeep.examples.compression.lossless:Lossless"),
    "fp16": TowerCompressionConfig(name="fp16"),
    "topk": TowerCompressionConfig(name="topk", keep=0.05, values="int8", warmup_steps=2),
    "powersgd": TowerCompressionConfig(name="powersgd", warmup_steps=2),
    "powersgd of int8": TowerCompressionConfig(name="powersgd", rank=3, values="int8", warmup_steps=2),
}
OWING = ["topk", "powersgd", "powersgd of int8"]
"""Those that send later what they did not send."""


SMALL_BUCKETS = functools.partial(DistributedDataParallel, bucket_cap_mb=0.005)


class Layers(nn.Module):
    """Large enough for every form: a matrix that PowerSGD thins and top-k leaves values out of; one layer unused."""

    def __init__(self, seed: int = 0, *, forgetful: bool = False) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        self.low, self.mid, self.top = nn.Linear(15, 40), nn.Linear(40, 40), nn.Linear(40, 1)
        self.unused = nn.Linear(40, 40) if forgetful else None
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.rand(p.shape, generator=drawn) * 0.4 - 0.2)

    def forward(self, dense, embeddings):
        hidden = self.low(torch.cat([dense, *embeddings.values()], dim=1)).tanh()
        return self.top(self.mid(hidden).tanh())


def build(collective, form, *, forgetful=False, **others):
    model = Layers(collective.rank, forgetful=forgetful)
    return tower_of(model=model, collective=collective, compression=FORMS[form], **others)


def owed(tower):
    return {name: kept.clone() for name, kept in tower.sums.compression.memory.local_state_dict().items()}


def step_of(tower):
    dense, leaves, label = part_of(batch(tower.step, 24), *SPLITS[tower.collective.rank])
    tower.backward(dense, leaves, label, 1 / 24)
    return tower.update(tower.step)


# What ranks do, as threads and as processes.


def five_steps(collective, form, **others):
    """Digest, and the bytes that were sent by what they are, headers aside."""
    traffic = WorkerTraffic()
    tower = build(MeteredCollective(collective, LedgerMeter(traffic)), form, **others)
    train(tower, SPLITS, micro=2)
    sent = traffic.ledger.totals()["tower"]
    return tower.digest_bytes(), {part: size for part, size in sent.items() if part != "framing"}


def overflowing(collective, form):
    """fp16 with a GradScaler: digest, which steps were applied, whether residuals stayed, whether there were any."""
    tower = build(collective, form, config=FP16)
    applied, stayed = [], True
    for step in range(6):
        before = owed(tower)
        dense, leaves, label = part_of(batch(step, 24), *SPLITS[collective.rank])
        if step == 3 and collective.rank == 1:
            dense = torch.full_like(dense, 1e30)
        tower.backward(dense, leaves, label, 1 / 24)
        applied.append(tower.update(step, rows_finite=not (step == 4 and collective.rank == 0)).applied)
        now = owed(tower)
        stayed = stayed and (applied[-1] or all(now[name].equal(kept) for name, kept in before.items()))
    return tower.digest_bytes(), applied, stayed, any(kept.any() for kept in owed(tower).values())


def zeros(packet_R):
    packet_R.zero_()


def half(packet_R):
    packet_R[len(packet_R) // 2 :] = 0


def longer(packet_R):
    """A bit of a length, which is the whole packet: one that might well be."""
    if len(packet_R) == 8:
        packet_R[0] ^= 16


def ones(packet_R):
    """Of a code, not of its length."""
    if len(packet_R) != 8:
        packet_R.fill_(255)


DAMAGES = {
    "top-k cut off": ("topk", half, False, "damaged bytes of 80 positions of "),
    "top-k in several buckets": ("topk", zeros, True, "damaged bytes of "),
    "a length with one bit wrong": ("lossless", longer, False, " float32s, or its length is damaged"),
    "a code of ones": ("lossless", ones, False, " are no coded float32s"),
}
"""Form, what happens to rank 1's packet on its way to rank 0, whether the gradients go in several buckets, and what
rank 0 says."""


def damaged(rank, case):
    form, damage, several, _ = DAMAGES[case]
    ddp = SMALL_BUCKETS if several else DistributedDataParallel
    with mock.patch.object(reduce, "DistributedDataParallel", ddp):
        collective = rank.form()
        tower = build(collective, form)
        train(tower, SPLITS, steps=3)
        begin, failed = collective.begin_exchange, ("none", "")

        def begin_damaged(exchange, **purpose):
            wait = begin(exchange, **purpose)

            def wait_damaged():
                packets_WR = wait()
                damage(packets_WR[1])
                return packets_WR

            return wait_damaged

        try:
            if rank.number == 0:
                with mock.patch.object(collective, "begin_exchange", begin_damaged):
                    step_of(tower)
            step_of(tower)
            step_of(tower)
        except ShardkeepError as error:
            failed = type(error).__name__, str(error)
        collective.close()
        tower.join(rank.form())
        share(tower, 0, [1])
        train(tower, SPLITS, first=3, steps=2)
    tower.collective.barrier()
    return failed, tower.digest_bytes()


def compiled(rank):
    settings = {"compression": FORMS["powersgd"], "config": {"compile": "on"}, "batch_size": 12}
    tower = tower_of(model=Small(), collective=rank.form(), **settings)
    train(tower, [(0, 12), (12, 24)])
    return tower.digest_bytes(), tower.compilation.switch.enabled, tower.sums.by_ddp


def in_buckets(rank, work, **settings):
    """With buckets far smaller than the model; DDP rebuilds them on the way."""
    started, start = [], BucketSums.start

    def counted(sums, bucket):
        started.append(bucket.index())
        return start(sums, bucket)

    with (
        mock.patch.multiple(reduce, DistributedDataParallel=SMALL_BUCKETS),
        mock.patch.object(BucketSums, "start", counted),
    ):
        found = work(rank.form(), **settings)
    assert max(started) > 0
    return found


SCENARIOS = {
    **{form: functools.partial(in_buckets, work=five_steps, form=form) for form in FORMS},
    "forgetful": functools.partial(in_buckets, work=five_steps, form="topk", forgetful=True),
    **{f"overflow of {form}": functools.partial(in_buckets, work=overflowing, form=form) for form in OWING},
    **{case: functools.partial(damaged, case=case) for case in DAMAGES},
}


@pytest.fixture(scope="module")
def processes():
    with played(SCENARIOS, WORLD, limit_s=150) as found:
        yield found


def threads(work, *args, **others):
    """What each rank's `work` gives, ranks being threads that compute as the processes do: with one thread each."""

    def one(collective):
        torch.set_num_threads(1)  # in this thread: before its first loop torch lets BLAS take the process's number
        return work(collective, *args, **others)

    before = torch.get_num_threads()
    try:
        return run_ranks(ThreadCollective.group(WORLD), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.waits_for_processes
def test_processes_train_with_each_form_bit_for_bit_as_threads_and_count_bytes_by_what_they_are(processes):
    plain, sent = threads(five_steps, "none")[0][0], {}
    for form in FORMS:
        digest, sent[form] = processes[form][0]
        assert processes[form][1] == (digest, sent[form]), form
        assert [each for each, _ in threads(five_steps, form)] == [digest] * WORLD, form
        assert (digest == plain) == (form in {"none", "lossless"}), form
    values = sum(p.numel() for p in Layers().parameters())
    assert sent["none"] == {"values": 5 * 4 * values + 6}  # and one byte a parameter: whether it is used
    assert sent["fp16"].keys() == {"values", "scales"} and sent["topk"].keys() == {"values", "scales", "indices"}
    first_two = 2 * sent["fp16"]["scales"] // 5
    assert sent["topk"]["scales"] == first_two + 3 * 2 * 6  # steps, bytes, parameters
    forgetful = threads(five_steps, "topk", forgetful=True)[0][0]  # parameters are left out
    assert [digest for digest, _ in processes["forgetful"]] == [forgetful] * WORLD


@pytest.mark.waits_for_processes
@every("form", OWING)
def test_overflow_steps_are_skipped_by_all_and_keep_the_residual(processes, form):
    expected = threads(overflowing, form)
    assert processes[f"overflow of {form}"] == expected
    assert expected[0] == expected[1] == (expected[0][0], [True, True, True, False, False, True], True, True)


@pytest.mark.waits_for_processes
@every("case", DAMAGES)
def test_a_damaged_packet_ends_the_backward_pass_of_both_and_they_go_on_in_another_generation(processes, case):
    """The receiver names the sender; the sender hears that the other left."""
    ((kind, text), digest), ((sender_kind, sender_text), sender_digest) = processes[case]
    assert kind == "CorruptMessage" and "\n" not in text + sender_text
    assert text.startswith("the dense gradient of worker 1: ") and DAMAGES[case][3] in text, text
    assert sender_kind == "MemberLost"  # and not DeadlineExceeded: it waited for no deadline
    assert sender_text.startswith("worker 1 of 2: the sum of the dense gradients in generation"), sender_text
    assert digest == sender_digest


@pytest.mark.slow  # 15 s of CPU time in the compiler
@pytest.mark.waits_for_processes
@pytest.mark.skipif(why_no_compiler(CPU) is not None, reason="torch.compile cannot run here")
def test_replicas_of_a_compiled_tower_are_equal():
    with played({"compiled": compiled}, WORLD, limit_s=250) as processes:
        first, second = processes["compiled"]
    assert first == second and first[1:] == (True, True)


def test_a_hook_that_gets_no_bucket_says_which_setting_is_at_fault():
    with pytest.raises(JobError, match="optimize_ddp: 'python_reducer'"):
        sum_bucket(None, (torch.zeros(1), torch.zeros(1)))


# State: what belongs to a rank, and what all ranks share.


@every("form", ["topk", "powersgd"])
def test_going_back_brings_back_the_residual_of_each_rank(form, tmp_path):
    def work(collective):
        folder = tmp_path / str(collective.rank)
        tower, rewind = build(collective, form), Rewind(folder, depth=5)
        rewind.keep(tower)
        for _ in range(5):
            step_of(tower)
            rewind.keep(tower)
        digest, residual, shared = tower.digest_bytes(), owed(tower), copy.deepcopy(tower.state_dict()["compression"])
        again = build(collective, form)  # another process: it finds what was kept
        Rewind(folder, depth=5).take_back(again, 3)
        went_back = again.step == 3 and any(kept.any() for kept in owed(again).values())
        step_of(again)
        step_of(again)
        same = all(owed(again)[name].equal(kept) for name, kept in residual.items())
        guesses = again.state_dict()["compression"]
        same_guesses = all(guesses[name].equal(guess) for name, guess in shared.items())
        return [went_back, again.digest_bytes() == digest, same, same_guesses]

    assert threads(work) == [[True] * 4] * WORLD


def test_a_newcomer_owes_nothing_and_takes_the_guesses_of_the_others():
    def work(collective):
        tower = build(collective, "powersgd")
        train(tower, SPLITS, steps=4)
        if collective.rank == 1:
            tower = tower_of(model=Layers(7), compression=FORMS["powersgd"])
        tower.join(collective)
        share(tower, 0, [1])
        owes = any(kept.any() for kept in owed(tower).values())
        guesses = {name: guess.clone() for name, guess in tower.state_dict()["compression"].items()}
        train(tower, SPLITS, first=4, steps=2)
        return tower.digest_bytes(), owes, guesses

    (first, first_owes, ours), (second, second_owes, theirs) = threads(work)
    assert first == second and first_owes and not second_owes
    assert ours and all(theirs[name].equal(guess) for name, guess in ours.items())


@every("form", ["none", "powersgd"])
def test_a_tower_tells_what_it_owes_beside_the_gradients_of_its_last_steps(form):
    def work(collective):
        tower = build(collective, form)
        nothing_yet = tower.unsent in ({}, {"norm": 0.0, "step_norm": 0.0})
        norms = [step_of(tower).grad_norm for _ in range(18)]
        squares = sum(float(kept.double().square().sum()) for kept in owed(tower).values())
        return nothing_yet, tower.unsent, math.sqrt(squares), norms

    for nothing_yet, unsent, norm, norms in threads(work):
        assert nothing_yet and bool(unsent) == (form in OWING)
        if unsent:
            assert unsent == {"norm": pytest.approx(norm), "step_norm": pytest.approx(sum(norms[-16:]) / 16)}
            assert norm > 0.0


def test_a_step_cut_off_after_its_sum_leaves_the_residual_and_a_state_without_one_is_loaded_as_zeros():
    def work(collective):
        tower = build(collective, "topk")
        train(tower, SPLITS, steps=3)
        before = owed(tower)
        tower.backward(*part_of(batch(3, 24), *SPLITS[collective.rank]), 1 / 24)
        tower.sums.finish()
        tower.sums.leave()
        tower.sums.compression.memory.settle(applied=True)
        stayed = all(owed(tower)[name].equal(kept) for name, kept in before.items())
        state = copy.deepcopy(tower.state_dict())
        del state["compression"]
        tower.load_state_dict(state)
        return stayed, any(kept.any() for kept in owed(tower).values())

    assert threads(work) == [(True, False)] * 2
