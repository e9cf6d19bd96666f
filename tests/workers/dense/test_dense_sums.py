"""Compressed sums of the dense gradient in training: threads, DDP in two processes, overflow, rewind, newcomers."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardkeep.base.errors import JobError
from shardkeep.compression.tower.compressor import DenseCompression
from shardkeep.compression.tower.exchange import Ranks
from shardkeep.ps.transport.metered import LedgerMeter, WorkerTraffic
from shardkeep.workers.collectives.collective import Collective, ThreadCollective
from shardkeep.workers.collectives.metered import MeteredCollective
from shardkeep.workers.dense.compile import why_no_compiler
from shardkeep.workers.dense.gradients import BucketSums, sum_bucket
from shardkeep.workers.dense.tower import Tower, share
from shardkeep.workers.rewind import Rewind
from tests.support.cases import every
from tests.support.dense_sums import drive
from tests.support.layers import FORMS, SPLITS, Layers, build
from tests.support.ranks import run_ranks
from tests.support.scenarios import Found, Rank, Scenario, played
from tests.support.towers import CPU, FP16, Small, batch, part_of, tower_of, train, values_of

WORLD = 2
OWING = ["int8", "topk", "powersgd", "powersgd of int8"]
"""Those that send later what they did not send."""


def owed(tower: Tower) -> dict[str, torch.Tensor]:
    return {name: kept.clone() for name, kept in tower.sums.compression.local_state_dict().get("residuals", {}).items()}


def five_steps(collective: Collective, form: str, **others: Any) -> tuple[bytes, dict[str, int]]:
    """Digest, and the bytes that were sent by what they are, headers aside."""
    traffic = WorkerTraffic()
    tower = build(MeteredCollective(collective, LedgerMeter(traffic)), form, **others)
    train(tower, SPLITS, micro=2)
    sent = traffic.ledger.totals()["tower"]
    return tower.digest_bytes(), {part: size for part, size in sent.items() if part != "framing"}


def overflowing(collective: Collective, form: str) -> tuple[bytes, list[bool], bool, bool]:
    """fp16 with a GradScaler: digest, which steps were applied, whether residuals stayed, whether there were any."""
    tower = build(collective, form, config=FP16)
    applied, stayed = [], True
    for step in range(6):
        before = owed(tower)
        dense, leaves, label = part_of(batch(step, 24), *SPLITS[collective.rank])
        if step == 3 and collective.rank == 1:
            dense = torch.full_like(dense, 1e30)
        tower.backward(dense, leaves, label, 1 / 24)
        update = tower.update(step, rows_finite=not (step == 4 and collective.rank == 0))
        applied.append(update.applied)
        if not update.applied:
            now = owed(tower)
            stayed = stayed and all(now[name].equal(kept) for name, kept in before.items())
    return tower.digest_bytes(), applied, stayed, any(kept.any() for kept in owed(tower).values())


# DDP's options, with buckets far smaller than the model.

OPTIONS: dict[str, dict[str, bool]] = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
}


def gradients(form: str, option: str, collective: Collective) -> tuple[list[bytes], list[bytes], set[int]]:
    """The summed gradients of some steps of two micro-batches by DDP with our hook, the same without DDP, and the
    numbers of buckets that the steps took."""
    forgetful = option == "unused"
    models = [Layers(forgetful=forgetful) for _ in range(WORLD + 1)]
    shapes = {name: tuple(p.shape) for name, p in models[0].named_parameters()}
    config = FORMS[form].model_copy(update={"warmup_steps": None})
    *alone, mine = [DenseCompression(config, shapes, CPU) for _ in range(WORLD + 1)]
    buckets: list[int] = []

    class Counted(BucketSums):
        def start(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            buckets[-1] += 1
            return super().start(bucket)

    ddp = DistributedDataParallel(models[-1], bucket_cap_mb=0.005, init_sync=False, **OPTIONS[option])  # type: ignore[arg-type]
    names = {p: name for name, p in models[-1].named_parameters()}
    ddp.register_comm_hook(Counted(collective, mine, names), sum_bucket)  # type: ignore[arg-type]
    found, expected = [], []
    for step in range(5):
        buckets.append(0)
        for model in models:
            model.zero_grad(set_to_none=True)
        mine.begin(step, 2.0**step)
        accumulate = option != "static" or step > 0  # torch cannot, in the first step of a static graph
        if accumulate:
            micro_step(ddp.no_sync, ddp, step, collective.rank, slice(0, 5))
        micro_step(None, ddp, step, collective.rank, slice(5, 12))
        found.append(bytes_of({name: p.grad for name, p in models[-1].named_parameters()}))
        mine.settle(applied=step != 2)
        for rank in range(WORLD):
            if accumulate:
                micro_step(None, models[rank], step, rank, slice(0, 5))
            micro_step(None, models[rank], step, rank, slice(5, 12))
        expected.append(bytes_of(summed(alone, models[:WORLD], step)))
    return found, expected, set(buckets)


def micro_step(context: Any, run: nn.Module, step: int, rank: int, part: slice) -> None:
    dense, leaves, _ = part_of(batch(step, 24), 12 * rank, 12 * rank + 12)
    rows = {name: leaf.detach()[part] for name, leaf in leaves.items()}
    if context is None:
        run(dense[part], rows).square().sum().backward()
        return
    with context():
        run(dense[part], rows).square().sum().backward()


def summed(alone: list[DenseCompression], models: list[nn.Module], step: int) -> dict[str, torch.Tensor | None]:
    """The sum over all ranks, made within this process; None for what no rank used."""
    used = [name for name, p in models[0].named_parameters() if p.grad is not None]
    sums = []
    for rank, (one, model) in enumerate(zip(alone, models, strict=True)):
        one.begin(step, 2.0**step)
        named = dict(model.named_parameters())
        sums.append(one.sum(used, [named[name].grad for name in used], Ranks(rank, WORLD)))  # type: ignore[misc]
    totals, _ = drive(sums)
    for one in alone:
        one.settle(applied=step != 2)
    sizes = [dict(models[0].named_parameters())[name].numel() for name in used]
    parts = dict(zip(used, torch.split(totals[0], sizes), strict=True))
    return {name: parts.get(name) for name, _ in models[0].named_parameters()}


def bytes_of(grads: dict[str, torch.Tensor | None]) -> bytes:
    return b"".join(b"-" if grad is None else grad.contiguous().numpy().tobytes() for grad in grads.values())


def trained(rank: Rank, form: str, **others: Any) -> tuple[bytes, dict[str, int]]:
    return five_steps(rank.form(), form, **others)


def overflowed(rank: Rank, form: str) -> tuple[bytes, list[bool], bool, bool]:
    return overflowing(rank.form(), form)


HOOKED = {
    "view": list(FORMS),
    "plain": ["none", "bf16", "topk", "powersgd of int8"],
    "static": ["lossless", "fp16", "int8", "powersgd"],
    "unused": ["int8", "topk", "powersgd", "powersgd of int8"],
}
"""Forms by option: each form under two, those that owe under three."""


def hooked(rank: Rank, option: str) -> dict[str, tuple[list[bytes], list[bytes], set[int]]]:
    collective = rank.form()
    return {form: gradients(form, option, collective) for form in HOOKED[option]}


def compiled(rank: Rank) -> tuple[bytes, bool, bool]:
    settings: dict[str, Any] = {"compression": FORMS["int8"], "config": {"compile": "on"}, "batch_size": 12}
    tower = tower_of(model=Small(), collective=rank.form(), **settings)
    train(tower, [(0, 12), (12, 24)])
    return tower.digest_bytes(), tower.compilation.switch.enabled, tower.sums.by_ddp


SCENARIOS: dict[str, Scenario] = {
    **{form: functools.partial(trained, form=form) for form in FORMS},
    "bounded": functools.partial(trained, form="none", sync=False),
    "forgetful": functools.partial(trained, form="topk", forgetful=True),
    **{f"overflow of {form}": functools.partial(overflowed, form=form) for form in OWING},
    **{option: functools.partial(hooked, option=option) for option in OPTIONS},
}


@pytest.fixture(scope="module")
def processes() -> Iterator[Found]:
    """What each of two processes found, by scenario."""
    with played(SCENARIOS, WORLD, limit_s=150) as found:
        yield found


def threads(work: Any, *args: Any, **others: Any) -> list[Any]:
    """What each rank's `work` gives, ranks being threads that compute as the processes do: with one thread each."""

    def one(collective: ThreadCollective) -> Any:
        torch.set_num_threads(1)  # in this thread: before its first loop torch lets BLAS take the process's number
        return work(collective, *args, **others)

    before = torch.get_num_threads()
    try:
        return run_ranks(ThreadCollective.group(WORLD), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.waits_for_processes
def test_processes_train_with_each_form_bit_for_bit_as_threads(processes):
    plain = threads(five_steps, "none")[0][0]
    for form in FORMS:
        expected = threads(five_steps, form)
        assert [digest for digest, _ in processes[form]] == [digest for digest, _ in expected], form
        assert len({digest for digest, _ in expected}) == 1, form
        assert (expected[0][0] == plain) == (form in {"none", "lossless"}), form


@pytest.mark.waits_for_processes
def test_the_bytes_of_each_form_are_counted_by_what_they_are(processes):
    sent = {form: processes[form][0][1] for form in FORMS}
    values = sum(p.numel() for p in Layers().parameters())
    assert sent["none"] == {"values": 5 * 4 * values + 6}  # and one byte a parameter: whether it is used
    assert sent["bf16"] == {"values": 5 * 2 * values + 6}
    assert sent["int8"].keys() == {"values", "scales"} and sent["topk"].keys() == {"values", "scales", "indices"}
    first_two = 2 * sent["int8"]["scales"] // 5  # fp16 has int8's blocks
    assert sent["topk"]["scales"] == first_two + 3 * 2 * 6  # steps, bytes, parameters
    assert all(processes[form][1][1] == sent[form] for form in FORMS)


@pytest.mark.waits_for_processes
def test_replicas_are_equal_outside_sync_mode_and_with_parameters_left_out(processes):
    for case in ("bounded", "forgetful"):
        assert len({digest for digest, _ in processes[case]}) == 1
    assert processes["forgetful"][0][0] == threads(five_steps, "topk", forgetful=True)[0][0]


@pytest.mark.waits_for_processes
@every("form", OWING)
def test_overflow_steps_are_skipped_by_all_and_keep_the_residual(processes, form):
    expected = threads(overflowing, form)
    assert processes[f"overflow of {form}"] == expected
    assert expected[0] == expected[1] == (expected[0][0], [True, True, True, False, False, True], True, True)


@pytest.mark.waits_for_processes
@every("option", OPTIONS)
def test_the_hook_gives_the_same_bits_under_every_option_of_ddp(processes, option):
    """Buckets rebuilt, gradients accumulated under no_sync, the loss scale changed, one step not applied."""
    for found in processes[option]:
        assert list(found) == HOOKED[option]
        for form, (grads, expected, buckets) in found.items():
            assert grads == expected and max(buckets) > 1, form
            assert option != "view" or len(buckets) > 1, "buckets were rebuilt on the way"


@pytest.mark.slow  # 15 s of CPU time in the compiler
@pytest.mark.waits_for_processes
@pytest.mark.skipif(why_no_compiler(CPU) is not None, reason="torch.compile cannot run here")
def test_replicas_of_a_compiled_tower_are_equal():
    with played({"compiled": compiled}, WORLD, limit_s=250) as processes:
        first, second = processes["compiled"]
    assert first == second and first[1:] == (True, True)


def test_a_hook_that_gets_no_bucket_says_which_setting_is_at_fault():
    with pytest.raises(JobError, match="optimize_ddp: 'python_reducer'"):
        sum_bucket(None, (torch.zeros(1), torch.zeros(1)))  # type: ignore[arg-type]


# State: what belongs to a rank, and what all ranks share.


def steps(tower: Tower, number: int, rewind: Rewind | None = None) -> Tower:
    for _ in range(number):
        train(tower, SPLITS, first=tower.step, steps=1)
        if rewind is not None:
            rewind.keep(tower)
    return tower


@every("form", OWING)
def test_going_back_brings_back_the_residual_of_each_rank(form, tmp_path: Path):
    def work(collective: ThreadCollective) -> list[bool]:
        tower, rewind = build(collective, form), Rewind(tmp_path / str(collective.rank), depth=5)
        rewind.keep(tower)
        steps(tower, 5, rewind)
        digest, residual, shared = tower.digest_bytes(), owed(tower), copy.deepcopy(tower.state_dict()["compression"])
        again = build(collective, form)  # another process: it finds what was kept
        Rewind(tmp_path / str(collective.rank), depth=5).take_back(again, 3)
        went_back = again.step == 3 and any(kept.any() for kept in owed(again).values())
        steps(again, 2)
        same = all(owed(again)[name].equal(kept) for name, kept in residual.items())
        guesses = again.state_dict()["compression"].get("guesses", {})
        same_guesses = all(guesses[name].equal(guess) for name, guess in shared.get("guesses", {}).items())
        return [went_back, again.digest_bytes() == digest, same, same_guesses]

    assert threads(work) == [[True] * 4] * WORLD


def test_a_newcomer_owes_nothing_and_takes_the_guesses_of_the_others():
    def work(collective: ThreadCollective) -> tuple[bytes, bool, Any]:
        tower = steps(build(collective, "powersgd"), 4)
        if collective.rank == 1:
            tower = tower_of(model=Layers(7), compression=FORMS["powersgd"])
        tower.join(collective)
        share(tower, 0, [1])
        owes = any(kept.any() for kept in owed(tower).values())
        guesses = {name: guess.clone() for name, guess in tower.state_dict()["compression"]["guesses"].items()}
        return steps(tower, 2).digest_bytes(), owes, guesses

    (first, first_owes, ours), (second, second_owes, theirs) = threads(work)
    assert first == second and first_owes and not second_owes
    assert ours and all(theirs[name].equal(guess) for name, guess in ours.items())


@every("form", ["none", "bf16", *OWING])
def test_a_tower_tells_what_it_owes_beside_the_gradients_of_its_last_steps(form):
    def work(collective: ThreadCollective) -> tuple[bool, dict[str, float], float, list[float]]:
        tower, norms = build(collective, form), list[float]()
        nothing_yet = tower.unsent in ({}, {"norm": 0.0, "step_norm": 0.0})
        for step in range(18):
            tower.backward(*part_of(batch(step, 24), *SPLITS[collective.rank]), 1 / 24)
            norms.append(tower.update(step).grad_norm)
        squares = sum(float(kept.double().square().sum()) for kept in owed(tower).values())
        return nothing_yet, tower.unsent, math.sqrt(squares), norms

    for nothing_yet, unsent, norm, norms in threads(work):
        assert nothing_yet and bool(unsent) == (form in OWING)
        if unsent:
            assert unsent == {"norm": pytest.approx(norm), "step_norm": pytest.approx(sum(norms[-16:]) / 16)}
            assert norm > 0.0


def test_a_step_cut_off_after_its_sum_leaves_the_residual_as_it_was():
    def work(collective: ThreadCollective) -> bool:
        tower = steps(build(collective, "int8"), 3)
        before = owed(tower)
        dense, leaves, label = part_of(batch(3, 24), *SPLITS[collective.rank])
        tower.backward(dense, leaves, label, 1 / 24)
        tower.sums.finish()
        tower.sums.leave()
        tower.sums.compression.settle(applied=True)
        return all(owed(tower)[name].equal(kept) for name, kept in before.items())

    assert threads(work) == [True, True]


def test_a_state_without_compression_is_loaded_as_one_that_owes_nothing():
    tower = tower_of(model=Layers(), compression=FORMS["int8"])
    state = copy.deepcopy(tower.state_dict())
    del state["compression"]
    tower.load_state_dict(state)
    assert not any(kept.any() for kept in owed(tower).values())


def test_a_compressed_tower_learns_as_the_uncompressed_one():
    def work(collective: ThreadCollective, name: str) -> torch.Tensor:
        tower = build(collective, name, config={"optimizer": {"name": "sgd", "lr": 1.0}})
        train(tower, SPLITS, steps=25)
        return values_of(tower) - start

    start = values_of(tower_of(model=Layers(0)))
    moved = threads(work, "none")[0]
    for form in OWING:
        found = threads(work, form)[0]
        assert 0.0 < float((found - moved).norm()) < 0.5 * float(moved.norm()), form
