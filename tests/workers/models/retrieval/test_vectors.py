"""The loss of vectors beside a transcription in float64, query by query, with all gradients."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardkeep.workers.models.retrieval.vectors import VectorModel, softmax_losses
from shardkeep.workers.retrieval.candidates import CANDIDATES, Candidates
from tests.support.cases import every

TARGETS = {
    "among the shared": (0, 2, 1, 0),
    "beyond the shared": (4, 3, 4, 4),
    "both": (1, 4, 3, 2),
    "some have none": (-1, 4, -1, 2),
    "all have none": (-1, -1, -1, -1),
}
WIDTH, COUNT = 3, 5


def candidates_of(targets: tuple[int, ...], *, shared: int = 3, count: int = COUNT) -> Candidates:
    log_q_C = -2.0 * torch.rand(count, dtype=torch.float64)
    return Candidates(torch.empty(count, 0), {}, log_q_C, shared, torch.tensor(targets, dtype=torch.int64))


def expected_loss(query_E: torch.Tensor, items_CE: torch.Tensor, candidates: Candidates, target: int) -> torch.Tensor:
    """-log(e^s_t / (e^s_t + sum of e^s over the shared others))."""
    score_C = (items_CE * query_E).sum(1) - candidates.log_q_C
    others = [c for c in range(candidates.shared) if c != target]
    return -torch.log(score_C[target].exp() / (score_C[target].exp() + score_C[others].exp().sum()))


@every("targets", TARGETS.values(), ids=TARGETS)
@every("shared", [0, 3, COUNT])
def test_a_query_is_compared_with_the_shared_items_and_its_own(targets: tuple[int, ...], shared: int) -> None:
    torch.manual_seed(0)
    queries = torch.randn(len(targets), WIDTH, dtype=torch.float64).requires_grad_()
    items = torch.randn(COUNT, WIDTH, dtype=torch.float64).requires_grad_()
    candidates = candidates_of(targets, shared=shared)
    found = softmax_losses(queries, items, candidates)
    expected = torch.stack([
        expected_loss(query, items, candidates, t) if t >= 0 else 0.0 * query.sum()
        for query, t in zip(queries, targets, strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    for own, other in zip(
        torch.autograd.grad((found * weight).sum(), [queries, items]),
        torch.autograd.grad((expected * weight).sum(), [queries, items], allow_unused=True, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(own, other)


def test_without_any_item_or_any_query_there_is_no_loss_and_no_gradient() -> None:
    for queries, count in itertools.product((0, 2), (0, 1)):
        query = torch.randn(queries, WIDTH, dtype=torch.float64).requires_grad_()
        items = torch.randn(count, WIDTH, dtype=torch.float64).requires_grad_()
        candidates = candidates_of((-1,) * queries, shared=count, count=count)
        losses = softmax_losses(query, items, candidates)
        losses.sum().backward()
        assert losses.shape == (queries,)
        assert not any(x.any() for x in (losses, query.grad, items.grad))  # type: ignore[union-attr]


def test_a_certain_item_and_a_hopeless_one_have_finite_gradients() -> None:
    queries = torch.tensor([[1e4], [-1e4]]).requires_grad_()
    items = torch.tensor([[1.0], [-1.0], [0.0]]).requires_grad_()
    losses = softmax_losses(queries, items, Candidates(torch.empty(3, 0), {}, torch.zeros(3), 2, torch.tensor([0, 0])))
    losses.sum().backward()
    assert losses.tolist() == [0.0, 2e4]
    for value in (queries.grad, items.grad):
        assert value is not None and value.isfinite().all()


class Given(VectorModel):
    """Its vectors are its inputs, through a linear layer."""

    def __init__(self, *, cosine: bool, temperature: float) -> None:
        super().__init__(cosine=cosine, temperature=temperature)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def users(self, dense_BI: torch.Tensor, inputs: object) -> torch.Tensor:
        return self.layer(dense_BI)  # type: ignore[no-any-return]

    def items(self, dense_CI: torch.Tensor, inputs: object) -> torch.Tensor:
        return dense_CI


def given(targets: tuple[int, ...]) -> tuple[torch.Tensor, Candidates]:
    torch.manual_seed(3)
    return torch.randn(len(targets), WIDTH), Candidates(
        torch.randn(COUNT, WIDTH), {}, -torch.rand(COUNT), 3, torch.tensor(targets)
    )


@every("cosine", [True, False])
def test_similarities_are_divided_by_the_temperature_and_chances_are_not(cosine: bool) -> None:
    dense, candidates = given((0, 4, 2))
    model = Given(cosine=cosine, temperature=0.1)
    users, items = model.layer(dense), candidates.dense_CI
    if cosine:
        users, items = (x / x.norm(dim=1, keepdim=True) for x in (users, items))
    expected = [
        expected_loss(user / 0.1, items, candidates, t) for user, t in zip(users, (0, 4, 2), strict=True)
    ]  # fmt: skip
    losses = model(dense, {CANDIDATES: candidates})
    assert losses.shape == (3, 1) and losses.dtype == torch.float32
    torch.testing.assert_close(losses[:, 0], torch.stack(expected))


def test_the_sum_over_samples_is_their_number_times_the_mean_of_queries_with_a_target() -> None:
    model = Given(cosine=False, temperature=1.0)
    dense, candidates = given((0, -1, 4, -1))
    losses = model(dense, {CANDIDATES: candidates})[:, 0]
    alone = softmax_losses(model.layer(dense), candidates.dense_CI, candidates)
    assert losses[1] == losses[3] == 0.0
    torch.testing.assert_close(losses.sum(), 4 * (alone[0] + alone[2]) / 2)


def test_the_softmax_is_float32_under_autocast() -> None:
    model = Given(cosine=True, temperature=0.05)
    dense, candidates = given((0, 4, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.users(dense, {}).dtype == torch.bfloat16
        losses = model(dense, {CANDIDATES: candidates})
        users = model.users(dense, {}).float()
    assert losses.dtype == torch.float32
    exact = softmax_losses(F.normalize(users) / 0.05, F.normalize(candidates.dense_CI), candidates)
    torch.testing.assert_close(losses[:, 0], exact, rtol=1e-6, atol=1e-6)


def test_the_correction_makes_the_gradient_that_of_all_items_in_expectation() -> None:
    """Drawn candidates with chances q: e^(s - log q) has the mean e^s, so the sum over them has that over all items."""
    torch.manual_seed(5)
    chance_C, items = torch.tensor([0.9, 0.5, 0.2, 0.7], dtype=torch.float64), torch.randn(4, WIDTH).double()
    query, sums = torch.randn(1, WIDTH).double(), []
    for present in itertools.product((True, False), repeat=4):
        part = torch.tensor(present)
        probability = float(torch.where(part, chance_C, 1 - chance_C).prod())
        log_q = torch.cat([chance_C[part].log(), torch.zeros(1, dtype=torch.float64)])
        stranger = torch.cat([items[part], torch.zeros(1, WIDTH, dtype=torch.float64)])  # a target with score 0
        found = softmax_losses(
            query, stranger, Candidates(torch.empty(0), {}, log_q, int(part.sum()), torch.tensor([len(stranger) - 1]))
        )
        sums.append(probability * (float(found.exp()) - 1.0))
    assert math.fsum(sums) == pytest.approx(float((items @ query[0]).exp().sum()))
