"""Linear layers in other forms, with the values of torch's own: by oneDNN, padded, for a few rows; bits in blocks."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from shardkeep.base.errors import UserError
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import JaggedRows
from shardkeep.workers.blocks import BlockScorer
from shardkeep.workers.config import TowerConfig
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature, Schema
from shardkeep.workers.dense import onednn, padding
from shardkeep.workers.dense.products import Products
from shardkeep.workers.dense.scorer import FewRows, Scorer
from shardkeep.workers.dense.tower import Tower
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.model_config import keys_of
from shardkeep.workers.models.registry import build_model
from tests.support.cases import every
from tests.support.towers import CPU, RANKING, batch, dims_of, model_config, part_of, seeded_model, tower_of, train

pytestmark = pytest.mark.skipif(onednn.why_not(CPU) is not None, reason="this torch has no oneDNN")


def layers(inputs: int = 37, outputs: int = 21, *, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(1)
    plain = nn.Linear(inputs, outputs, bias=bias)
    ours = copy.deepcopy(plain)
    assert onednn.use_for(ours) == 1
    return plain, ours


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the products that oneDNN made."""
    made: list[tuple[int, ...]] = []
    product = onednn.multiply

    def counted(*operands: Any) -> torch.Tensor:
        result = product(*operands)
        made.append(tuple(result.shape))
        return result

    monkeypatch.setattr(onednn, "multiply", counted)
    return made


@every("bias", [True, False])
@every(
    "values",
    [
        torch.randn(1, 37),
        torch.randn(129, 37),
        torch.randn(4, 3, 37),
        torch.randn(2, 1, 3, 37),
        torch.randn(37, 8).t(),  # in any order of memory
        torch.randn(16, 74)[::2, ::2],
        torch.randn(1, 37).expand(6, 37),
    ],
    ids=lambda values: (values.shape, values.stride()),
)
def test_outputs_and_gradients_are_torch_s(values: torch.Tensor, bias: bool, products: list[Any]) -> None:
    products.clear()
    plain, ours = layers(bias=bias)
    both = []
    for layer in (plain, ours):
        inputs = values.detach().requires_grad_()
        for _ in range(2):  # gradients add up
            outputs = layer(inputs)
            (outputs.sin() * torch.linspace(-1, 1, outputs.numel()).view(outputs.shape)).sum().backward()
        both.append([outputs.detach(), inputs.grad, *(p.grad for p in layer.parameters())])
        inputs.grad = None
    for theirs, mine in zip(*both, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
    assert len(products) == 6


def test_inputs_and_weights_that_want_no_gradient_get_none(products: list[Any]) -> None:
    _, ours = layers()
    ours(torch.randn(5, 37)).sum().backward()
    assert products == [(5, 21), (21, 37)]  # none for the inputs
    ours.weight.requires_grad_(False)
    inputs = torch.randn(5, 37, requires_grad=True)
    ours(inputs).sum().backward()
    assert products[2:] == [(5, 21), (5, 37)] and inputs.grad is not None


@every(
    "inputs", [torch.empty(0, 37), torch.randn(37), torch.randn(5, 37, dtype=torch.float64)], ids=["empty", "1", "f64"]
)
def test_what_onednn_does_not_take_is_torch_s(inputs: torch.Tensor, products: list[Any]) -> None:
    plain, ours = layers()
    plain, ours = plain.to(inputs.dtype), ours.to(inputs.dtype)
    assert torch.equal(ours(inputs), plain(inputs)) and not products
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ours(torch.randn(5, 36, dtype=inputs.dtype))
    ours, inputs = layers()[1], torch.randn(5, 37)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(inputs).dtype == torch.bfloat16 and torch.equal(ours(inputs), layers()[0](inputs))
    assert not products


def test_a_model_with_such_layers_is_copied_saved_and_hooked_like_any_other() -> None:
    model, seen, ones = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)), [], torch.ones(2, 4)
    assert onednn.use_for(model) == 2
    twin = copy.deepcopy(model)
    twin[0].weight.data.zero_()
    assert not torch.equal(twin(ones), model(ones))
    assert torch.equal(pickle.loads(pickle.dumps(model))(ones), model(ones))
    model[0].register_forward_hook(lambda _, __, output: seen.append(tuple(output.shape)))
    model(ones)
    assert seen == [(2, 3)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # functorch's own imports
def test_torch_multiplies_in_its_transforms_and_when_it_compiles(products: list[Any], monkeypatch) -> None:
    plain, ours = layers()
    inputs = torch.randn(5, 37)
    mapped = [torch.func.vmap(layer)(inputs) for layer in (plain, ours)]
    grads = [torch.func.grad(lambda x, layer=layer: layer(x).square().sum())(inputs) for layer in (plain, ours)]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs, torch.ones_like(inputs))
        tangents = [forward_ad.unpack_dual(layer(dual)).tangent for layer in (plain, ours)]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for theirs, mine in (mapped, grads, tangents, (plain(inputs), ours(inputs))):
        assert torch.equal(theirs, mine)
    assert not products


def test_a_gradient_of_the_gradient_is_torch_s() -> None:
    plain, ours = layers()
    values, found = torch.randn(5, 37), []
    for layer in (plain, ours):
        inputs = values.clone().requires_grad_()
        (grad,) = torch.autograd.grad(layer(inputs).sin().sum(), inputs, create_graph=True)
        grad.square().sum().backward()  # a gradient penalty
        found.append([inputs.grad, layer.weight.grad])
    for theirs, mine in zip(*found, strict=True):
        assert 0.0 < (mine - theirs).norm() + 1e-9 <= 1e-5 * theirs.norm()


def test_layers_with_a_forward_of_their_own_and_of_other_kinds_are_left_alone() -> None:
    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2.0 * F.linear(input, self.weight, self.bias)

    layer = nn.Linear(3, 2)
    layer.forward = lambda inputs: inputs
    assert onednn.use_for(nn.Sequential(layer, Own(3, 2), nn.Bilinear(2, 2, 1), nn.LayerNorm(2))) == 0
    assert layer(torch.ones(1)) == 1


@every(
    ("helps", "config", "chosen"),
    [
        (True, {}, "onednn: MKL leaves AVX-512 unused here"),
        (False, {}, None),
        (True, {"amp": "fp16"}, None),
        (True, {"linear": "torch"}, "torch: as configured"),
        (False, {"linear": "onednn"}, "onednn: as configured"),
        (True, {"linear": "onednn", "amp": "bf16"}, "onednn: as configured, but unused: amp is on"),
    ],
)
def test_auto_takes_onednn_where_it_helps(
    helps: bool, config: dict[str, str], chosen: str | None, monkeypatch: pytest.MonkeyPatch, products: list[Any]
) -> None:
    products.clear()
    monkeypatch.setattr(onednn, "helps", lambda: helps)
    tower = tower_of(config=config)
    assert tower.chosen.get("linear") == chosen
    tower.backward(*part_of(batch(0, 8), 0, 8), weight=1.0)
    assert bool(products) == (chosen is not None and chosen.startswith("onednn") and "unused: amp" not in chosen)
    with monkeypatch.context() as without:
        without.setattr(onednn, "why_not", lambda device: "this torch was built without oneDNN")
        assert "linear" not in tower_of().chosen
        with pytest.raises(UserError, match=r"tower.linear: onednn is not possible here: .* allowed: auto or torch"):
            tower_of(config={"linear": "onednn"})


def test_it_helps_amd_s_cpus_with_avx512_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    for capability in ("AVX512", "AVX2"):
        for vendor in ("AuthenticAMD", "GenuineIntel", ""):
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
            monkeypatch.setattr(onednn, "cpu_vendor", lambda vendor=vendor: vendor)
            found[capability, vendor] = onednn.helps.__wrapped__()
    assert [place for place, helps in found.items() if helps] == [("AVX512", "AuthenticAMD")]
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not onednn.helps.__wrapped__()


# Padded widths


def close(mine: torch.Tensor, theirs: torch.Tensor, rel: float = 1e-6) -> bool:
    return bool((mine - theirs).norm() <= rel * theirs.norm()) and mine.shape == theirs.shape


def padded_tower(multiple: int | str, model: nn.Module | None = None, **config: str) -> Tower:
    return tower_of(model=model or seeded_model(hidden=[37, 21]), config={"pad_widths": multiple, **config})


@every("library", ["torch", *(["onednn"] if onednn.why_not(CPU) is None else [])])
@every(
    ("inputs", "outputs", "multiple", "widths", "bias"),
    [
        (37, 21, 8, (40, 24), True),
        (37, 21, 8, (40, 24), False),
        (40, 21, 8, (40, 24), True),
        (37, 24, 8, (40, 24), True),
        (37, 1, 16, (48, 1), True),  # one output stays one
        (5, 70, 32, (5, 96), False),  # few inputs stay
    ],
)
def test_outputs_and_gradients_are_those_of_a_plain_layer(
    inputs: int, outputs: int, multiple: int, widths: tuple[int, int], bias: bool, library: str
) -> None:
    torch.manual_seed(1)
    plain = nn.Linear(inputs, outputs, bias=bias)
    padded = copy.deepcopy(plain)
    onednn.choose(library, padded, CPU, amp=False)
    assert padding.use_for(padded, multiple) == f"{multiple}: pads 1 of 1 linear layers"
    values, weights = torch.randn(9, 2, inputs), torch.randn(9, 2, outputs)
    found = []
    for layer in (plain, padded):
        x = values.clone().requires_grad_()
        y = layer(x)
        (y * weights).sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    assert all(close(mine, theirs) for theirs, mine in zip(*found, strict=True))
    products = Products(CPU)
    with products.counted(18):
        padded(values)
    assert products.per_sample == 2 * widths[0] * widths[1]


def test_whole_multiples_and_layers_with_a_forward_of_their_own_stay_as_they_are() -> None:
    own = nn.Linear(9, 9)
    own.forward = lambda inputs: inputs
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(9, 9), own, nn.Bilinear(9, 9, 9))
    assert padding.use_for(model, 8) == "8: pads 1 of 2 linear layers"
    assert [("forward" in vars(layer)) for layer in model] == [False, True, True, False]
    assert "pad_widths" not in TowerConfig().model_dump() and TowerConfig(pad_widths=8).model_dump()["pad_widths"] == 8
    assert "pad_widths" not in tower_of().chosen


def model_of(name: str, hidden: list[int], dim: int) -> tuple[nn.Module, torch.Tensor, dict[str, torch.Tensor]]:
    """A stock model, and dense columns and leaves of eight samples."""
    drawn, features = torch.Generator().manual_seed(3), dict.fromkeys(("user", "item", "tag"), dim)
    settings = {"hidden": hidden} if "hidden" in keys_of(name) else {}
    dims = dims_of(name, features).items()
    leaves = {key: torch.randn(8, width, generator=drawn).requires_grad_() for key, width in dims}
    dense = torch.randn(8, 3, generator=drawn)
    return seeded_model(3, name=name, features=features, **settings), dense, leaves


@every("name", RANKING)
def test_every_stock_model_has_the_gradients_and_scores_of_plain_layers(name: str) -> None:
    """With padded widths, and, without gradients, in the form for a few rows."""
    found = []
    for multiple in ("off", 8):
        model, dense, leaves = model_of(name, [13, 11], 8)
        tower = padded_tower(multiple, model.double())
        leaves = {key: leaf.detach().double().requires_grad_() for key, leaf in leaves.items()}
        tower.backward(dense.double(), leaves, torch.ones(8, 1), weight=1.0, last=False)
        found.append([each.grad for each in (*model.parameters(), *leaves.values())])
        assert "linear layers" in tower.chosen.get("pad_widths", "linear layers")
    for theirs, mine in zip(*found, strict=True):
        assert (mine is None) == (theirs is None) and (mine is None or close(mine, theirs, 1e-6))
    model, dense, leaves = model_of(name, [48, 16], 16)
    scorer = Scorer(model, TowerConfig(amp="off"), CPU)
    before, few = scorer.predict(dense, leaves), scorer.for_few_rows().predict(dense, leaves)
    assert few.shape == before.shape and (few.sigmoid() - before.sigmoid()).abs().max() < 1e-6
    assert torch.equal(scorer.predict(dense, leaves), before)


# The form for a few rows


def test_no_parameter_is_copied_and_onednn_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, dense, leaves = model_of("dlrm", [48, 16], 16)
    few = Scorer(model, TowerConfig(amp="off"), CPU).for_few_rows()
    expected = few.predict(dense, leaves)
    monkeypatch.setattr(onednn, "multiply", lambda *_: pytest.fail("multiplied by oneDNN"))
    assert torch.equal(few.predict(dense, leaves), expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not few.predict(dense, leaves).any()


def test_a_model_that_cannot_be_copied_and_one_in_mixed_precision_have_no_such_form() -> None:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(TypeError):
        FewRows(Locked())
    assert Scorer(Locked(), TowerConfig(), CPU).for_few_rows() is None
    assert Scorer(model_of("dlrm", [48, 16], 16)[0], TowerConfig(amp="bf16"), CPU).for_few_rows() is None


def test_parameters_keep_their_names_and_shapes_and_scores_their_bits() -> None:
    padded, plain = padded_tower(8), padded_tower("off")
    train(padded, [(0, 24)])
    train(plain, [(0, 24)])
    states = [{name: t.shape for name, t in tower.state_dict()["model"].items()} for tower in (padded, plain)]
    assert states[0] == states[1]
    own, other = (torch.cat([p.flatten() for p in tower.model.parameters()]) for tower in (padded, plain))
    assert close(own, other, 1e-5) and padded.chosen["pad_widths"].startswith("8: pads 3 of")
    plain.load_state_dict(padded.state_dict())
    dense, rows, _ = batch(7, 24)
    scorer = Scorer(copy.deepcopy(plain.model), TowerConfig(amp="off"), CPU)
    for other_scores in (plain.predict(dense, rows), scorer.predict(dense, rows)):
        assert torch.equal(padded.predict(dense, rows), other_scores)


# Blocks: a sample's logits have the same bits at every place, for every model and odd widths


NUM_DENSE, DIM = 5, 7
SCHEMA = Schema(tuple(f"d{i}" for i in range(NUM_DENSE)), tuple(Feature(n, n) for n in "abc"))


def scorer(model: str, *, size: int, linear: str = "torch") -> tuple[BlockScorer, Embeddings]:
    embeddings = Embeddings(SCHEMA, {name: TableSpec(name=name, dim=DIM) for name in "abc"})
    torch.manual_seed(4)
    config = model_config(model, **({"hidden": [9, 3]} if "hidden" in keys_of(model) else {}))  # odd widths
    built = build_model(config, num_dense=NUM_DENSE, features=embeddings.feature_dims, default_dim=DIM)
    return BlockScorer(embeddings, tower_of(model=built, config={"linear": linear}, sync=False), size), embeddings


def samples(count: int) -> Batch:
    random = np.random.default_rng(1)
    dense_BI = random.normal(size=(count, NUM_DENSE)).astype(np.float32)
    ids = {name: Ragged(random.integers(0, 40, count)) for name in "abc"}
    return Batch(dense_BI, ids, np.zeros((count, 1), np.float32))


def taken(batch: Batch, order: np.ndarray) -> Batch:
    ids = {name: Ragged(np.ascontiguousarray(ragged.values_N[order])) for name, ragged in batch.ids.items()}
    return Batch(np.ascontiguousarray(batch.dense_BI[order]), ids, batch.label_BT[order])


def logits(blocks: BlockScorer, embeddings: Embeddings, batch: Batch) -> np.ndarray:
    plan = embeddings.plan(batch)
    rows = JaggedRows.zeros(plan.unique)
    for name in rows:  # a row depends on its id alone
        rows[name][...] = np.sin(np.outer(plan.unique[name] + 1, np.arange(1, DIM + 1)))
    return blocks.logits(batch, plan, rows)


@pytest.mark.skipif(onednn.why_not(torch.device("cpu")) is not None, reason="needs oneDNN")
@every(
    ("model", "size", "linear"),
    [
        *((name, 17, ("torch", "onednn")[number % 2]) for number, name in enumerate(RANKING)),
        *(("dlrm", size, linear) for size in (1, 100) for linear in ("torch", "onednn")),
    ],
)
def test_a_sample_has_the_same_bits_at_every_place_and_beside_every_other(model: str, size: int, linear: str) -> None:
    blocks, embeddings = scorer(model, size=size, linear=linear)
    batch = samples(size)
    whole = logits(blocks, embeddings, batch)
    assert whole.shape == (size, 1) and (size == 1 or whole.std() > 1e-4)
    order = np.random.default_rng(2).permutation(size)
    assert np.array_equal(logits(blocks, embeddings, taken(batch, order)), whole[order])
    for at in {0, size // 2, size - 1}:
        assert np.array_equal(logits(blocks, embeddings, taken(batch, np.array([at]))), whole[[at]])


def test_a_block_leaves_training_as_it_was_and_takes_1_to_its_size_of_samples() -> None:
    blocks, embeddings = scorer("dlrm", size=20)
    model = blocks.dense.model
    before = [vars(layer).keys() for layer in model.modules()]
    model.train()
    logits(blocks, embeddings, samples(20))
    assert model.training and [vars(layer).keys() for layer in model.modules()] == before
    for count in (0, 21):
        with pytest.raises(ValueError, match=f"{count} samples; allowed: 1 to 20"):
            logits(blocks, embeddings, samples(count))
