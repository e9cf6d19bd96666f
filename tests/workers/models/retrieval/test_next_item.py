"""SASRec and HSTU as models of what comes next, beside the papers' formulas, sample by sample in float64."""

# X = a sample's entries, E = width of an item's row

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardkeep.base.errors import UserError
from tests.support.cases import every
from tests.support.vector_models import (
    LENGTHS,
    LONGEST,
    candidates_of,
    list_schema,
    rows_of,
    users_of,
    vector_model,
    with_candidates,
)

WIDTH, HEADS = 6, (slice(0, 3), slice(3, 6))
NAMES = ("sasrec", "hstu")
MIXED = (LENGTHS, (0, 0), (1, 1, 1), (17, 17))
Parameters = dict[str, torch.Tensor]


def made(name: str, *, numbers: int = 0, columns: Any = ("item",), **settings: Any) -> Any:
    """A model without dropout whose parameters all differ from zero, and its sides."""
    settings = {"dropout": 0.0, "heads": 2} | settings
    model, sides = vector_model(name, list_schema(numbers=numbers, columns=columns), **settings)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():  # also those that start at zero or are tiny
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model, sides


def affine(p: Parameters, name: str, x: torch.Tensor) -> torch.Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def norm(p: Parameters, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (WIDTH,), p[f"{name}.weight"], p[f"{name}.bias"])


def sasrec_layer(p: Parameters, layer: str, x: torch.Tensor) -> torch.Tensor:
    normed, parts = norm(p, f"{layer}.norms.0", x), []
    query, (key, value) = affine(p, f"{layer}.query", normed), affine(p, f"{layer}.keys", normed).chunk(2, dim=1)
    for h in HEADS:
        share = (query[:, h] @ key[:, h].T / math.sqrt(3)).exp().tril()
        parts.append(share / share.sum(1, keepdim=True) @ value[:, h])
    y = x + torch.cat(parts, dim=1)
    return y + affine(p, f"{layer}.hidden.2", affine(p, f"{layer}.hidden.0", norm(p, f"{layer}.norms.1", y)).relu())


def hstu_layer(p: Parameters, layer: str, x: torch.Tensor) -> torch.Tensor:
    normed, parts = F.layer_norm(x, (WIDTH,)), []
    key, value = F.silu(affine(p, f"{layer}.keys", normed)).chunk(2, dim=1)
    gate, query = F.silu(affine(p, f"{layer}.queries", normed)).chunk(2, dim=1)
    distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
    for number, h in enumerate(HEADS):
        score = F.silu(query[:, h] @ key[:, h].T + p[f"{layer}.distance"][number][distance.abs()])
        parts.append((score / LONGEST).tril() @ value[:, h])
    return x + affine(p, f"{layer}.out", F.layer_norm(torch.cat(parts, dim=1), (WIDTH,)) * gate)


def outputs_of(name: str, p: Parameters, rows: torch.Tensor, beside: torch.Tensor, *, cosine: bool) -> torch.Tensor:
    """Those of a sample's entries, (X, E)."""
    x = math.sqrt(WIDTH) * rows + p["places.vectors"][torch.arange(len(rows)).flip(0)]
    x = affine(p, "places.numbers", beside) + x if beside.shape[1] else x
    for number in range(2):
        x = (sasrec_layer if name == "sasrec" else hstu_layer)(p, f"layers.{number}", x)
    return x if cosine else norm(p, "norm", x)


def transcribed(model: Any, name: str, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of all entries, and those of the newest of each sample."""
    sequence, lengths = inputs["seen"], inputs["seen"].lengths.tolist()
    rows, *beside = sequence.ids.values()
    numbers = torch.cat([sequence.numbers, *beside], dim=1)
    parts = zip(torch.split(rows, lengths), torch.split(numbers, lengths), strict=True)
    outputs = [outputs_of(name, dict(model.named_parameters()), *part, cosine=model.cosine) for part in parts]
    newest = [part[-1] if len(part) else torch.zeros(WIDTH, dtype=rows.dtype) for part in outputs]
    return torch.cat(outputs), torch.stack(newest)


@every("name", NAMES)
@every(("lengths", "numbers", "columns", "settings"), [
    *((lengths, 0, ("item",), {}) for lengths in MIXED),
    (LENGTHS, 2, ("item",), {"similarity": "cosine"}),
    (LENGTHS, 1, ("item", "category"), {"hidden": 5}),
])  # fmt: skip
def test_outputs_and_gradients_are_those_of_the_papers_formulas(
    name: str, lengths: Any, numbers: int, columns: Any, settings: dict[str, Any]
) -> None:
    settings = {key: value for key, value in settings.items() if key != "hidden" or name == "sasrec"}
    model, sides = made(name, numbers=numbers, columns=columns, **settings)
    dense, inputs = users_of(sides, lengths, dtype=torch.float64)
    model.double()
    found = torch.cat([model.queries(dense, inputs), model.users(dense, inputs)])
    expected = torch.cat(transcribed(model, name, inputs))
    torch.testing.assert_close(found, expected)
    weight, leaves = torch.randn_like(found), [*rows_of(inputs), *model.parameters()]
    grads = [
        torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True, materialize_grads=True)
        for y in (found, expected)
    ]
    for grad, other in zip(*grads, strict=True):
        torch.testing.assert_close(grad, other)


@every("name", NAMES)
@every("similarity", ["cosine", "dot"])
def test_a_samples_loss_is_that_of_its_entries_among_the_items(name: str, similarity: str) -> None:
    model, sides = made(name, similarity=similarity)
    dense, inputs = users_of(sides)
    entries = sum(LENGTHS)
    targets = [(5 * n) % 11 - 2 for n in range(entries)]  # from -2, below 0 = none, to 8
    candidates = candidates_of(sides, [max(t, -1) for t in targets])
    losses = model(dense, with_candidates(inputs, candidates))
    users, items = model.queries(dense, inputs), candidates.inputs["item"]
    if similarity == "cosine":
        users, items = F.normalize(users), F.normalize(items)  # type: ignore[arg-type]
    score = users.detach() @ items.detach().T / model.temperature - candidates.log_q_C  # type: ignore[union-attr]
    own = [
        float(score[n, sorted({*range(6), t})].logsumexp(0) - score[n, t]) if t >= 0 else 0.0
        for n, t in enumerate(targets)
    ]
    scale = len(LENGTHS) / sum(t >= 0 for t in targets)
    expected = [scale * float(part.sum()) for part in torch.split(torch.tensor(own), list(LENGTHS))]
    torch.testing.assert_close(losses[:, 0], torch.tensor(expected))


@every("name", NAMES)
def test_a_users_vector_is_the_query_that_predicts_the_item_and_an_items_its_row(name: str) -> None:
    model, sides = made(name)
    dense, inputs = users_of(sides)
    expected = inputs["seen"].newest(model.queries(dense, inputs))
    torch.testing.assert_close(model.eval().users(dense, inputs), expected)
    assert not expected[0].any()
    candidates = candidates_of(sides, [])
    assert torch.equal(model.items(candidates.dense_CI, candidates.inputs), candidates.inputs["item"])
    dropping = made(name, dropout=0.5)[0]
    assert not torch.equal(dropping.users(dense, inputs), dropping.users(dense, inputs))
    assert torch.equal(dropping.eval().users(dense, inputs), dropping.users(dense, inputs)), "in training only"
    with pytest.raises(UserError, match=r"^model.heads: 4 does not divide 6, the values of the rows of an entry"):
        made(name, heads=4)
