"""Compression of the dense gradient, all ranks in one thread: sums, residuals, packets, what must not be lost."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch

from shardkeep.compression.config import FORMS, TowerCompressionConfig
from shardkeep.compression.tower import formats as dense_values, powersgd as dense_powersgd
from shardkeep.compression.tower.compressor import DenseCompression
from shardkeep.compression.tower.exchange import Ranks
from shardkeep.compression.tower.formats import FP16, FP32, INT8, VALUES, Rounded
from shardkeep.compression.tower.memory import merged
from shardkeep.testing.forms import SHAPES, check_form, draw, drive
from tests.support.cases import every

CONFIGS: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "fp16": {"name": "fp16"},
    "topk": {"name": "topk", "keep": 0.05},
    "topk of int8": {"name": "topk", "keep": 0.02, "values": "int8"},
    "powersgd": {"name": "powersgd"},
    "powersgd of int8": {"name": "powersgd", "rank": 3, "values": "int8"},
}
OWING = ["topk", "topk of int8", "powersgd", "powersgd of int8"]
"""Those that send later what they did not send."""


def members(config: str, world_size: int, **others: Any) -> list[DenseCompression]:
    settings = TowerCompressionConfig(**CONFIGS[config], **others)
    return [DenseCompression(settings, SHAPES, torch.device("cpu")) for _ in range(world_size)]


def step_of(
    ranks: list[DenseCompression], grads: list[dict[str, torch.Tensor]], *, step: int = 0, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    """One step of all ranks that counts; what every rank got, by name."""
    for one in ranks:
        one.begin(step, scale)
    scaled = [[part * scale for part in own.values()] for own in grads]
    sums = [one.sum(list(SHAPES), scaled[rank], Ranks(rank, len(ranks))) for rank, one in enumerate(ranks)]
    totals, _ = drive(sums)
    for one in ranks:
        one.memory.settle(applied=True)
    assert all(total.equal(totals[0]) for total in totals)
    parts = totals[0].split([torch.Size(shape).numel() for shape in SHAPES.values()])
    return {name: part.view(SHAPES[name]) / scale for name, part in zip(SHAPES, parts, strict=True)}


def owed(ranks: list[DenseCompression]) -> dict[str, torch.Tensor]:
    """The residuals of all ranks together, float64; zeros where there are none."""
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for one in ranks:
        for name, kept in one.memory.local_state_dict().items():
            total[name] += kept.view(SHAPES[name]).double()
    return total


def assert_conserved(before: Any, grads: list[dict[str, torch.Tensor]], got: Any, after: Any, tol: float) -> None:
    """Delivered + residual now = gradients of all ranks + residual before, in float64."""
    for name in SHAPES:
        due = sum((g[name].double() for g in grads), before[name])
        torch.testing.assert_close(got[name].double() + after[name], due, rtol=0, atol=tol)


def test_every_form_and_every_format_of_the_config_is_tested() -> None:
    named = get_args(TowerCompressionConfig.model_fields["values"].annotation)
    assert set(VALUES) == set(get_args(named[0])) and {c["name"] for c in CONFIGS.values()} == set(FORMS)


def sharded(patch: pytest.MonkeyPatch, *, always: bool) -> None:
    """Whether more than two ranks sum in two rounds, each a shard, or in one."""
    for module in (dense_values, dense_powersgd):
        patch.setattr(module, "ONE_ROUND_BYTES", 0 if always else 1 << 30)


@every(("config", "always"), zip(CONFIGS, itertools.cycle([True, False, False, True])))
def test_every_form_keeps_the_promises_of_the_protocol(
    config: str, always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded(monkeypatch, always=always)
    settings = CONFIGS[config]
    check_form(FORMS[settings["name"]].load(), **{key: value for key, value in settings.items() if key != "name"})


@every(("config", "always"), [("topk", True), ("powersgd", False), ("powersgd", True)])
def test_in_the_first_steps_all_values_go_and_nothing_is_lost(
    config: str, always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded(monkeypatch, always=always)
    ranks = members(config, 3, warmup_steps=2)
    for step in range(3):
        grads, before = [draw(step, rank) for rank in range(3)], owed(ranks)
        got = step_of(ranks, grads, step=step)
        assert_conserved(before, grads, got, owed(ranks), 3e-5)
        left = max(float(kept.abs().max()) for kept in owed(ranks).values() if kept.numel())
        assert (left < 0.02) == (step < 2)


@every("config", OWING)
def test_a_step_that_is_cut_off_in_the_middle_takes_nothing_away(config: str) -> None:
    cut_off, straight = members(config, 2), members(config, 2)
    for all_ranks in (cut_off, straight):
        step_of(all_ranks, [draw(0, 0), draw(0, 1)])
    for one in cut_off:
        one.begin(1)
    drive([one.sum(list(SHAPES), list(draw(5, r).values()), Ranks(r, 2)) for r, one in enumerate(cut_off)])
    expected, got = (step_of(each, [draw(1, 0), draw(1, 1)], step=2) for each in (straight, cut_off))
    assert all(got[name].equal(expected[name]) for name in SHAPES)


@every("config", OWING)
def test_residuals_do_not_change_their_size_with_the_loss_scale(config: str) -> None:
    scaled, plain = members(config, 2), members(config, 2)
    for step, scale in enumerate((65536.0, 32768.0, 65536.0, 1.0)):
        grads = [draw(step, 0), draw(step, 1)]
        got, expected = step_of(scaled, grads, step=step, scale=scale), step_of(plain, grads, step=step)
        for name in SHAPES:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-5)
    for name, kept in owed(scaled).items():
        torch.testing.assert_close(kept, owed(plain)[name], rtol=1e-5, atol=1e-5)


@every("config", OWING)
def test_a_parameter_that_no_rank_used_keeps_what_is_owed_for_it(config: str) -> None:
    ranks = members(config, 3)
    step_of(ranks, [draw(0, rank) for rank in range(3)])
    before = owed(ranks)
    grads = [draw(1, rank) | {"tall": torch.zeros(SHAPES["tall"])} for rank in range(3)]
    got = step_of(ranks, grads, step=1)
    assert not got["tall"].any() and before["tall"].any() and owed(ranks)["tall"].equal(before["tall"])
    grads = [draw(2, rank) | ({"tall": torch.zeros(SHAPES["tall"])} if rank else {}) for rank in range(3)]
    before = owed(ranks)  # now one rank uses it
    assert_conserved(before, grads, step_of(ranks, grads, step=2), owed(ranks), 3e-5)


def test_powersgd_sends_a_gradient_of_its_rank_whole_also_after_zeros() -> None:
    ranks = members("powersgd", 2)
    drawn = torch.Generator().manual_seed(1)
    low = [torch.randn(40, 1, generator=drawn) @ torch.randn(1, 90, generator=drawn) for _ in range(2)]
    grads = [draw(0, rank) | {"wide": low[rank]} for rank in range(2)]
    got = step_of(ranks, grads)
    torch.testing.assert_close(got["wide"], low[0] + low[1], rtol=1e-3, atol=1e-4)

    ranks = members("powersgd", 2)
    step_of(ranks, [{name: torch.zeros(shape) for name, shape in SHAPES.items()}] * 2)
    assert not ranks[0].memory.shared
    assert (step_of(ranks, grads, step=1)["wide"] - low[0] - low[1]).norm() < 0.9 * (low[0] + low[1]).norm()


@every(("fmt", "error"), [(FP16, 2**-10), (INT8, 0.02)])
def test_formats_keep_gradients_of_any_size_zeros_signs_and_ties(fmt: Any, error: float) -> None:
    for size in (1e-9, 1.0, 1e7):
        true = draw(0, 0, size)["wide"].view(-1)[:3584]
        got = fmt.decode(*fmt.encode(true.unsqueeze(0)))[0]
        assert (got - true).norm() < error * true.norm() and (got != 0).float().mean() > 0.9
    values = torch.tensor([0.0, -1.0, 1.0, 1.0, -0.5, 0.25] + [0.0] * 58 + [-7.0] * 64 + [0.0] * 64)
    scales, codes = fmt.encode(torch.stack([values, -values]))
    assert scales.shape == (2, 3) and codes.shape == (2, 192) and codes.dtype == fmt.dtype
    found, negative = fmt.decode(scales, codes)
    torch.testing.assert_close(found, values, rtol=0.01, atol=0.005)
    assert torch.equal(found == 0, values == 0) and len(set(found[64:128].tolist())) == 1
    assert negative.equal(-found)


@every("world_size", [1, 2, 3, 5])
@every("num_values", [1, 16_400, 70_000])
def test_fp32_adds_in_rank_order_bit_for_bit_whatever_the_shards(num_values: int, world_size: int) -> None:
    drawn = torch.Generator().manual_seed(num_values)
    values = [torch.randn(num_values, generator=drawn) for _ in range(world_size)]
    expected = values[0].clone()
    for part in values[1:]:
        expected += part
    form = Rounded({"v": (num_values,)}, FP32)
    totals, sent = drive([form.sum(["v"], [v], Ranks(r, world_size)) for r, v in enumerate(values)])
    assert all(total.equal(expected) for total in totals)
    all_gather, two_rounds = (world_size - 1) * 4 * num_values, 8 * (world_size - 1) * -(-num_values // world_size)
    sharded = world_size > 2 and 4 * num_values >= 1 << 16
    assert sent["all"] == (two_rounds if sharded else all_gather)


@every("config", OWING)
def test_one_rank_takes_over_what_several_owed_and_a_state_must_fit(config: str) -> None:
    ranks = members(config, 3)
    step_of(ranks, [draw(0, rank) for rank in range(3)])
    total, (heir,) = owed(ranks), members(config, 1)
    state = merged(one.memory.local_state_dict() for one in ranks)
    heir.memory.load_local_state_dict(state)
    for kept in state.values():
        kept.zero_()  # it is copied
    for name, kept in owed([heir]).items():
        torch.testing.assert_close(kept, total[name], rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="residual of other, 3 values: does not fit the model"):
        heir.memory.load_local_state_dict({"other": torch.zeros(3)})
    heir.memory.load_state_dict(ranks[0].memory.state_dict())  # of another tower: no residual
    assert not any(kept.any() for kept in owed([heir]).values())
    assert merged([]) == {} == merged([{}, {}])
