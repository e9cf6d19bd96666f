"""Hidden layers: norms, activations, initial values, dropout, running statistics, and norms that ranks share."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardkeep.workers.collectives.collective import ThreadCollective
from shardkeep.workers.models.layers.dropout import Dropout
from shardkeep.workers.models.layers.hidden import HiddenOptions, Mlp, linear
from shardkeep.workers.models.layers.norms import BatchNorm, Dice
from tests.support.cases import every
from tests.support.ranks import run_ranks
from tests.support.towers import batch, part_of, seeded_model, tower_of, train


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(layer, x):
    """One training pass as the Mlp makes it: the output, with the statistics observed."""
    y, statistics = layer(x)
    layer.observe(statistics)
    return y


def test_batch_norm_is_torchs_in_training_and_evaluation():
    own, reference = BatchNorm(5), nn.BatchNorm1d(5)
    with torch.no_grad():
        for layer in (own, reference):
            layer.weight.copy_(drawn(5, seed=8))
            layer.bias.copy_(drawn(5, seed=9))
    for step in range(4):
        x, twin = (3.0 * drawn(7 + step, 5, seed=step) + 2.0 for _ in range(2))
        x.requires_grad_(), twin.requires_grad_()
        own_y, reference_y = run(own, x), reference(twin)
        (own_y**3).sum().backward(), (reference_y**3).sum().backward()
        torch.testing.assert_close(own_y, reference_y)
        torch.testing.assert_close(x.grad, twin.grad)
    for name in ("weight", "bias"):
        torch.testing.assert_close(getattr(own, name).grad, getattr(reference, name).grad)
    own.eval(), reference.eval()
    torch.testing.assert_close(own(drawn(6, 5))[0], reference(drawn(6, 5)))


def test_dice_is_the_papers_formula():
    dice, x = Dice(3), drawn(9, 3)
    with torch.no_grad():
        dice.alpha.copy_(torch.tensor([0.1, -0.4, 0.9]))
    p = 1 / (1 + torch.exp(-(x - x.mean(0)) / torch.sqrt(x.var(0, unbiased=False) + 1e-8)))
    torch.testing.assert_close(run(dice, x), p * x + (1 - p) * torch.tensor([0.1, -0.4, 0.9]) * x)
    torch.testing.assert_close(dice.norm.running_mean, 0.01 * x.mean(0))
    dice.eval()
    mean, var = 0.01 * x.mean(0), 0.99 + 0.01 * x.var(0)
    p = 1 / (1 + torch.exp(-(x - mean) / torch.sqrt(var + 1e-8)))
    torch.testing.assert_close(dice(x)[0], p * x + (1 - p) * torch.tensor([0.1, -0.4, 0.9]) * x)


@every("layer", [BatchNorm(4), Dice(4)], ids=["batch norm", "dice"])
def test_fewer_than_two_samples_use_the_running_statistics_and_leave_them_alone(layer):
    run(layer, 2.0 * drawn(20, 4) + 1.0)
    before = {name: value.clone() for name, value in layer.named_buffers()}
    one = drawn(1, 4, seed=3)
    in_training = run(layer, one)
    assert all(torch.equal(value, before[name]) for name, value in layer.named_buffers())
    layer.eval()
    assert torch.equal(in_training, layer(one)[0])


@every("norm", ["none", "batch", "layer"])
@every("activation", ["relu", "gelu", "prelu", "dice"])
def test_an_mlp_is_linear_norm_activation_and_dropout_layer_after_layer(norm, activation):
    mlp, x = Mlp(6, [5, 4], HiddenOptions(norm=norm, activation=activation)), drawn(8, 6)
    expected = x
    for linear_layer, *others in mlp.blocks:
        expected = expected @ linear_layer.weight.T + linear_layer.bias
        if norm != "none":
            over = 0 if norm == "batch" else 1
            centered = expected - expected.mean(over, keepdim=True)
            expected = centered / torch.sqrt(expected.var(over, unbiased=False, keepdim=True) + 1e-5)
        p = torch.sigmoid((expected - expected.mean(0)) / torch.sqrt(expected.var(0, unbiased=False) + 1e-8))
        expected = {
            "relu": lambda v, _: v.clamp(min=0),
            "gelu": lambda v, _: 0.5 * v * (1 + torch.erf(v / math.sqrt(2))),
            "prelu": lambda v, _: torch.where(v > 0, v, 0.1 * v),
            "dice": lambda v, p: p * v,
        }[activation](expected, p)
        assert len(others) == (norm != "none") + 1
    torch.testing.assert_close(mlp(x), expected)
    dropping = Mlp(6, [5, 4], HiddenOptions(norm=norm, activation=activation, dropout=0.5))
    for block, plain in zip(dropping.blocks, mlp.blocks, strict=True):
        assert [type(layer) for layer in block] == [*(type(layer) for layer in plain), Dropout]


@every("activation", ["relu", "dice"])
def test_recomputation_observes_a_batch_once_and_changes_no_bit(activation):
    results = []
    for checkpointing in (False, True):
        torch.manual_seed(3)
        mlp = Mlp(6, [5, 4], HiddenOptions(norm="batch", activation=activation, checkpointing=checkpointing))
        for step in range(3):
            x = drawn(8, 6, seed=step).requires_grad_()
            mlp(x).square().sum().backward()
        results.append([x.grad, *(p.grad for p in mlp.parameters()), *mlp.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@every(
    ("init", "variance"),
    [("dlrm", 2 / 500), ("xavier_normal", 2 / 500), ("xavier_uniform", 2 / 500), ("kaiming_uniform", 2 / 300)],
)
def test_initial_values_have_the_deviation_of_their_paper(init, variance):
    layer, deviation = linear(300, 200, init=init), math.sqrt(variance)
    assert layer.weight.std().item() == pytest.approx(deviation, rel=0.02)
    assert layer.weight.mean().item() == pytest.approx(0.0, abs=deviation / 50)
    bounded = layer.weight.abs().max().item() <= deviation * math.sqrt(3) * 1.0001
    assert bounded == init.endswith("uniform")
    assert (layer.bias.abs().sum() > 0) == (init == "dlrm")


# Running statistics of a tower


def floats_of(tower):
    return {n: b.clone() for n, b in tower.model.named_buffers() if b.is_floating_point()}


def test_a_skipped_step_takes_the_running_statistics_back():
    tower = tower_of(model=seeded_model(norm="batch", activation="dice"))
    train(tower, [(0, 24)], steps=2, micro=2)
    before, whole = floats_of(tower), batch(2, 24)
    for part in ((0, 12), (12, 24)):
        dense, leaves, label = part_of(whole, *part)
        tower.backward(dense * 1e30, leaves, label, math.inf, last=part[1] == 24)
    assert any(not torch.equal(value, before[name]) for name, value in floats_of(tower).items())
    assert not tower.update(2).applied
    assert len(before) == 12 and all(torch.equal(value, before[name]) for name, value in floats_of(tower).items())
    train(tower, [(0, 24)], first=3, steps=1)
    assert all(not torch.equal(value, before[name]) for name, value in floats_of(tower).items())


@every("splits", [[(0, 12), (12, 24)], [(0, 0), (0, 24)]])
def test_rank_0s_running_statistics_are_the_models(splits):
    def work(collective):
        tower = tower_of(model=models[collective.rank], collective=collective)
        train(tower, splits, steps=2)
        return floats_of(tower), tower.digest_bytes()

    models = [seeded_model(norm="batch") for _ in splits]
    fresh = floats_of(tower_of(model=seeded_model(norm="batch")))
    (mine, digest), (others, other_digest) = run_ranks(ThreadCollective.group(2), work)
    assert digest == other_digest and all(torch.equal(mine[name], others[name]) for name in mine)
    changed = [not torch.equal(mine[name], fresh[name]) for name in mine]
    assert all(changed) if splits[0] != (0, 0) else not any(changed)  # rank 0 without samples has seen none


# Dropout


def dropped(share, x, seed=1):
    torch.manual_seed(seed)
    return Dropout(share)(x)


@every("share", [0.1, 0.5, 0.9])
@every("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_share_of_the_values_is_0_and_their_mean_stays(share, dtype):
    values = dropped(share, torch.full((500, 201), 2.0, dtype=dtype))
    assert values.dtype == dtype
    error = 5 * (share * (1 - share) / values.numel()) ** 0.5
    assert (values == 0).double().mean().item() == pytest.approx(share, abs=error)
    kept = values[values != 0]
    assert len(kept.unique()) == 1 and kept[0].item() == pytest.approx(2 / (1 - share), rel=2**-8)
    assert values.double().mean().item() == pytest.approx(2.0, rel=error / (1 - share) + 2**-8)


def test_each_value_has_a_draw_of_its_own_and_a_seed_gives_the_same_ones():
    zeros = dropped(0.5, torch.ones(4000, 64)) == 0
    rows, columns = zeros.double().mean(1), zeros.double().mean(0)
    assert rows.std().item() == pytest.approx(0.5 / 8, rel=0.1)
    assert columns.std().item() == pytest.approx(0.5 / 4000**0.5, rel=0.3)
    near = torch.corrcoef(zeros.double().T).fill_diagonal_(0).abs().max().item()
    assert near < 6 / 4000**0.5
    x = torch.randn(64, 33)
    assert torch.equal(dropped(0.3, x), dropped(0.3, x))
    assert not torch.equal(dropped(0.3, x), dropped(0.3, x, seed=2))


def test_gradients_pass_where_values_do_and_without_a_share_or_training_all_do(monkeypatch):
    x = torch.randn(50, 3, 7).transpose(0, 1).requires_grad_()
    y = dropped(0.4, x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y.detach(), x.detach() * grad)
    assert 0 < (grad == 0).sum() < grad.numel()
    for unchanged in (dropped(0.0, x), dropped(1e-9, x), Dropout(0.7).eval()(x)):
        assert torch.equal(unchanged, x)
    assert dropped(0.5, torch.empty(0, 5)).shape == (0, 5)
    assert torch.isfinite(dropped(1 - 1e-9, torch.ones(1 << 18))).all()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    ours = dropped(0.5, x)
    torch.manual_seed(1)
    assert torch.equal(ours, F.dropout(x, 0.5))
