"""torch.compile for the tower: what is chosen and why, how ranks agree; and the products that a tower makes."""

from __future__ import annotations

import contextlib
import copy
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from shardkeep.base.errors import JobError, UserError
from shardkeep.workers.collectives.collective import Solo, ThreadCollective
from shardkeep.workers.config import TowerConfig
from shardkeep.workers.dense import compile as compiling, onednn
from shardkeep.workers.dense.products import Products
from shardkeep.workers.dense.tower import share
from tests.support import histories
from tests.support.cases import every
from tests.support.ranks import run_ranks
from tests.support.towers import CPU, Small, batch, part_of, seeded_model, tower_of, train, values_of


@pytest.fixture
def compiled(monkeypatch):
    """Leaves the compiler out: ranks meet and agree as with it. Returns the batch sizes that each one compiled runs."""
    runs = []

    def compile_nothing(run, **options):
        assert options == {"mode": None, "dynamic": False}
        runs.append([])
        return lambda dense_BI, embeddings, sizes=runs[-1]: sizes.append(len(dense_BI)) or run(dense_BI, embeddings)

    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setattr(compiling, "why_no_compiler", lambda _device: None)
    return runs


def test_compile_on_without_a_compiler_is_a_user_error(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"no C\+\+ compiler \(no-such-compiler\)"):
        tower_of(config={"compile": "on"})


UNMEASURED = "off: on this CPU compiling was not measured in this arithmetic"
AVX512 = {"avx2": True, "avx512_f": True}
BF16 = {**AVX512, "avx512_bf16": True}
AMX = {**BF16, "amx_bf16": True}


@every(
    ("wish", "device", "sync", "flags", "dtype", "chosen"),
    [
        ("auto", "cpu", False, AVX512, None, "off: on this CPU compiling made steps 1 to 29 % slower in fp32"),
        ("auto", "cpu", False, AVX512, torch.bfloat16, UNMEASURED),
        ("auto", "cpu", False, BF16, torch.bfloat16, "off: on this CPU compiling gained 4 to 6 % of a step with bf16"),
        ("auto", "cpu", False, BF16, torch.float16, UNMEASURED),
        ("auto", "cpu", False, AMX, torch.bfloat16, "off: on this CPU compiling was not measured with AMX"),
        ("auto", "cpu", False, {"sve_bf16": True}, torch.bfloat16, UNMEASURED),
        ("auto", "cuda", False, {}, None, "on: the tower is on a GPU"),
        ("auto", "cuda", True, {}, None, "off: torch.compile may select GPU kernels by time"),
        ("off", "cuda", False, {}, None, "off: as configured"),
    ],
)
def test_compile_auto_is_a_rule_by_device_and_arithmetic(monkeypatch, wish, device, sync, flags, dtype, chosen):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    compiles, reason = compiling.choose(TowerConfig(compile=wish), torch.device(device), sync=sync, dtype=dtype)
    assert reason.startswith(chosen) and compiles == chosen.startswith("on")
    if dtype is torch.bfloat16:
        assert tower_of(config={"compile": "auto", "amp": "bf16"}).chosen["compile"] == reason, "the tower says it"


def test_compile_auto_goes_on_eager_where_a_rank_has_no_compiler(monkeypatch):
    """The tower is said to be on a GPU, so that auto compiles; no CUDA is needed to find no compiler."""
    monkeypatch.setenv("CXX", "no-such-compiler")

    def work(collective: ThreadCollective) -> tuple[bool, str]:
        said: list[str] = []
        config, device = TowerConfig(compile="auto"), torch.device("cuda")
        switch = compiling.Switch(Small(), 12)
        part = compiling.Compilation(switch, config, device, sync=False, context=nullcontext, say=said.append)
        for _generation in range(2):
            assert part.due
            part.run(collective, part_of(batch(0, 12), 0, 12)[:2])
            assert not part.due
            part.regroup()
        return switch.enabled, said[-1]

    found = run_ranks(ThreadCollective.group(2), work)
    assert {enabled for enabled, _ in found} == {False}
    assert all(re.match("off: compiling failed: (the package triton|there is no C)", said) for _, said in found)


def check_equal_training(model):
    """Of a compiled tower and an eager one, with a batch that is not full at the end."""
    towers = (
        tower_of(model=copy.deepcopy(model), batch_size=12),
        tower_of(model=model, config={"compile": "on"}, batch_size=12),
    )
    state = torch.get_rng_state()
    for tower in towers:
        train(tower, [(0, 24)], micro=2)
        train(tower, [(0, 23)], micro=2, steps=1)  # 11 samples: eager
    eager, compiled = towers
    assert compiled.compilation.compile_s > 0 and compiled.compilation.switch.enabled
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(values_of(compiled), values_of(eager), rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(compiled.model.buffers(), eager.model.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    products, (before, after) = compiled.compilation.products, compiled.compilation.rss_bytes
    assert products.per_sample == eager.compilation.products.per_sample > 0, "counted by an eager run on zeros"
    assert products.flops == eager.compilation.products.flops and eager.compilation.rss_bytes is None
    assert 0 < before <= after


def test_a_tower_that_compiles_trains_as_the_eager_one_and_runs_full_batches_alone_compiled(compiled):
    check_equal_training(seeded_model(norm="batch"))  # its statistics stay as they were when it is compiled
    # The zeros, five steps of two micro-batches, and 12 of the last 23.
    assert compiled == [[12] * (1 + 5 * 2 + 1)]


@pytest.mark.slow  # 20 s of CPU time in the compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor's own imports
@pytest.mark.skipif(compiling.why_no_compiler(CPU) is not None, reason="torch.compile cannot run here")
def test_a_compiled_tower_trains_as_the_eager_one_and_never_recompiles():
    import torch._dynamo.config

    torch._dynamo.reset()  # other towers are compiled from the same function
    with torch._dynamo.config.patch(error_on_recompile=True):
        check_equal_training(seeded_model())


def test_compile_auto_compiles_no_tower_with_sequences():
    said: list[str] = []
    switch, config = compiling.Switch(histories.model(), 12), TowerConfig(compile="auto")
    part = compiling.Compilation(switch, config, torch.device("cuda"), sync=False, context=nullcontext, say=said.append)
    part.run(Solo(), histories.inputs([1, 2]))
    part.regroup()
    assert not part.due and not switch.enabled and said[-1] == "off: auto compiles no tower with sequences"


def test_ranks_that_all_compile_run_compiled_in_every_generation(compiled):
    first, second = ThreadCollective.group(2), ThreadCollective.group(2)

    def work(collective):
        tower = tower_of(collective=collective, config={"compile": "on"}, batch_size=12)
        states = []
        for group in (collective, second[collective.rank]):
            tower.join(group)
            due = tower.compilation.due
            train(tower, [(0, 12), (12, 24)], steps=1)
            states.append((due, tower.compilation.switch.enabled))
        return states

    assert run_ranks(first, work) == [[(True, True)] * 2] * 2


def test_a_newcomer_compiles_while_the_others_wait(compiled):
    veteran, newcomer = (tower_of(config={"compile": "on"}, batch_size=12) for _ in range(2))
    train(veteran, [(0, 12)], steps=1)

    def work(collective):
        tower = newcomer if collective.rank else veteran
        tower.join(collective)
        share(tower, 0, [1])
        train(tower, [(0, 12), (12, 24)], steps=1)
        return tower.compilation.switch.enabled

    assert run_ranks(ThreadCollective.group(2), work) == [True, True]
    assert len(compiled) == 2  # the veteran's before, and the newcomer's


def test_a_compilation_that_fails_on_one_rank_is_an_error_on_all(compiled):
    def work(collective: ThreadCollective) -> str:
        model = nn.Linear(99, 1) if collective.rank == 1 else Small()  # does not fit the batch
        part = compiling.Compilation(
            compiling.Switch(model, 12), TowerConfig(compile="on"), CPU, sync=False, context=nullcontext, say=len
        )
        with pytest.raises(JobError) as failed:
            part.run(collective, part_of(batch(0, 12), 0, 12)[:2])
        assert not part.switch.enabled
        return str(failed.value)

    first, second = run_ranks(ThreadCollective.group(2), work)
    assert first.startswith("tower.compile: on failed: worker 1 could not compile; its log says why")
    assert second.startswith("tower.compile: on failed: TypeError: ")


IN_A_PROCESS = """
import hashlib
import sys
import torch._dynamo.utils
from tests.support.towers import seeded_model, tower_of, train
tower = tower_of(model=seeded_model(), config={"compile": sys.argv[1], "amp": "bf16"}, batch_size=12)
train(tower, [(0, 24)], micro=2)
counts = torch._dynamo.utils.counters["aot_autograd"]
print(counts["autograd_cache_hit"], counts["autograd_cache_miss"], counts["autograd_cache_bypass"])
print(hashlib.sha256(tower.digest_bytes()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(compiling.why_no_compiler(CPU) is not None, reason="torch.compile cannot run here")
def test_a_second_process_finds_what_the_first_compiled_and_has_its_bits(monkeypatch, tmp_path):
    """A replacement of a worker that died compiles in a second or two, and training goes on with the same bits."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))

    def trained(wish: str) -> tuple[list[int], str]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", IN_A_PROCESS, wish], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        counts, digest = done.stdout.splitlines()
        return [int(count) for count in counts.split()], digest

    (eager, _), (first, compiled), (second, again) = trained("off"), trained("on"), trained("on")
    assert eager == [0, 0, 0] and first[0] == 0 and first[1] > 0 and second[0] > 0 and second[1] == 0
    assert first[2] == second[2] == 0, "autocast inside of the compiled function would bypass the cache"
    assert compiled == again


# Matrix products: counted by shapes, once, without a change to training; and made alone


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
    nothing = counted(nn.ReLU(), contextlib.nullcontext)
    assert (nothing.flops, nothing.per_sample) == (0, 0)


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
