"""Encoders, SASRec and HSTU against the formulas of their papers, sample by sample in float64, with all gradients."""

# Q = the target, K = an entry, X = a sample's entries, E = width of an entry

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from shardkeep.base.errors import UserError
from shardkeep.workers.embeddings.sequence import Sequence, SequenceShape
from shardkeep.workers.encoder_config import DinEncoderConfig, HstuEncoderConfig, TransformerEncoderConfig
from shardkeep.workers.models.encoders.din import DinEncoder, PairLinear
from shardkeep.workers.models.encoders.hstu import HstuEncoder
from shardkeep.workers.models.encoders.transformer import TransformerEncoder
from shardkeep.workers.models.layers.hidden import HiddenOptions
from tests.support.cases import every
from tests.support.vector_models import candidates_of, list_schema, rows_of, users_of, vector_model, with_candidates

LONGEST, NUMBERS, DIMS, WIDTH = 17, 2, {"item": 4, "category": 2}, 6
LENGTHS = {"mixed": (0, 1, 15, 16, 17), "all empty": (0, 0), "all of length 1": (1, 1, 1), "longest": (17, 17)}
HEADS = (slice(0, 3), slice(3, 6))
LAYERS = ("layers.0", "layers.1")


def affine(p, name, x):
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def norm(p, name, x):
    return F.layer_norm(x, (WIDTH,), p[f"{name}.weight"], p[f"{name}.bias"])


def attention(p, layer, queries, entries, *, causal=False):
    query, (key, value) = affine(p, f"{layer}.query", queries), affine(p, f"{layer}.keys", entries).chunk(2, dim=1)
    heads = []
    for h in HEADS:
        share = (query[:, h] @ key[:, h].T / math.sqrt(3)).exp()
        share = share.tril() if causal else share
        heads.append(share / share.sum(1, keepdim=True) @ value[:, h])
    return torch.cat(heads, dim=1)


def hstu_layer(p, layer, x, longest):
    normed, heads = F.layer_norm(x, (WIDTH,)), []
    key, value = F.silu(affine(p, f"{layer}.keys", normed)).chunk(2, dim=1)
    gate, query = F.silu(affine(p, f"{layer}.queries", normed)).chunk(2, dim=1)
    distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
    for number, h in enumerate(HEADS):
        score = F.silu(query[:, h] @ key[:, h].T + p[f"{layer}.distance"][number][distance.abs()])
        heads.append((score / longest).tril() @ value[:, h])
    return x + affine(p, f"{layer}.out", F.layer_norm(torch.cat(heads, dim=1), (WIDTH,)) * gate)


def with_other_values(model):
    """Also of parameters that start at zero or are tiny."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def agree(found, expected, leaves):
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    grads = [
        torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True, materialize_grads=True)
        for y in (found, expected)
    ]
    for grad, other in zip(*grads, strict=True):
        torch.testing.assert_close(grad, other)


# Encoders: one vector for each sample


def check_encoder(kind, config, lengths, of_sample, *, numbers=NUMBERS):
    """An encoder beside a function of one sample that has entries, with a target and, but for DIN, without one."""
    torch.manual_seed(3)
    encoder = with_other_values(kind(SequenceShape(DIMS, numbers, LONGEST), config, HiddenOptions()).double())
    parameters, count = dict(encoder.named_parameters()), sum(lengths)
    entries, target = (torch.randn(n, WIDTH, dtype=torch.float64).requires_grad_() for n in (count, len(lengths)))
    sequence = Sequence({}, torch.randn(count, numbers, dtype=torch.float64), torch.tensor(lengths), LONGEST)
    for target_BE in (target,) if kind is DinEncoder else (target, None):
        found = encoder(entries, target_BE, sequence)
        assert not found[sequence.lengths == 0].any()
        parts = zip(torch.split(entries, list(lengths)), torch.split(sequence.numbers, list(lengths)), strict=True)
        expected = [
            of_sample(parameters, *part, None if target_BE is None else target[b]) if lengths[b] else 0.0 * target[b]
            for b, part in enumerate(parts)
        ]
        agree(found, torch.stack(expected), [entries, target, *parameters.values()])


@every("lengths", LENGTHS.values(), ids=LENGTHS)
@every("softmax", [False, True])
@every("numbers", [NUMBERS, 0])
def test_din_weighs_each_entry_by_hidden_layers_over_the_pair(lengths, softmax, numbers):
    def of_sample(p, x, n, q):
        # The paper's input [q, k, q - k, q * k]: any W3 gives the same layer, as W1 = A - W3 and W2 = B + W3.
        w3 = torch.ones_like(p["first.entry.weight"])
        w1, w2, w4 = p["first.target.weight"] - w3, p["first.entry.weight"] + w3, p["first.product.weight"]
        first = torch.cat([w1, w2, w3, w4, p.get("first.numbers.weight", w1[:, :0])], dim=1)
        h = torch.cat([q.expand_as(x), x, q - x, q * x, n], dim=1) @ first.T + p["first.target.bias"]
        weight = affine(p, "weight", affine(p, "hidden.blocks.1.0", h.clamp(min=0)).clamp(min=0))[:, 0]
        weight = weight.exp() / weight.exp().sum() if softmax else weight
        return weight @ x

    config = DinEncoderConfig(hidden=[5, 3], activation="relu", softmax=softmax)
    check_encoder(DinEncoder, config, lengths, of_sample, numbers=numbers)


@every(("activation", "norm", "momentum"), [("dice", "none", 0.01), ("relu", "batch", 0.1)])
def test_din_normalizes_by_the_entries_alone(activation, norm, momentum):
    config = DinEncoderConfig(hidden=[5], activation=activation, norm=norm)
    encoder = DinEncoder(SequenceShape(DIMS, 0, LONGEST), config, HiddenOptions())
    inputs = (
        torch.randn(20, WIDTH),
        torch.randn(4, WIDTH),
        Sequence({}, torch.empty(20, 0), torch.tensor([0, 1, 15, 4]), 17),
    )
    first = encoder.first(*inputs)
    encoder(*inputs)
    (mean,) = (b for name, b in encoder.named_buffers() if name.endswith("running_mean"))
    torch.testing.assert_close(mean, momentum * first.mean(0))


def test_the_first_layer_of_din_starts_as_the_layer_over_all_four_parts():
    torch.manual_seed(6)
    whole = HiddenOptions().linear(4 * WIDTH, 5)
    torch.manual_seed(6)
    w1, w2, w3, w4 = whole.weight.chunk(4, dim=1)
    layer = PairLinear(WIDTH, 0, 5, HiddenOptions())
    assert torch.equal(layer.target.weight, w1 + w3) and torch.equal(layer.entry.weight, w2 - w3)
    assert torch.equal(layer.product.weight, w4) and torch.equal(layer.target.bias, whole.bias)


def tokens(p, x, n, q):
    """The entries with numbers and places, and the target as the newest."""
    x = x + affine(p, "places.numbers", n)
    x = x if q is None else torch.cat([x, q[None]])
    return x + p["places.vectors"][: len(x)].flip(0)


@every("lengths", LENGTHS.values(), ids=LENGTHS)
def test_transformer_is_the_bst_layers_at_the_newest_place(lengths):
    def of_sample(p, x, n, q):
        x = tokens(p, x, n, q)
        for layer in LAYERS:
            y = norm(p, f"{layer}.norms.0", x + affine(p, f"{layer}.out", attention(p, layer, x, x)))
            hidden = F.leaky_relu(affine(p, f"{layer}.hidden.0", y))
            x = norm(p, f"{layer}.norms.1", y + affine(p, f"{layer}.hidden.2", hidden))
        return x[-1]

    check_encoder(TransformerEncoder, TransformerEncoderConfig(layers=2, hidden=7), lengths, of_sample)


@every("lengths", LENGTHS.values(), ids=LENGTHS)
def test_hstu_is_the_papers_layers_at_the_newest_place(lengths):
    def of_sample(p, x, n, q):
        x, longest = tokens(p, x, n, q), LONGEST + (q is not None)
        for layer in LAYERS:
            x = hstu_layer(p, layer, x, longest)
        return x[-1]

    check_encoder(HstuEncoder, HstuEncoderConfig(layers=2), lengths, of_sample)


# Models of what comes next: an output for each entry

NAMES = ("sasrec", "hstu")


def made(name, *, numbers=0, columns=("item",), **settings):
    settings = {"dropout": 0.0, "heads": 2} | settings
    model, sides = vector_model(name, list_schema(numbers=numbers, columns=columns), **settings)
    return with_other_values(model), sides


def sasrec_layer(p, layer, x):
    normed = norm(p, f"{layer}.norms.0", x)
    y = x + attention(p, layer, normed, normed, causal=True)
    return y + affine(p, f"{layer}.hidden.2", affine(p, f"{layer}.hidden.0", norm(p, f"{layer}.norms.1", y)).relu())


def outputs_of(name, p, rows, beside, *, cosine):
    """Those of a sample's entries, (X, E)."""
    x = math.sqrt(WIDTH) * rows + p["places.vectors"][torch.arange(len(rows)).flip(0)]
    x = affine(p, "places.numbers", beside) + x if beside.shape[1] else x
    for layer in LAYERS:
        x = sasrec_layer(p, layer, x) if name == "sasrec" else hstu_layer(p, layer, x, LONGEST)
    return x if cosine else norm(p, "norm", x)


@every(
    ("name", "lengths", "numbers", "columns", "settings"),
    [
        *((name, lengths, 0, ("item",), {}) for name in NAMES for lengths in LENGTHS.values()),
        *((name, LENGTHS["mixed"], 2, ("item",), {"similarity": "cosine"}) for name in NAMES),
        ("sasrec", LENGTHS["mixed"], 1, ("item", "category"), {"hidden": 5}),
        ("hstu", LENGTHS["mixed"], 1, ("item", "category"), {}),
    ],
)
def test_outputs_and_gradients_are_those_of_the_papers_formulas(name, lengths, numbers, columns, settings):
    model, sides = made(name, numbers=numbers, columns=columns, **settings)
    dense, inputs = users_of(sides, lengths, dtype=torch.float64)
    model.double()
    rows, *beside = inputs["seen"].ids.values()
    numbers_N = torch.cat([inputs["seen"].numbers, *beside], dim=1)
    parts = zip(torch.split(rows, list(lengths)), torch.split(numbers_N, list(lengths)), strict=True)
    outputs = [outputs_of(name, dict(model.named_parameters()), *part, cosine=model.cosine) for part in parts]
    newest = [part[-1] if len(part) else torch.zeros(WIDTH, dtype=rows.dtype) for part in outputs]
    found = torch.cat([model.queries(dense, inputs), model.users(dense, inputs)])
    agree(found, torch.cat([*outputs, torch.stack(newest)]), [*rows_of(inputs), *model.parameters()])


@every("name", NAMES)
@every("similarity", ["cosine", "dot"])
def test_a_samples_loss_is_that_of_its_entries_among_the_items(name, similarity):
    model, sides = made(name, similarity=similarity)
    lengths, (dense, inputs) = LENGTHS["mixed"], users_of(sides)
    targets = [(5 * n) % 11 - 2 for n in range(sum(lengths))]  # from -2, below 0 = none, to 8
    candidates = candidates_of(sides, [max(t, -1) for t in targets])
    losses = model(dense, with_candidates(inputs, candidates))
    users, items = model.queries(dense, inputs), candidates.inputs["item"]
    if similarity == "cosine":
        users, items = F.normalize(users), F.normalize(items)
    score = users.detach() @ items.detach().T / model.temperature - candidates.log_q_C
    own = [
        float(score[n, sorted({*range(6), t})].logsumexp(0) - score[n, t]) if t >= 0 else 0.0
        for n, t in enumerate(targets)
    ]
    scale = len(lengths) / sum(t >= 0 for t in targets)
    expected = [scale * float(part.sum()) for part in torch.split(torch.tensor(own), list(lengths))]
    torch.testing.assert_close(losses[:, 0], torch.tensor(expected))


@every("name", NAMES)
def test_an_items_vector_is_its_row_and_dropout_acts_in_training_only(name):
    model, sides = made(name, dropout=0.5)
    dense, inputs = users_of(sides)
    candidates = candidates_of(sides, [])
    assert torch.equal(model.items(candidates.dense_CI, candidates.inputs), candidates.inputs["item"])
    assert not torch.equal(model.users(dense, inputs), model.users(dense, inputs))
    assert torch.equal(model.eval().users(dense, inputs), model.users(dense, inputs))
    with pytest.raises(UserError, match=r"^model.heads: 4 does not divide 6, the values of the rows of an entry"):
        made(name, heads=4)
