"""The tower: ranks against one joined batch, accumulation, overflow, clipping, schedules, compile, state."""

from __future__ import annotations

import copy
import logging
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardkeep.base.errors import CheckpointError, UserError
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.workers.checkpoint.tower_state import load_tower, save_tower, tower_state
from shardkeep.workers.collectives.collective import ThreadCollective
from shardkeep.workers.config import LossConfig
from tests.support.cases import every
from tests.support.ranks import run_ranks
from tests.support.towers import (
    Forgetful,
    batch,
    part_of,
    seeded_model,
    tower_of,
    train,
    values_of,
)


@every(
    ("optimizer", "splits", "micro"),
    [
        ("adam", [(0, 24)], 4),
        ("adam", [(0, 12), (12, 24)], 1),
        ("adamw", [(0, 17), (17, 24)], 3),
        ("sgd", [(0, 13), (13, 13), (13, 24)], 1),  # one without samples
    ],
)
def test_ranks_and_micro_batches_together_train_as_one_worker_on_the_joined_batch(optimizer, splits, micro):
    config = {"optimizer": {"name": optimizer, "lr": 0.01, "weight_decay": 0.01}}
    alone = tower_of(config=config)
    alone_grads = train(alone, [(0, 24)], steps=3)

    def work(collective):
        tower = tower_of(model=models[collective.rank], collective=collective, config=config)
        grads = train(tower, splits, steps=3, micro=micro)
        return values_of(tower), grads, tower.digest_bytes()

    models = [seeded_model(rank) for rank in range(len(splits))]  # rank 0's parameters are the ones used
    ranks = run_ranks(ThreadCollective.group(len(splits)), work)
    assert len({digest for _, _, digest in ranks}) == 1
    torch.testing.assert_close(ranks[0][0], values_of(alone), rtol=1e-5, atol=1e-6)
    for step, expected in enumerate(alone_grads):
        joined = torch.cat([ranks[r][1][step] for r, (i, j) in enumerate(splits) if j > i])
        torch.testing.assert_close(joined, expected, rtol=1e-4, atol=1e-6)
        assert not any(ranks[r][1][step].any() for r, (i, j) in enumerate(splits) if i == j)


MEANS = {
    "bce": F.binary_cross_entropy_with_logits,
    "mse": F.mse_loss,
    "huber": F.huber_loss,
    "huber of 0.2": partial(F.huber_loss, delta=0.2),
}


@every("name", MEANS)
@every("factors_B", [None, torch.linspace(0, 2, 24)], ids=["no factors", "factors"])
def test_one_worker_trains_as_a_plain_pytorch_loop_and_factors_multiply_the_losses_of_samples(name, factors_B):
    loss_name, _, delta = name.partition(" of ")
    tower, plain = tower_of(loss=LossConfig(name=loss_name, delta=float(delta) if delta else None)), seeded_model()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.001)
    for step in range(2):
        dense, leaves, label = part_of(batch(step, 24), 0, 24)
        loss = tower.backward(dense, leaves, label, 1 / 24, factors_B)
        tower.update(step)
        own = {feature: leaf.detach().clone().requires_grad_() for feature, leaf in leaves.items()}
        losses = MEANS[name](plain(dense, own), label, reduction="none")
        expected = (losses if factors_B is None else losses * factors_B[:, None]).mean()
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach())
        for feature, leaf in leaves.items():
            torch.testing.assert_close(leaf.grad, own[feature].grad)
    plain_values = nn.utils.parameters_to_vector(plain.parameters()).detach()
    torch.testing.assert_close(values_of(tower), plain_values, rtol=1e-5, atol=1e-6)


def test_logits_of_another_shape_than_the_labels_are_the_users_error():
    class Flat(nn.Linear):
        def forward(self, dense, _rows):
            return super().forward(dense).squeeze(1)

    dense, leaves, label = part_of(batch(0, 8), 0, 8)
    with pytest.raises(UserError, match=r"forward returned logits \(8, 1\); expected \(8, 2\)"):
        tower_of().backward(dense, leaves, label.repeat(1, 2), 1 / 8)
    with pytest.raises(UserError, match=r"forward returned logits \(8,\); expected \(8, 1\)"):
        tower_of(model=Flat(3, 1)).backward(dense, leaves, label, 1 / 8)


@every(
    ("amp", "bad", "rows_finite", "scales"),
    [("fp16", 1e30, True, [1.0, 2.0]), ("fp16", None, False, [1.0, 2.0]), ("off", math.inf, True, [65536.0] * 2)],
    ids=["dense gradient", "rows", "no scaler"],
)
def test_an_overflow_on_one_rank_skips_the_step_on_both_and_halves_the_scale(amp, bad, rows_finite, scales):
    def work(collective):
        tower = tower_of(collective=collective, config={"amp": amp})
        before, hit = values_of(tower).clone(), collective.rank == 1
        dense, leaves, label = part_of(batch(0, 24), 0, 24)
        tower.backward(torch.full_like(dense, bad) if hit and bad else dense, leaves, label, 1 / 48)
        first = tower.update(0, rows_finite=rows_finite or not hit)
        unchanged = torch.equal(values_of(tower), before)
        tower.backward(*part_of(batch(1, 24), 0, 24), 1 / 48)
        second = tower.update(1)
        return [first.applied, unchanged, second.applied], [first.row_scale * 65536, second.row_scale * 65536]

    assert run_ranks(ThreadCollective.group(2), work) == [([False, True, True], scales)] * 2


def test_row_gradients_under_a_scaler_times_row_scale_are_the_true_ones():
    grads = {}
    for amp in ("off", "fp16"):
        tower = tower_of(config={"amp": amp})
        dense, leaves, label = part_of(batch(0, 24), 0, 24)
        loss = tower.backward(dense, leaves, label, 1 / 24)
        update = tower.update(0)
        grads[amp] = leaves["a"].grad * update.row_scale
        assert loss.dtype == torch.float32 and update.applied and tower.precision.scaling == (amp == "fp16")
    scale = grads["off"].abs().max()
    assert (grads["fp16"] - grads["off"]).abs().max() < 0.02 * scale


def test_clipping_bounds_the_norm_over_all_ranks():
    def work(collective: ThreadCollective) -> tuple[float, float]:
        tower = tower_of(collective=collective, clip_norm=0.01, config={"optimizer": {"name": "sgd", "lr": 1.0}})
        before = values_of(tower).clone()
        tower.backward(*part_of(batch(0, 24), 12 * collective.rank, 12 * collective.rank + 12), 1 / 24)
        return tower.update(0).grad_norm, float((values_of(tower) - before).norm())

    alone = tower_of()
    alone.backward(*part_of(batch(0, 24), 0, 24), 1 / 24)
    true_norm = alone.update(0).grad_norm
    assert true_norm > 0.02
    for norm, moved in run_ranks(ThreadCollective.group(2), work):
        assert norm == pytest.approx(true_norm, rel=1e-4) and moved == pytest.approx(0.01, rel=1e-3)


def test_the_schedule_sets_the_rate_by_the_step_in_the_call():
    schedule = {"warmup_steps": 4, "decay": "linear", "decay_steps": 10}
    moved = {}
    for step in (0, 3, 9, 14):
        tower = tower_of(config={"optimizer": {"name": "sgd", "lr": 0.5, "schedule": schedule}})
        before = values_of(tower).clone()
        tower.backward(*part_of(batch(0, 24), 0, 24), 1 / 24)
        norm = tower.update(step).grad_norm
        moved[step] = float((values_of(tower) - before).norm()) / norm
    assert moved == pytest.approx({0: 0.125, 3: 0.5, 9: 0.25, 14: 0.0}, rel=1e-3)


def test_a_parameter_that_the_model_leaves_out_stays_as_it_is():
    def work(collective):
        config = {"optimizer": {"name": "adamw", "weight_decay": 0.1}}
        tower = tower_of(model=Forgetful(), collective=collective, config=config)
        before = tower.model.unused.weight.detach().clone()
        train(tower, [(0, 12), (12, 24)], steps=2)
        return torch.equal(tower.model.unused.weight, before)

    assert run_ranks(ThreadCollective.group(2), work) == [True, True]


def test_predict_is_float32_has_no_dropout_and_leaves_training_mode_on():
    tower = tower_of(model=seeded_model(dropout=0.5), config={"amp": "bf16"})
    dense, values, _ = batch(0, 24)
    first = tower.predict(dense, values)
    assert first.dtype == torch.float32 and first.shape == (24, 1) and not first.requires_grad
    assert torch.equal(first, tower.predict(dense, values)) and tower.model.training


def test_dropout_depends_on_seed_and_step_and_leaves_the_global_generator_alone():
    def digest(seed: int) -> bytes:
        tower = tower_of(model=seeded_model(dropout=0.5), seed=seed)
        train(tower, [(0, 24)], micro=2)
        return tower.digest_bytes()

    state = torch.get_rng_state()
    first = digest(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert digest(1) == first and digest(2) != first


@every("amp", ["off", "fp16"])
def test_a_loaded_or_saved_state_goes_on_bit_for_bit(amp, tmp_path):
    config = {"amp": amp}
    straight, loaded, saved = (tower_of(model=seeded_model(seed), config=config) for seed in (0, 9, 8))
    train(straight, [(0, 24)], steps=3)
    loaded.load_state_dict(copy.deepcopy(straight.state_dict()))
    checkpoints = Checkpoints(tmp_path)
    load_tower(saved, checkpoints.commit(3, save_tower(tower_state(straight), checkpoints.begin(3)), {}))
    assert loaded.digest_bytes() == saved.digest_bytes() == straight.digest_bytes()
    for tower in (straight, loaded, saved):
        tower.backward(*part_of(batch(3, 24), 0, 24), 1 / 24)
        tower.update(3)
    assert loaded.digest_bytes() == saved.digest_bytes() == straight.digest_bytes()


def test_tied_weights_are_saved_and_a_tower_of_another_model_is_refused_in_one_line(tmp_path):
    def tied():
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        model["b"].weight = model["a"].weight
        return tower_of(model=model)

    tower, other, checkpoints = tied(), tied(), Checkpoints(tmp_path)
    saved = checkpoints.commit(1, save_tower(tower_state(tower), checkpoints.begin(1)), {})
    load_tower(other, saved)
    assert other.digest_bytes() == tower.digest_bytes() and other.model["b"].weight is other.model["a"].weight
    with pytest.raises(CheckpointError, match=r"tower: does not fit the model: [^\n]*$"):
        load_tower(tower_of(model=nn.Linear(3, 1)), saved)


def test_the_digest_sees_parameters_and_optimizer_state():
    tower = tower_of()
    train(tower, [(0, 24)], steps=1)
    before = tower.digest_bytes()
    with torch.no_grad():
        tower.optimizer.torch.state[tower.optimizer.parameters[0]]["exp_avg"].view(-1)[0] += 1e-3
    changed = tower.digest_bytes()
    assert changed != before
    with torch.no_grad():
        tower.optimizer.parameters[0].view(-1)[0] += 1.0
    assert tower.digest_bytes() != changed


# Mixed precision: what is chosen, and why.


def test_emulated_bf16_is_said_once_and_auto_never_chooses_it(monkeypatch, caplog):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False})
    with caplog.at_level(logging.INFO):
        assert "off:" in tower_of(config={"amp": "auto"}).chosen["amp"]
        assert "does not compute in bf16" in tower_of(config={"amp": "bf16"}).chosen["amp"]
    assert sum("off is faster" in record.getMessage() for record in caplog.records) == 1
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert tower_of(config={"amp": "auto"}).chosen["amp"].startswith("bf16: ")
