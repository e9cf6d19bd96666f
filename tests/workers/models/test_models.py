"""The models: shapes, gradients, options, mixed dims, and the user's own classes."""

from __future__ import annotations

import sys

import pytest
import torch

from shardkeep.base.errors import ConfigError, UserError
from shardkeep.base.yaml_text import write_yaml
from shardkeep.config import parse_config
from shardkeep.workers.config import TowerConfig
from shardkeep.workers.dense.scorer import Scorer
from shardkeep.workers.model_config import ONE_LABEL, OwnModelConfig, keys_of
from shardkeep.workers.models.layers.interaction import DotInteraction
from shardkeep.workers.models.registry import build_model, build_own_model, start_at
from tests.support.cases import every
from tests.support.towers import CPU, RANKING, dims_of, model_config, seeded_model, tower_of

FEATURES = {"a.b": 8, "type": 4, "keys": 16}  # names and dims that a ModuleDict would refuse


def made(name, *, num_dense=5, features=FEATURES, **settings):
    return seeded_model(name=name, num_dense=num_dense, features=features, **settings)


def inputs(num_samples=6, num_dense=5, features=FEATURES, name="dlrm"):
    drawn, dims = torch.Generator().manual_seed(1), dims_of(name, features)
    leaves = {n: torch.randn(num_samples, d, generator=drawn).requires_grad_() for n, d in dims.items()}
    return torch.randn(num_samples, num_dense, generator=drawn), leaves


@every("name", RANKING)
@every("num_dense", [5, 0], ids=["dense", "no dense"])
def test_a_model_gives_one_logit_a_sample_from_a_mean_and_all_columns_rows_and_parameters_count(name, num_dense):
    model = made(name, num_dense=num_dense)
    dense, leaves = inputs(num_samples=64, num_dense=num_dense, name=name)
    before = model(dense, leaves)
    assert before.shape == (64, 1)
    before.square().sum().backward()
    for key, value in [*model.named_parameters(), *leaves.items()]:
        assert value.grad is not None and value.grad.abs().sum() > 0, key
    alone = model(dense[2:3], {n: v[2:3] for n, v in leaves.items()})
    torch.testing.assert_close(alone, before[2:3])
    assert model(dense, {n: torch.zeros_like(v) for n, v in leaves.items()}).isfinite().all(), "bags may be absent"
    for feature in FEATURES:
        assert not torch.equal(before, model(dense, leaves | {feature: leaves[feature] + 1.0})), feature
    for column in range(num_dense):
        assert not torch.equal(before, model(dense + torch.eye(5)[column], leaves)), column
    start_at(model, [0.0])
    before = model(dense, leaves)
    start_at(model, [2.5])
    torch.testing.assert_close(model(dense, leaves), before + 2.5)


@every(("name", "amp"), [*((name, "bf16") for name in RANKING), ("finalmlp", "fp16"), ("deepfm", "fp16")])
def test_scores_in_half_precision_are_as_many_as_in_float32_and_near_them(name, amp):
    dense, leaves = inputs(num_samples=500, name=name)
    labels = ("label",) if name in ONE_LABEL else ("clicked", "bought")
    scorers = (Scorer(made(name, labels=labels), TowerConfig(amp=each), CPU) for each in ("off", amp))
    exact, found = (scorer.predict(dense, leaves) for scorer in scorers)
    assert found.dtype is torch.float32 and (found - exact).abs().max() < 0.05 * exact.abs().max()
    for one, other in zip(found.T, exact.T, strict=True):
        assert one.unique().numel() > 0.99 * other.unique().numel()
    tower = tower_of(model=made(name, labels=labels), config={"amp": amp})
    assert torch.equal(tower.predict(dense, leaves), found), "the trainer's evaluation"


def test_without_amp_a_last_layer_is_as_others_are():
    plain = made("deepfm")
    tower = tower_of(model=made("deepfm"), config={"linear": "torch"})
    assert not any("forward" in vars(layer) or "product" in vars(layer) for layer in tower.model.modules())
    dense, leaves = inputs(name="deepfm")
    assert torch.equal(tower.model(dense, leaves), plain(dense, leaves))


@every("name", RANKING)
def test_a_single_feature_is_enough(name):
    for num_dense in (5,) if name == "fibinet" else (0, 5):
        one = {"only": 4}
        model = made(name, num_dense=num_dense, features=one)
        assert model(*inputs(num_dense=num_dense, features=one, name=name)).shape == (6, 1)
    assert made(name, features={})(*inputs(features={}, name=name)).shape == (6, 1)


@every("name", [name for name in RANKING if "activation_checkpointing" in keys_of(name)])
def test_activation_checkpointing_changes_no_bit_of_the_gradient(name):
    grads = []
    settings = {"norm": "batch", "activation": "dice", "init": "xavier_normal"} if "norm" in keys_of(name) else {}
    for checkpointing in ({}, {"activation_checkpointing": True}):
        model = made(name, **settings, **checkpointing)
        dense, leaves = inputs(num_samples=12, name=name)
        model(dense, leaves).square().sum().backward()
        grads.append([v.grad for v in [*model.parameters(), *leaves.values()]])
        statistics = [b for n, b in model.named_buffers() if n.endswith("running_mean")]
        assert bool(statistics) == bool(settings) and all(value.any() for value in statistics)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*grads, strict=True))


def pairs_of(vectors):
    """V tensors (B, D), what the interaction makes of them by kernels, and the same by autograd in float64."""
    wide = [v.detach().double().requires_grad_() for v in vectors]
    pairs = [(wide[i] * wide[j]).sum(1) for i in range(len(wide)) for j in range(i)]
    return DotInteraction(len(vectors))(vectors), torch.cat([wide[0], *(p[:, None] for p in pairs)], dim=1), wide


# Tiles of the kernels hold 32 samples and 8 dims: whole ones, parts of one, and both.
@every(("num_vectors", "num_samples", "dim"), [(27, 64, 16), (4, 3, 5), (5, 70, 12), (2, 32, 1), (1, 5, 4)])
@every("apart", [False, True], ids=["packed", "apart in memory"])
def test_dot_interaction_is_the_first_vector_beside_the_lower_triangle_of_the_products(
    num_vectors, num_samples, dim, apart
):
    step = 1 + apart
    vectors = [torch.randn(num_samples, dim * step)[:, ::step].requires_grad_() for _ in range(num_vectors)]
    joined, expected, wide = pairs_of(vectors)
    torch.testing.assert_close(joined.double(), expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(joined.t()).t() if apart else torch.randn_like(joined)
    joined.backward(weight)
    (expected * weight.double()).sum().backward()
    for vector, twin in zip(vectors, wide, strict=True):
        torch.testing.assert_close(vector.grad.double(), twin.grad, rtol=1e-5, atol=1e-5)


def test_dot_interaction_by_torch_operators_gives_the_same():
    vectors = [torch.randn(70, 12) for _ in range(6)]
    interaction = DotInteraction(6)
    for first in (1, 31, 64):  # wherever a sample stands
        assert torch.equal(interaction([v[first:] for v in vectors]), interaction(vectors)[first:])
    torch.testing.assert_close(interaction(vectors)[:, 12:], interaction.products(vectors))
    wide = interaction([v.double() for v in vectors])  # not float32: no kernels
    torch.testing.assert_close(interaction(vectors).double(), wide, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        halves = interaction(vectors)[:, 12:]
        assert torch.equal(halves, interaction.products(vectors).float())
    assert not torch.equal(halves, interaction.products(vectors))  # the kernels would give these


def test_gradients_of_dot_interaction_are_taken_without_a_copy():
    vectors = [torch.randn(9, 8).requires_grad_() for _ in range(3)]
    DotInteraction(3)(vectors).sum().backward()
    assert [v.grad.data_ptr() - vectors[0].grad.data_ptr() for v in vectors] == [0, 9 * 8 * 4, 2 * 9 * 8 * 4]


@every(
    ("settings", "said"),
    [
        ({"name": "dcn_v2", "bottom": [4]}, "model.bottom: unknown key with name: dcn_v2; known keys: activation"),
        ({"name": "lr", "dropout": 0.0}, "model.dropout: unknown key with name: lr; known keys: name"),
        ({"name": "own:Own", "hidden": [4]}, "hidden: unknown key with name: module:Class; known keys: name, options"),
        ({"name": "masknet", "norm": "batch"}, "model.norm: unknown key with name: masknet"),
        ({"name": "masknet", "structure": "stacked"}, "'stacked' is not allowed; allowed: serial or parallel"),
        ({"name": "masknet", "mask": {"blocks": 2}}, "mask.blocks: has no effect with structure: serial"),
        ({"name": "autoint", "attention": {"heads": 3}}, "dim: 64 with heads: 3; allowed: a multiple of heads"),
    ],
)
def test_an_option_that_the_model_does_not_use_is_refused_by_name(settings, said):
    with pytest.raises(ConfigError) as refused:
        parse_config(write_yaml({"model": settings}))
    assert said in str(refused.value) and "\n" not in str(refused.value)


LARGE = [10**6, 10**6]


@every(
    ("settings", "said"),
    [
        ({"name": "dlrm", "hidden": LARGE}, "model.hidden: a layer from 1,000,000 to 1,000,000 asks for 4,000.0 GB"),
        ({"name": "mmoe", "task_hidden": LARGE}, "model.task_hidden: a layer from 1,000,000 to 1,000,000 asks for"),
        ({"name": "finalmlp", "hidden": [6], "fusion_heads": 4}, "model.fusion_heads: 4 does not divide the streams'"),
        ({"name": "finalmlp", "gates": {"second": ["y"]}}, "model.gates.second: y is not a feature; allowed: x"),
        ({"name": "no_such_module:Own"}, "module 'no_such_module' cannot be imported"),
        ({"name": "own_model:Nobody"}, "module 'own_model' has no 'Nobody'"),
        ({"name": "own_model:Own", "options": {"hiden": 3}}, "could not be built"),
        ({"name": "own_model:nothing"}, "it must be an nn.Module"),
    ],
)
def test_a_wrong_model_setting_is_refused_in_one_line(settings, said, own_folder):
    with pytest.raises(UserError) as refused:
        config = model_config(**settings)
        if isinstance(config, OwnModelConfig):
            build_own_model(config, {"num_dense": 3, "features": {"x": 4}}, import_from=own_folder)
        else:
            build_model(config, num_dense=3, features={"x": 4}, default_dim=4)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_what_has_no_input_is_refused():
    with pytest.raises(UserError, match="has no input"):
        build_model(model_config(), num_dense=0, features={}, default_dim=4)
    with pytest.raises(UserError, match=r"model.bottom: has no effect: the data has no dense"):
        build_model(model_config(bottom=[4]), num_dense=0, features={"x": 4}, default_dim=4)
    with pytest.raises(UserError, match="fibinet multiplies pairs of columns"):
        build_model(model_config(name="fibinet"), num_dense=0, features={"x": 5}, default_dim=4)


def test_a_class_of_the_users_is_found_beside_the_config_and_gets_its_options(own_folder):
    config = model_config(name="own_model:Own", options={"hidden": 7})
    model = build_own_model(config, {"num_dense": 3, "features": {"x": 4}}, import_from=own_folder)
    assert model.layer.in_features == 7 and model.asked == (3, {"x": 4})
    Scorer(model, TowerConfig(amp="bf16"), CPU)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.layer(torch.ones(2, 7)).dtype is torch.float32, "it ends the model"


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text(
        "from torch import nn\n"
        "class Own(nn.Module):\n"
        "    def __init__(self, num_dense, features, hidden=1):\n"
        "        super().__init__()\n"
        "        self.asked = (num_dense, features)\n"
        "        self.layer = nn.Linear(hidden, 1)\n"
        "def nothing(num_dense, features):\n"
        "    return 3\n"
    )
    monkeypatch.setattr("sys.path", ["", *sys.path])
    yield tmp_path
    sys.modules.pop("own_model", None)
