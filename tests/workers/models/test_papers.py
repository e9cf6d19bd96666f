"""Every stock model, of several labels too, against its paper's formulas, written sample by sample in plain torch."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F

from shardkeep.base.errors import UserError
from shardkeep.workers.model_config import ONE_LABEL
from shardkeep.workers.models.registry import build_model, row_dim, start_at
from tests.support.cases import every
from tests.support.towers import RANKING, model_config

DIM = 4
FEATURES = {"user.id": DIM, "item": DIM, "tag": 6}
B, DENSE = 5, 2


def built(name, *, num_dense=DENSE, labels=("label",), **settings):
    torch.manual_seed(5)
    rows = {n: row_dim(name, d) for n, d in FEATURES.items()}
    config = model_config(name, **settings)
    model = build_model(config, num_dense=num_dense, features=rows, default_dim=DIM, labels=labels).double()
    with torch.no_grad():
        for parameter in model.parameters():  # also those that start at zero or are tiny
            parameter.add_(torch.randn_like(parameter) * 0.3)
    leaves = {n: torch.randn(B, d, dtype=torch.float64) for n, d in rows.items()}
    return model, torch.randn(B, num_dense, dtype=torch.float64), leaves, dict(model.named_parameters())


def agrees(model, dense, leaves, expected_of_sample):
    found = model(dense, leaves)
    torch.testing.assert_close(found, torch.stack([expected_of_sample(b) for b in range(B)]).reshape(found.shape))


def mlp(parameters, prefix, x):
    layer = 0
    while f"{prefix}.blocks.{layer}.0.weight" in parameters:
        weight, bias = (parameters[f"{prefix}.blocks.{layer}.0.{key}"] for key in ("weight", "bias"))
        x = (weight @ x + bias).clamp(min=0)
        layer += 1
    assert layer, prefix
    return x


def affine(parameters, prefix, x):
    y = parameters[f"{prefix}.weight"] @ x
    return y + parameters[f"{prefix}.bias"] if f"{prefix}.bias" in parameters else y


def vectors_of(leaves, b, *, weight):
    """Each feature's vector in sample b, without the first-order weight at its end if the row has one."""
    return [leaf[b, : leaf.shape[1] - weight] for leaf in leaves.values()]


def joined(dense, leaves, b, *, weight=0):
    return torch.cat([dense[b], *vectors_of(leaves, b, weight=weight)])


def first_order(parameters, prefix, dense, leaves, b):
    total = sum(leaf[b, -1] for leaf in leaves.values())
    return total + (dense[b] @ parameters[f"{prefix}.dense_weight_I1"][:, 0] if dense.shape[1] else 0.0)


def fields(parameters, dense, leaves, b, *, weight, projections="fields.projections"):
    """All fields of sample b as vectors of DIM: features, then dense columns."""
    found = []
    for number, vector in enumerate(vectors_of(leaves, b, weight=weight)):
        projection = parameters.get(f"{projections}.layers.{number}.weight")
        found.append(vector if projection is None else projection @ vector)
    return found + [dense[b, i] * parameters["fields.dense_vectors_ID"][i] for i in range(dense.shape[1])]


SUMS = {
    "lr": "bias wide",
    "fm": "bias wide pairs",
    "dnn": "deep",
    "wide_deep": "wide deep",
    "deepfm": "wide pairs deep",
}
"""The terms that a model's logit is the sum of."""


@every("num_dense", [DENSE, 0], ids=["dense", "no dense"])
@every("name", SUMS)
def test_models_that_are_sums(name, num_dense):
    hidden = {} if name in ("lr", "fm") else {"hidden": [7, 3]}
    model, dense, leaves, p = built(name, num_dense=num_dense, **hidden)
    wide = "wide" if name == "wide_deep" else "first_order"
    top = "top" if name == "dnn" else "deep"
    weight = int(name != "dnn")  # the first-order weight at the end of a row
    terms = {
        "bias": lambda b: p["bias"],
        "wide": lambda b: first_order(p, wide, dense, leaves, b),
        "pairs": lambda b: sum(u @ v for u, v in combinations(fields(p, dense, leaves, b, weight=1), 2)),
        "deep": lambda b: affine(p, "logit", mlp(p, top, joined(dense, leaves, b, weight=weight))),
    }
    agrees(model, dense, leaves, lambda b: sum(terms[term](b) for term in SUMS[name].split()))


@every("num_dense", [DENSE, 0], ids=["dense", "no dense"])
def test_xdeepfm(num_dense):
    model, dense, leaves, p = built("xdeepfm", num_dense=num_dense, hidden=[7, 3], cin=[3, 2])

    def expected(b):
        x0 = before = fields(p, dense, leaves, b, weight=1)
        pooled = []
        for k, width in enumerate([3, 2]):
            weight = p[f"cin.layers.{k}.weight"].view(width, len(before), len(x0))
            before = [
                sum(weight[h, i, j] * before[i] * x0[j] for i in range(len(before)) for j in range(len(x0)))
                for h in range(width)
            ]
            pooled += [vector.sum() for vector in before]
        deep = affine(p, "logit", mlp(p, "deep", joined(dense, leaves, b, weight=1)))
        cin = affine(p, "cin_logit", torch.stack(pooled))
        return deep + cin + first_order(p, "first_order", dense, leaves, b)

    agrees(model, dense, leaves, expected)


@every("num_dense", [DENSE, 0], ids=["dense", "no dense"])
def test_dlrm(num_dense):
    bottom = {"bottom": [5]} if num_dense else {}
    model, dense, leaves, p = built("dlrm", num_dense=num_dense, hidden=[7, 3], **bottom)

    def expected(b):
        vectors = fields(p, dense[:, :0], leaves, b, weight=0, projections="projections")
        first = mlp(p, "bottom", dense[b]) if num_dense else sum(vectors)
        z = [first, *vectors] if num_dense else vectors
        products = [z[i] @ z[j] for i in range(len(z)) for j in range(i)]
        return affine(p, "logit", mlp(p, "top", torch.cat([first, torch.stack(products)])))

    agrees(model, dense, leaves, expected)


@every("num_dense", [DENSE, 0], ids=["dense", "no dense"])
@every("structure", ["stacked", "parallel"])
@every("rank", [None, 2])
def test_dcn_v2(num_dense, structure, rank):
    settings = {"structure": structure, "cross_rank": rank, "cross_layers": 2}
    model, dense, leaves, p = built("dcn_v2", num_dense=num_dense, hidden=[7, 3], **settings)

    def expected(b):
        x0 = x = joined(dense, leaves, b)
        for k in range(2):
            name = f"crosses.{k}.weight"
            crossed = affine(p, name, x) if rank is None else affine(p, f"{name}.1", affine(p, f"{name}.0", x))
            x = x0 * crossed + x
        if structure == "stacked":
            return affine(p, "logit", mlp(p, "top", x))
        return affine(p, "logit", torch.cat([x, mlp(p, "top", x0)]))

    agrees(model, dense, leaves, expected)


@every("num_dense", [DENSE, 0], ids=["dense", "no dense"])
@every("top", [[7, 3], []], ids=["with an MLP", "attention only"])
def test_autoint(num_dense, top):
    attention = {"layers": 2, "heads": 2, "dim": 6}
    model, dense, leaves, p = built("autoint", num_dense=num_dense, hidden=top, attention=attention)

    def expected(b):
        e = fields(p, dense, leaves, b, weight=0)
        for k in range(2):
            query, key, value, residual = (
                p[f"attention.{k}.{n}.weight"] for n in ("query", "key", "value", "residual")
            )
            outputs = []
            for m in e:
                heads = []
                for h in (slice(0, 3), slice(3, 6)):
                    alpha = torch.stack([(query[h] @ m) @ (key[h] @ other) for other in e]).exp()
                    alpha = alpha / alpha.sum()
                    heads.append(sum(a * (value[h] @ other) for a, other in zip(alpha, e, strict=True)))
                outputs.append((torch.cat(heads) + residual @ m).clamp(min=0))
            e = outputs
        logit = affine(p, "logit", torch.cat(e))
        return logit + affine(p, "deep.1", mlp(p, "deep.0", joined(dense, leaves, b))) if top else logit

    agrees(model, dense, leaves, expected)


@every("num_dense", [DENSE, 0], ids=["dense", "no dense"])
@every("bilinear", ["all", "each", "interaction"])
def test_fibinet(num_dense, bilinear):
    model, dense, leaves, p = built("fibinet", num_dense=num_dense, hidden=[7, 3], bilinear=bilinear, reduction=2)

    def products(number, e):
        weight, found = p[f"pairs.{number}.weight"], []
        for pair, (i, j) in enumerate(combinations(range(len(e)), 2)):
            found.append((e[i] @ weight[{"all": 0, "each": i, "interaction": pair}[bilinear]]) * e[j])
        return found

    def expected(b):
        e = fields(p, dense, leaves, b, weight=1)
        z = torch.stack([vector.mean() for vector in e])
        a = (p["excite.weight"] @ (p["squeeze.weight"] @ z).clamp(min=0)).clamp(min=0)
        weighted = [scale * vector for scale, vector in zip(a, e, strict=True)]
        deep = affine(p, "logit", mlp(p, "deep", torch.cat([*products(0, e), *products(1, weighted)])))
        return deep + first_order(p, "first_order", dense, leaves, b)

    assert len(p["squeeze.weight"]) == (len(FEATURES) + num_dense) // 2
    agrees(model, dense, leaves, expected)


@every("num_dense", [DENSE, 0], ids=["dense", "no dense"])
@every("structure", ["serial", "parallel"])
def test_masknet(num_dense, structure):
    mask = {"ratio": 2.0} | ({"blocks": 2, "dim": 5} if structure == "parallel" else {})
    model, dense, leaves, p = built("masknet", num_dense=num_dense, hidden=[7, 3], structure=structure, mask=mask)

    def block(number, e, x):
        name = f"blocks.{number}"
        inner = affine(p, f"{name}.mask.0", e).clamp(min=0)
        assert len(inner) == 2 * len(x)
        y = p[f"{name}.hidden.blocks.0.0.weight"] @ (affine(p, f"{name}.mask.2", inner) * x)
        norm = (p[f"{name}.hidden.blocks.0.1.{key}"] for key in ("weight", "bias"))
        return F.layer_norm(y, y.shape, *norm).clamp(min=0)

    def expected(b):
        e = joined(dense, leaves, b)
        normed = [
            F.layer_norm(v, v.shape, p[f"norms.{n}.weight"], p[f"norms.{n}.bias"])
            for n, v in enumerate(vectors_of(leaves, b, weight=0))
        ]
        x = torch.cat([dense[b], *normed])
        if structure == "parallel":
            return affine(p, "logit", mlp(p, "top", torch.cat([block(k, e, x) for k in range(2)])))
        return affine(p, "logit", block(1, e, block(0, e, x)))

    agrees(model, dense, leaves, expected)


@every("num_dense", [DENSE, 0], ids=["dense", "no dense"])
@every("heads", [1, 3])
@every("context", [["tag", "item"], []], ids=["features", "learned"])
def test_finalmlp(num_dense, heads, context):
    settings = {"second_hidden": [8, 9], "fusion_heads": heads, "gates": {"hidden": [5], "second": context}}
    model, dense, leaves, p = built("finalmlp", num_dense=num_dense, hidden=[7, 6], **settings)

    def expected(b):
        x, outputs = joined(dense, leaves, b), []
        for k, names in enumerate([[], context]):
            seen = torch.cat([leaves[n][b] for n in names]) if names else p[f"gates.{k}.learned"][0]
            hidden = mlp(p, f"gates.{k}.mlp.0", seen)
            gate = 2 / (1 + torch.exp(-affine(p, f"gates.{k}.mlp.1", hidden)))
            outputs.append(mlp(p, f"streams.{k}", gate * x))
        first, second = outputs
        total = affine(p, "first", first) + affine(p, "second", second)
        for h, (u, v) in enumerate(zip(first.chunk(heads), second.chunk(heads), strict=True)):
            total = total + u @ p["fusion"][h] @ v
        return total

    agrees(model, dense, leaves, expected)


# Of several labels

LABELS = ("a", "b", "c")


def mixture(p, gate, x, experts):
    share = torch.softmax(p[f"{gate}.share.weight"] @ x, 0)
    return sum(share[e] * expert for e, expert in enumerate(experts))


def test_mmoe_is_equations_6_and_7_of_the_paper():
    model, dense, leaves, p = built("mmoe", labels=LABELS, experts=3, hidden=[7, 6], task_hidden=[4])

    def expected(b):
        x = joined(dense, leaves, b)
        experts = [mlp(p, f"experts.{e}", x) for e in range(3)]
        mixed = [mixture(p, f"gates.{t}", x, experts) for t in range(3)]
        hidden = [mlp(p, f"towers.hidden.{t}", each) for t, each in enumerate(mixed)]
        return torch.cat([affine(p, f"towers.logits.{t}", each) for t, each in enumerate(hidden)])

    agrees(model, dense, leaves, expected)


@every("levels", [1, 3])
def test_ple_is_equations_1_to_7_of_the_paper(levels):
    settings = {"levels": levels, "shared_experts": 2, "task_experts": 3, "hidden": [7, 6], "task_hidden": []}
    model, dense, leaves, p = built("ple", labels=LABELS, **settings)

    def expected(b):
        shared = joined(dense, leaves, b)
        own = [shared] * 3
        for k in range(levels):
            experts = [[mlp(p, f"levels.{k}.experts.{3 * t + e}", own[t]) for e in range(3)] for t in range(3)]
            common = [mlp(p, f"levels.{k}.experts.{9 + e}", shared) for e in range(2)]
            own = [mixture(p, f"levels.{k}.gates.{t}", own[t], experts[t] + common) for t in range(3)]
            assert (f"levels.{k}.gates.3.share.weight" in p) == (k < levels - 1)
            if k < levels - 1:
                shared = mixture(p, f"levels.{k}.gates.3", shared, [e for group in experts for e in group] + common)
        return torch.cat([affine(p, f"towers.logits.{t}", each) for t, each in enumerate(own)])

    agrees(model, dense, leaves, expected)


@every("name", [name for name in RANKING if name not in ONE_LABEL])
def test_a_model_has_an_output_for_each_label_that_starts_where_it_is_told_and_shares_all_but_the_last_layer(name):
    several, dense, leaves, _ = built(name, labels=LABELS)
    before = several(dense, leaves)
    assert before.shape == (B, 3) and (before[:, 0] - before[:, 1]).abs().max() > 1e-4
    if name not in ("mmoe", "ple"):
        one, *_ = built(name)
        state, own = several.state_dict(), one.state_dict()
        wider = {n for n, _ in one.named_parameters() if own[n].shape != state[n].shape}
        assert state.keys() == own.keys() and wider
        assert all(state[n].numel() == 3 * own[n].numel() for n in wider)
        assert not any(n.startswith(("wide.", "first_order.", "fields.", "joined.", "crosses.")) for n in wider)
        one.load_state_dict({
            key: value[1].reshape(own[key].shape) if key in wider else value for key, value in state.items()
        })  # fmt: skip
        torch.testing.assert_close(one(dense, leaves)[:, 0], before[:, 1])
    nothing = torch.zeros_like(dense), {n: torch.zeros_like(leaf) for n, leaf in leaves.items()}
    start_at(several, [0.0, 0.0, 0.0])
    at_zero = several(*nothing)
    start_at(several, [3.0, -2.0, 50.0])
    shift = several(*nothing) - at_zero
    torch.testing.assert_close(shift[0], torch.tensor([3.0, -2.0, 50.0], dtype=torch.float64))


@every("name", ONE_LABEL)
def test_a_model_without_a_last_layer_refuses_several_labels(name):
    with pytest.raises(UserError, match=f"model.name: {name} predicts one label; the data has a, b, c"):
        built(name, labels=LABELS)
