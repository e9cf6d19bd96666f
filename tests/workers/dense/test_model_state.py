"""The state dict that is made once: equal to the model's own after every change that a model can make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardkeep.workers.collectives.collective import ThreadCollective
from shardkeep.workers.dense.state import ModelState, share_buffers
from tests.support.cases import every
from tests.support.ranks import run_ranks


class Counting(nn.Module):
    """Its buffer is another tensor after each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        y: torch.Tensor = self.linear(x)
        return y


class Extra(nn.Linear):
    """Keeps a number that is no tensor."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def plain() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model.register_buffer("constant", torch.ones(2), persistent=False)  # in no state dict
    return model


def changed_data(change):
    """Gives each parameter other data."""

    def act(model):
        for parameter in model.parameters():
            parameter.data = change(parameter.data)

    return act


def loaded(model):
    model.load_state_dict({key: torch.randn_like(value) for key, value in plain().state_dict().items()})


def run(model):
    model(torch.ones(1, 3))


@every(
    ("make", "change"),
    [
        (plain, changed_data(lambda data: data.add_(1.0))),  # in place
        (plain, changed_data(torch.randn_like)),
        (plain, changed_data(torch.t)),
        (plain, loaded),
        (Counting, run),
        (lambda: Extra(3, 2), run),
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


def in_values(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


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
