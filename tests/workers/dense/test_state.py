"""A tower's state: its state dict, made once; its last states, kept, found by another process, gone back to, shared."""

from __future__ import annotations

import contextlib
import functools
import logging
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from shardkeep.base.errors import CheckpointError
from shardkeep.workers.collectives.collective import ThreadCollective
from shardkeep.workers.dense.state import ModelState, share_buffers
from shardkeep.workers.dense.tower import Tower, share
from shardkeep.workers.metrics.binned import BinnedScores
from shardkeep.workers.rewind import LastStep, Rewind
from tests.support.cases import every
from tests.support.forked import fork_context
from tests.support.ranks import run_ranks
from tests.support.towers import batch, part_of, seeded_model, tower_of


class Counting(nn.Linear):
    """Its buffer is another tensor after each forward pass."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x)


class Extra(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def plain() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model.register_buffer("constant", torch.ones(2), persistent=False)  # in no state dict
    return model


def in_values(state):
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


@every(
    ("make", "change"),
    [
        (plain, lambda model: [parameter.data.add_(1.0) for parameter in model.parameters()]),  # in place
        (plain, lambda model: [setattr(p, "data", torch.randn_like(p)) for p in model.parameters()]),
        (plain, lambda model: [setattr(p, "data", p.data.t()) for p in model.parameters()]),
        (plain, lambda model: model.load_state_dict({k: t + 1.0 for k, t in plain().state_dict().items()})),
        (Counting, lambda model: model(torch.ones(1, 3))),
        (lambda: Extra(3, 2), lambda model: model(torch.ones(1, 3))),
    ],
)
def test_it_is_the_models_own(make, change):
    model = make()
    state = ModelState(model)
    for _ in range(3):
        assert in_values(state.get()) == in_values(model.state_dict())
        change(model)
    assert in_values(state.get()) == in_values(model.state_dict())


def test_a_plain_model_is_walked_through_once_and_one_with_a_hook_or_state_dict_of_its_own_every_time(monkeypatch):
    model, calls = plain(), iter(range(1000))
    model.register_state_dict_post_hook(lambda m, state, prefix, _: state.update(calls=torch.tensor(next(calls))))
    state = ModelState(model)
    assert [int(state.get()["calls"]) for _ in range(3)] == [0, 1, 2]
    model, answers = plain(), iter([{"n": 1}, {"n": 2}])
    model.state_dict = lambda: next(answers)
    state = ModelState(model)
    assert [state.get(), state.get()] == [{"n": 1}, {"n": 2}]
    model = plain()
    state = ModelState(model)
    first = state.get()
    monkeypatch.setattr(model, "state_dict", lambda: pytest.fail("asked again"))
    assert state.get() is first


class Measuring(nn.Module):
    """Buffers of several shapes and dtypes, full of one value."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((3, 2), float(value)))
        self.register_buffer("sum", torch.full((2,), float(value), dtype=torch.float64))
        self.register_buffer("var", torch.full((), value + 0.5))
        self.register_buffer("count", torch.full((2,), value))
        self.register_buffer("empty", torch.empty(0))


def test_rank_0s_floating_buffers_replace_the_others_whatever_their_shapes_and_dtypes() -> None:
    models = [Measuring(value) for value in (5, 7, 9)]

    def work(collective: ThreadCollective) -> None:
        share_buffers(models[collective.rank], collective)

    run_ranks(ThreadCollective.group(3), work)
    first = dict(models[0].named_buffers())
    for rank, model in enumerate(models):
        for name, buffer in model.named_buffers():
            assert buffer.dtype == first[name].dtype
            assert torch.equal(buffer, first[name]) == (name != "count" or rank == 0), name
    assert first["mean"].tolist() == [[5.0, 5.0]] * 3 and first["var"].item() == 5.5


def test_a_skipped_step_takes_all_buffers_back_and_an_applied_one_does_not() -> None:
    model = Measuring(1)
    state = ModelState(model)
    for applied, expected in ((False, 1.0), (True, 3.0), (False, 3.0)):
        state.keep_buffers()
        for value in (2.0, 3.0):  # two micro-batches of one step
            state.keep_buffers()
            model.mean.fill_(value)
        state.settle(applied=applied)
        assert model.mean.unique().tolist() == [expected]


# The last states


ADAM = {"optimizer": {"name": "adam", "lr": 0.01}}


def train(tower: Tower, steps: int, rewind: Rewind | None = None) -> Tower:
    for _ in range(steps):
        tower.backward(*part_of(batch(tower.step, 8), 0, 8), 1 / 8)
        tower.update(tower.step)
        if rewind is not None:
            rewind.keep(tower)
    return tower


@functools.cache
def digest_after(steps: int) -> bytes:
    return train(tower_of(config=ADAM), steps).digest_bytes()


@every("optimizer", ["sgd", "adam"])
def test_going_back_and_training_again_gives_the_same_bits(tmp_path: Path, optimizer: str) -> None:
    config = {"optimizer": {"name": optimizer, "lr": 0.01}}
    rewind, tower = Rewind(tmp_path, depth=4), tower_of(config=config)
    rewind.keep(tower)
    train(tower, 7, rewind)
    assert rewind.resume_range() == (4, 7)
    digest = tower.digest_bytes()
    for step in (7, 4, 5):
        rewind.take_back(tower, step)
        assert tower.step == step
        assert train(tower, 7 - step).digest_bytes() == digest


def test_another_process_finds_what_was_kept(tmp_path: Path) -> None:
    rewind, tower = Rewind(tmp_path, depth=6), tower_of(config=ADAM)
    rewind.keep(tower)  # its optimizer has no slots yet
    train(tower, 5, rewind)
    found, other = Rewind(tmp_path, depth=6), tower_of(config=ADAM)
    assert found.resume_range() == (0, 5)
    for step in (4, 0):
        found.take_back(other, step)
        assert train(other, 5 - step, found).digest_bytes() == digest_after(5)


def test_a_state_that_was_not_kept_is_no_state_and_a_gap_ends_the_span(tmp_path: Path) -> None:
    rewind = Rewind(tmp_path / "kept", depth=2)
    assert rewind.resume_range() is None
    train(tower_of(), 3, rewind)
    with pytest.raises(KeyError):
        rewind.take_back(tower_of(), 1)
    rewind.forget_after(2)
    assert rewind.resume_range() == (2, 2)
    rewind.clear()
    assert rewind.resume_range() is None and Rewind(tmp_path / "kept", depth=2).resume_range() is None
    rewind.delete()
    assert not (tmp_path / "kept").exists()
    rewind, tower = Rewind(tmp_path / "gap", depth=8), tower_of()
    train(tower, 2, rewind)
    train(tower, 1)
    train(tower, 2, rewind)
    assert rewind.resume_range() == (4, 5)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/kept: cannot be written \(Not a directory\)"):
        Rewind(tmp_path / "file" / "kept", depth=2)


DAMAGES = {
    "magic": 0, "step": 8, "bytes of text": 16, "where tensors begin": 24, "checksum": 32, "text": 60, "tensors": -9
}  # fmt: skip
"""Where a bit is flipped, from the end where it is negative."""


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    train(tower_of(config=ADAM), 5, Rewind(tmp_path, depth=3))
    return tmp_path / "tower-2.state"


def test_a_damaged_or_cut_off_state_is_not_taken_and_an_older_one_is(
    newest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = newest.read_bytes()
    for size in (0, 20, 50, -1):
        newest.write_bytes(content[:size])
        assert Rewind(newest.parent, depth=3).resume_range() == (3, 4), size
    for part, at in DAMAGES.items():
        damaged = bytearray(content)
        damaged[at] ^= 4
        newest.write_bytes(damaged)
        caplog.clear()
        rewind = Rewind(newest.parent, depth=3)
        assert rewind.resume_range() == (3, 4), part
        (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert (warning.getMessage(), warning.fields["file"]) == ("a kept state is damaged and not used", newest), part
    other = tower_of(config=ADAM)
    with pytest.raises(KeyError):
        rewind.take_back(other, 5)
    rewind.take_back(other, 4)
    assert train(other, 1, rewind).digest_bytes() == digest_after(5)
    assert rewind.resume_range() == (3, 5)
    damaged = bytearray(newest.read_bytes())
    damaged[-9] ^= 4
    newest.write_bytes(damaged)  # while it is in use
    with pytest.raises(CheckpointError, match=r"tower-2\.state: damaged: the checksum of the kept state is wrong"):
        rewind.take_back(other, 5)
    assert rewind.resume_range() == (3, 4)


def keep_all(folder: Path, told: Connection) -> None:
    """Trains without an end in a process of its own, and tells each step whose state was kept."""
    torch.set_num_threads(1)
    rewind, tower = Rewind(folder, depth=3), tower_of(config=ADAM)
    while True:
        train(tower, 1, rewind)
        told.send(tower.step)


@pytest.mark.waits_for_processes
def test_a_process_that_is_killed_leaves_whole_states_only(tmp_path: Path) -> None:
    context = fork_context()
    heard, tell = context.Pipe(duplex=False)
    child = context.Process(target=keep_all, args=(tmp_path, tell))
    child.start()
    tell.close()
    with heard:
        told = [heard.recv() for _ in range(6)]
        child.kill()
        child.join()
        with contextlib.suppress(EOFError, OSError):  # the end, perhaps within a message
            while True:
                told.append(heard.recv())
    rewind, other = Rewind(tmp_path, depth=3), tower_of(config=ADAM)
    span = rewind.resume_range()
    assert span is not None and span[1] >= told[-1] and span[1] - span[0] >= 1
    for step in range(span[0], span[1] + 1):
        rewind.take_back(other, step)
        assert other.digest_bytes() == digest_after(step)


@every("source", [0, 2])
def test_ranks_that_lack_the_state_take_that_of_the_source(source: int) -> None:
    trained = train(tower_of(config=ADAM), 3).state_dict()

    def rank(collective: ThreadCollective) -> tuple[bytes, int]:
        tower = tower_of(config=ADAM)
        tower.join(collective)
        if collective.rank == source:
            tower.load_state_dict(trained)
        share(tower, source, [r for r in range(3) if r != source])
        return tower.digest_bytes(), tower.step

    found = run_ranks(ThreadCollective.group(3), rank)
    assert len({digest for digest, _ in found}) == 1 and [step for _, step in found] == [3, 3, 3]


def test_a_step_that_was_cut_off_leaves_no_trace_in_the_random_numbers() -> None:
    whole, tower = (tower_of(config=ADAM, model=seeded_model(dropout=0.5)) for _ in range(2))
    train(whole, 2)
    state = dict(train(tower, 1).state_dict())
    tower.backward(*part_of(batch(1, 8), 0, 8), 1 / 8, last=False)
    tower.join(tower.collective)
    tower.load_state_dict(state)
    assert train(tower, 1).digest_bytes() == whole.digest_bytes()


def test_the_last_step_is_the_only_one_that_a_tower_without_kept_states_resumes_at() -> None:
    kept, tower, scores = LastStep(), tower_of(config=ADAM), BinnedScores(("y",), numbers=False)
    assert kept.resume_range() is None
    kept.keep(tower, scores)
    train(tower, 2)
    kept.keep(tower, scores)
    assert kept.resume_range() == (2, 2)
    before = scores.state().clone()
    scores.add(np.zeros((3, 1), np.float32), np.ones((3, 1), np.float32))
    kept.take_back(tower, 2, scores)
    assert torch.equal(scores.state(), before)
    for step in (1, 3):
        with pytest.raises(KeyError):
            kept.take_back(tower, step)
    kept.forget_after(1)
    assert kept.resume_range() is None
