"""Models of several labels beside their papers' formulas, written sample by sample with the same parameters."""

from __future__ import annotations

import pytest
import torch

from shardkeep.base.errors import UserError
from shardkeep.workers.model_config import ONE_LABEL, keys_of
from shardkeep.workers.models.registry import build_model, row_dim, start_at
from tests.support.cases import every
from tests.support.towers import RANKING, model_config

B, DENSE, DIM = 5, 2, 4
FEATURES = {"user.id": DIM, "item": DIM, "tag": 6}
LABELS = ("a", "b", "c")
SEVERAL = [name for name in RANKING if name not in ONE_LABEL]


def built(name: str, labels: tuple[str, ...] = LABELS, **settings):
    torch.manual_seed(5)
    rows = {n: row_dim(name, d) for n, d in FEATURES.items()}
    config = model_config(name, **settings)
    model = build_model(config, num_dense=DENSE, features=rows, default_dim=DIM, labels=labels).double()
    leaves = {n: torch.randn(B, d, dtype=torch.float64) for n, d in rows.items()}
    return model, torch.randn(B, DENSE, dtype=torch.float64), leaves


def mlp(layers, x):
    for block in layers.blocks:
        x = torch.relu(block[0].weight @ x + block[0].bias)
    return x


def mixture(gate, x, experts):
    share = torch.softmax(gate.share.weight @ x, 0)
    return sum(share[e] * expert for e, expert in enumerate(experts))


def test_mmoe_is_equations_6_and_7_of_the_paper() -> None:
    model, dense, leaves = built("mmoe", experts=3, hidden=[7, 6], task_hidden=[4])
    for b in range(B):
        x = torch.cat([dense[b], *(leaves[name][b] for name in FEATURES)])
        experts = [mlp(expert, x) for expert in model.experts]
        for t in range(len(LABELS)):
            hidden = mlp(model.towers.hidden[t], mixture(model.gates[t], x, experts))
            layer = model.towers.logits[t]
            torch.testing.assert_close(model(dense, leaves)[b, t], (layer.weight @ hidden + layer.bias)[0])


@every("levels", [1, 3])
def test_ple_is_equations_1_to_7_of_the_paper(levels: int) -> None:
    settings = {"levels": levels, "shared_experts": 2, "task_experts": 3, "hidden": [7, 6], "task_hidden": []}
    model, dense, leaves = built("ple", **settings)
    for b in range(B):
        x = torch.cat([dense[b], *(leaves[name][b] for name in FEATURES)])
        own, shared = [x] * len(LABELS), x
        for k, level in enumerate(model.levels):
            layers = list(level.experts)
            experts = [[mlp(e, own[t]) for e in layers[3 * t : 3 * t + 3]] for t in range(len(LABELS))]
            common = [mlp(e, shared) for e in layers[3 * len(LABELS) :]]
            assert len(level.gates) == len(LABELS) + (k < levels - 1)
            if k < levels - 1:
                everything = [e for group in experts for e in group] + common
                next_shared = mixture(level.gates[-1], shared, everything)
            own = [mixture(level.gates[t], own[t], experts[t] + common) for t in range(len(LABELS))]
            shared = next_shared if k < levels - 1 else shared
        for t, layer in enumerate(model.towers.logits):
            torch.testing.assert_close(model(dense, leaves)[b, t], (layer.weight @ own[t] + layer.bias)[0])


@every("name", SEVERAL)
def test_a_model_has_an_output_for_each_label_that_starts_where_it_is_told(name: str) -> None:
    model, dense, leaves = built(name)
    before = model(dense, leaves)
    assert before.shape == (B, len(LABELS))
    differs = (before[:, 0] - before[:, 1]).abs().max() > 1e-4
    assert differs
    zeros = {n: torch.zeros_like(leaf) for n, leaf in leaves.items()}
    start_at(model, [0.0, 0.0, 0.0])
    at_zero = model(torch.zeros_like(dense), zeros)
    start_at(model, [3.0, -2.0, 50.0])
    shift = model(torch.zeros_like(dense), zeros) - at_zero
    torch.testing.assert_close(shift[0], torch.tensor([3.0, -2.0, 50.0], dtype=torch.float64))


@every("name", [name for name in SEVERAL if name not in ("mmoe", "ple")])
def test_labels_share_all_but_the_last_layer_and_each_output_is_that_of_a_model_of_this_label(name: str) -> None:
    (several, dense, leaves), (one, _, _) = built(name), built(name, ("a",))
    state, like = dict(several.named_parameters()), dict(one.named_parameters())
    assert state.keys() == like.keys()
    wider = {n for n in like if like[n].shape != state[n].shape}
    assert wider and all(state[n].numel() == len(LABELS) * like[n].numel() for n in wider)
    assert not any(n.startswith(("wide.", "first_order.", "fields.", "joined.", "crosses.")) for n in wider)
    own = one.state_dict()
    one.load_state_dict({
        key: value[1].reshape(own[key].shape) if key in wider else value for key, value in several.state_dict().items()
    })  # fmt: skip
    torch.testing.assert_close(one(dense, leaves)[:, 0], several(dense, leaves)[:, 1])


@every("name", ONE_LABEL)
def test_a_model_without_a_last_layer_refuses_several_labels(name: str) -> None:
    assert "hidden" not in keys_of(name)
    with pytest.raises(UserError, match=f"model.name: {name} predicts one label; the data has a, b, c"):
        built(name)
