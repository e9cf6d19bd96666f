"""Dropout: which values it sets to 0, and what it keeps of the others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardkeep.workers.models.layers.dropout import Dropout
from tests.support.cases import every

CPU_TYPES = [torch.float32, torch.bfloat16, torch.float64]


def dropped(share: float, x: torch.Tensor, seed: int = 1) -> torch.Tensor:
    torch.manual_seed(seed)
    return Dropout(share)(x)  # type: ignore[no-any-return]


@every("share", [0.1, 0.2, 0.5, 0.9])
@every("dtype", CPU_TYPES, ids=str)
def test_a_share_of_the_values_is_0_and_their_mean_stays(share: float, dtype: torch.dtype) -> None:
    values = dropped(share, torch.full((500, 401), 2.0, dtype=dtype))
    assert values.dtype == dtype
    error = 5 * (share * (1 - share) / values.numel()) ** 0.5
    assert (values == 0).double().mean().item() == pytest.approx(share, abs=error)
    kept = values[values != 0]
    assert len(kept.unique()) == 1 and kept[0].item() == pytest.approx(2 / (1 - share), rel=2**-8)
    assert values.double().mean().item() == pytest.approx(2.0, rel=error / (1 - share) + 2**-8)


def test_each_value_has_a_draw_of_its_own() -> None:
    zeros = dropped(0.5, torch.ones(4000, 64)) == 0
    rows, columns = zeros.double().mean(1), zeros.double().mean(0)
    assert rows.std().item() == pytest.approx(0.5 / 8, rel=0.1)
    assert columns.std().item() == pytest.approx(0.5 / 4000**0.5, rel=0.3)
    near = torch.corrcoef(zeros.double().T).fill_diagonal_(0).abs().max().item()
    assert near < 6 / 4000**0.5


def test_a_seed_gives_the_same_values_and_another_one_others() -> None:
    x = torch.randn(64, 33)
    assert torch.equal(dropped(0.3, x), dropped(0.3, x))
    assert not torch.equal(dropped(0.3, x), dropped(0.3, x, seed=2))


def test_gradients_pass_where_values_do() -> None:
    x = torch.randn(50, 3, 7).transpose(0, 1).requires_grad_()
    y = dropped(0.4, x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y.detach(), x.detach() * grad)
    assert 0 < (grad == 0).sum() < grad.numel()


@every("share", [0.0, 1e-9])
def test_without_a_share_nothing_changes(share: float) -> None:
    x = torch.randn(8, 5)
    assert torch.equal(dropped(share, x), x)
    assert torch.equal(Dropout(0.7).eval()(x), x)
    assert dropped(0.5, torch.empty(0, 5)).shape == (0, 5)


def test_nearly_all_may_go() -> None:
    assert torch.isfinite(dropped(1 - 1e-9, torch.ones(1 << 18))).all()


def test_compiled_it_is_torch_s_own() -> None:
    x, layer = torch.randn(16, 9), torch.compile(Dropout(0.5), backend="eager", fullgraph=True)
    torch.manual_seed(3)
    ours = layer(x)
    torch.manual_seed(3)
    assert torch.equal(ours, F.dropout(x, 0.5))
