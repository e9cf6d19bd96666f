"""Matrix products of a dense model: counted by shapes, once, without a change to training; and made alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import nn

from shardkeep.workers.dense import onednn
from shardkeep.workers.dense.products import Products
from tests.support.cases import every
from tests.support.towers import CPU, batch, part_of, tower_of, train, values_of

B, C, H = 6, 5, 7  # samples, columns, hidden
LAYERS = 6 * C * H + 6 * H
"""Of a sample: a multiplication and an addition for each weight, forward, for its gradient and for the input's."""


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(C, H), nn.ReLU(), nn.Linear(H, 1))


def by_onednn() -> nn.Module:
    model = mlp()
    onednn.use_for(model)
    return model


class Attention(nn.Module):
    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        return (x_BI[:, :, None] @ x_BI[:, None, :]).sum(dim=(1, 2))


def counted(model: nn.Module, around: Callable[[], contextlib.AbstractContextManager[object]]) -> Products:
    products = Products(CPU)
    with products.added(B, eager=True), around():
        model(torch.ones(B, C, requires_grad=True)).float().sum().backward()
    return products


FORMS = {
    "fp32": (mlp, contextlib.nullcontext, LAYERS),
    "bf16": (mlp, lambda: torch.autocast("cpu", dtype=torch.bfloat16), LAYERS),
    "batched": (Attention, contextlib.nullcontext, 6 * C * C),
    **({} if onednn.why_not(CPU) else {"oneDNN": (by_onednn, contextlib.nullcontext, LAYERS)}),
}


@every(("make", "around", "expected"), FORMS.values(), ids=FORMS)
def test_the_products_are_counted_by_their_shapes(make, around, expected):
    products = counted(make(), around)
    assert products.per_sample == expected and products.flops == B * expected
    assert products.flops_per_s_alone(limit_s=0.01) > 0
    nothing = counted(nn.ReLU(), contextlib.nullcontext)
    assert (nothing.flops, nothing.per_sample, nothing.flops_per_s_alone()) == (0, 0, None)
    assert Products(CPU).flops_per_s_alone() is None, "nothing was counted"


def test_only_the_first_eager_micro_batch_is_counted_and_all_are_added():
    products, model = Products(CPU), mlp()
    for samples, eager in ((4, False), (0, True), (3, True), (8, True)):
        with products.added(samples, eager=eager):
            model(torch.ones(max(samples, 1), C)).sum().backward()
    first_layer = 4 * C * H  # the input has no gradient
    assert products.per_sample == first_layer + 6 * H
    assert products.flops == (3 + 8) * products.per_sample, "a compiled one, and one without samples, came before"


def test_a_product_that_cannot_be_counted_is_made_all_the_same():
    products, sparse = Products(CPU), torch.eye(3).to_sparse()
    with products.added(3, eager=True):
        found = torch.mm(sparse, torch.ones(3, 3)) @ torch.ones(3, 2)
    assert torch.equal(found, torch.full((3, 2), 3.0))
    assert products.per_sample == 2 * 3 * 2
    assert counted(mlp(), contextlib.nullcontext).flops_per_s_alone(limit_s=0.0) > 0, "one is made without any time"


def test_counting_changes_no_bit_of_training():
    towers = [tower_of(batch_size=12) for _ in range(2)]
    with towers[1].compilation.products.counted(1):
        pass  # nothing, so its first micro-batch runs as all others do
    states = []
    for tower in towers:
        train(tower, [(0, 24)], micro=2)
        states.append((tower.digest_bytes(), torch.get_rng_state()))
    assert states[0][0] == states[1][0] and torch.equal(states[0][1], states[1][1])
    assert towers[0].compilation.products.flops > 0 == towers[1].compilation.products.flops


def test_a_stand_in_of_a_rank_without_samples_is_not_counted():
    tower = tower_of()
    tower.backward(*part_of(batch(0, 12), 0, 1), 0.0)
    assert tower.compilation.products.flops == 0 and torch.isfinite(values_of(tower)).all()
