"""TorchRec models under `shard()` beside plain PyTorch. Needs torchrec (installed as CONTRIBUTING.md says)."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardkeep import (
    AdagradConfig,
    AdamConfig,
    EmbeddingClient,
    LambConfig,
    LarsSgdConfig,
    PartialRowwiseAdamConfig,
    SgdConfig,
    TableSpec,
    UserError,
)
from shardkeep.torchrec import client_of, load, save, shard, tables_of
from tests.support.cases import every
from tests.support.late_import import late_import

torchrec = late_import("torchrec")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LR = 0.1
ROWS = 50
AFTER = AdamConfig(lr=0.2, betas=(0.8, 0.99), eps_after_correction=True)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE"):
        del os.environ[name]


def bag_configs() -> list[Any]:
    """Three tables; the feature `shared` is in two of them, and one table has two features."""
    return [
        torchrec.EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=ROWS, feature_names=features)
        for name, features in (("t0", ["f0", "shared"]), ("t1", ["f1"]), ("t2", ["shared"]))
    ]


def dlrm() -> Any:
    from torchrec.models.dlrm import DLRM, DLRMTrain

    torch.manual_seed(0)
    configs = [
        torchrec.EmbeddingBagConfig(name=f"t{i}", embedding_dim=8, num_embeddings=ROWS, feature_names=[f"f{i}"])
        for i in range(3)
    ]
    cpu = torch.device("cpu")
    bags = torchrec.EmbeddingBagCollection(configs, device=cpu)
    return DLRMTrain(DLRM(bags, 4, [8, 8], [8, 1], dense_device=cpu))


def clicks(count: int = 12) -> Iterator[Any]:
    from torchrec.datasets.utils import Batch

    random = torch.Generator().manual_seed(7)
    for _ in range(count):
        lengths = torch.randint(0, 4, (3 * 32,), generator=random)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=random)
        features = torchrec.KeyedJaggedTensor.from_lengths_sync(["f0", "f1", "f2"], values, lengths)
        labels = torch.randint(0, 2, (32,), generator=random)
        yield Batch(torch.randn(32, 4, generator=random), features, labels)


def test_dlrm_in_torchrecs_pipeline_has_plain_pytorchs_losses_to_the_last_bit() -> None:
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    with EmbeddingClient.local(tables_of(dlrm(), optimizer=SgdConfig(lr=LR)), consistency="sync") as client:
        plain = dlrm()
        load(plain, client)
        optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
        expected = []
        for batch in clicks():
            optimizer.zero_grad()
            loss, _ = plain(batch)
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
        cpu = torch.device("cpu")
        parallel = DistributedModelParallel(module=shard(dlrm(), client), device=cpu)
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(parallel.named_parameters())), lambda p: torch.optim.SGD(p, lr=LR)
        )
        pipeline = TrainPipelineSparseDist(parallel, CombinedOptimizer([parallel.fused_optimizer, dense]), cpu)
        batches, found = iter(clicks()), []
        for _ in range(12):
            found.append(pipeline.progress(batches)[0].item())
        assert found == expected and client.step == 12


def test_the_fused_optimizers_learning_rate_is_honoured() -> None:
    with EmbeddingClient.local(tables_of(dlrm(), optimizer=SgdConfig(lr=LR))) as client:
        ours = shard(dlrm(), client)
        sharded = ours.model.sparse_arch.embedding_bag_collection
        before = client.read({"t0": torch.arange(ROWS)})["t0"]
        schedule = torch.optim.lr_scheduler.LambdaLR(sharded.fused_optimizer, lambda _: 0.5)
        features = next(clicks()).sparse_features
        sharded(features).wait().values().sum().backward()
        counts = torch.bincount(features["f0"].values(), minlength=ROWS)[:, None]
        torch.testing.assert_close(client.read({"t0": torch.arange(ROWS)})["t0"], before - 0.5 * LR * counts)
        assert schedule.get_last_lr() == [0.5 * LR]
        for lr, factor in ((0.0, 2.0**-126), (LR * 1e-39, 2.0**-126), (3 * LR, 3.0)):  # servers take no smaller factor
            sharded.fused_optimizer.param_groups[0]["lr"] = lr
            assert sharded.fused_optimizer.factor == pytest.approx(factor)


def test_a_grad_scalers_scale_is_taken_out_of_row_gradients() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    found = []
    for scaled in (False, True):
        with EmbeddingClient.local(tables_of(dlrm(), optimizer=SgdConfig(lr=LR)), consistency="sync") as client:
            ours = shard(dlrm(), client, scaler=scaler if scaled else None)
            for batch in clicks(4):
                loss, _ = ours(batch)
                (scaler.scale(loss) if scaled else loss).backward()
            found.append(client.read({"t0": torch.arange(ROWS)})["t0"])
    assert torch.equal(*found)  # a power of two changes no bit


def test_optimizers_in_backward_become_those_of_the_tables() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward as in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    bags = torchrec.EmbeddingBagCollection(bag_configs())
    weights = {name: table.weight for name, table in bags.embedding_bags.items()}
    in_backward(torch.optim.SGD, [weights["t0"]], {"lr": 0.2, "weight_decay": 0.01})
    in_backward(RowWiseAdagrad, [weights["t1"]], {"lr": 0.3})
    specs = {spec.name: spec for spec in tables_of(bags, optimizer=AdagradConfig(lr=0.5))}
    assert specs["t0"].optimizer == SgdConfig(lr=0.2, weight_decay=0.01)
    assert (specs["t1"].optimizer.name, specs["t1"].optimizer.lr) == ("rowwise_adagrad", 0.3)
    assert specs["t2"].optimizer == AdagradConfig(lr=0.5)
    bound = ROWS**-0.5
    assert specs["t2"].init.high == pytest.approx(bound) and specs["t2"].init.low == pytest.approx(-bound)
    in_backward(torch.optim.SGD, [weights["t2"]], {"lr": 0.2, "momentum": 0.9})
    with pytest.raises(UserError, match=r"table t2: optimizer SGD with momentum=0\.9, which servers do not have"):
        tables_of(bags)


MAPPED: dict[str, tuple[str, dict[str, Any], Any]] = {
    "Adam": ("torch.Adam", {"lr": 0.2, "betas": (0.8, 0.99)}, AFTER),
    "SparseAdam": ("torch.SparseAdam", {"lr": 0.2}, AdamConfig(lr=0.2)),
    "their SGD": ("SGD", {"lr": 0.2}, SgdConfig(lr=0.2)),
    "their Adagrad, with FBGEMM's eps": ("Adagrad", {"lr": 0.2}, AdagradConfig(lr=0.2, eps=1e-8)),
    "Adagrad, with FBGEMM's eps": ("torch.Adagrad", {"lr": 0.2}, AdagradConfig(lr=0.2, eps=1e-8)),
    "Adagrad with an eps": ("torch.Adagrad", {"lr": 0.2, "eps": 1e-10}, AdagradConfig(lr=0.2, eps=1e-10)),
    "their Adam": ("Adam", {"learning_rate": 0.2, "beta1": 0.8, "beta2": 0.99}, AFTER),
    "their Adam's defaults": ("Adam", {}, AdamConfig(lr=0.01, eps_after_correction=True)),
    "their Adam with decay": ("Adam", {"weight_decay": 0.1}, "table t0: optimizer Adam with weight_decay=0.1"),
    "Adam with amsgrad": ("torch.Adam", {"amsgrad": True},
                          "table t0: optimizer Adam with amsgrad=True, which servers do not have"),
    "RMSprop": ("torch.RMSprop", {}, "table t0: optimizer RMSprop has no rule on servers; allowed: SGD, Adagrad, Adam"),
    "PartialRowWiseAdam": ("PartialRowWiseAdam", {"eps": 1e-6}, PartialRowwiseAdamConfig(lr=0.01, eps=1e-6)),
    "PartialRowWiseAdam with decay": ("PartialRowWiseAdam", {"weight_decay": 0.1},
                                      "PartialRowWiseAdam with weight_decay=0.1"),
    "LarsSGD": ("LarsSGD", {"lr": 3.0, "weight_decay": 0.1}, LarsSgdConfig(lr=3.0, weight_decay=0.1)),
    "LarsSGD with eta": ("LarsSGD", {"eta": 0.01, "momentum": 0.0}, LarsSgdConfig(lr=0.01, eta=0.01, momentum=0.0)),
    "LAMB": ("LAMB", {"beta2": 0.99, "weight_decay": 0.1},
             LambConfig(lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)),
}  # fmt: skip
"""Optimizers in the backward pass: the class, of torch or of torchrec, its settings, a table's config or why not."""


@every(("name", "settings", "expected"), MAPPED.values(), ids=MAPPED)
def test_an_optimizer_in_backward_keeps_its_settings_and_its_defaults(
    name: str, settings: dict[str, Any], expected: Any
) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward as in_backward
    from torchrec import optim

    bags = torchrec.EmbeddingBagCollection(bag_configs()[:1])
    kind = getattr(torch.optim if name.startswith("torch.") else optim, name.removeprefix("torch."))
    in_backward(kind, bags.parameters(), settings)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=re.escape(expected)):
            tables_of(bags)
    else:
        assert tables_of(bags)[0].optimizer == expected


def test_what_cannot_be_mapped_or_sharded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bags, other = torchrec.EmbeddingBagCollection(bag_configs()), torch.nn.Linear(1, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    dims = [TableSpec(name="t0", dim=8), TableSpec(name="t1", dim=4)]
    with (
        EmbeddingClient.local(dims) as client,
        EmbeddingClient.local(tables_of(dlrm(), optimizer=SgdConfig(lr=LR))) as fitting,
    ):
        model = shard(dlrm(), fitting)
        refused: dict[str, Callable[[], Any]] = {
            "table t0: has no optimizer; allowed: apply_optimizer_in_backward, or tables_of": lambda: tables_of(bags),
            "the model holds no EmbeddingBagCollection and no EmbeddingCollection": lambda: tables_of(other),
            "table t1: its rows have 8 values, the client's 4": lambda: shard(bags, client),
            "table t2: the client has no such table; it has t0, t1": lambda: shard(bags, client, tables={"t1": "t0"}),
            "^shard: the collections of this model are on servers already": lambda: shard(model, fitting),
            "^the model holds no collection on servers": lambda: client_of(dlrm()),
            "^connect: no run; start the script with `shardkeep with -- COMMAND`": lambda: shard(dlrm()),
        }
        for text, call in refused.items():
            with pytest.raises(UserError, match=text):
                call()


class Outer(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner


def parallel(model: torch.nn.Module) -> torch.nn.Module:
    from torchrec.distributed.model_parallel import DistributedModelParallel

    return cast(torch.nn.Module, DistributedModelParallel(module=model, device=torch.device("cpu")))


def with_parallel_top(model: torch.nn.Module) -> torch.nn.Module:
    dense: Any = model.model
    dense.over_arch = DistributedDataParallel(dense.over_arch)
    return model


WRAPPED: dict[str, tuple[Callable[[torch.nn.Module], torch.nn.Module], str]] = {
    "bare": (lambda model: model, ""),
    "DMP": (parallel, ""),
    "DDP": (DistributedDataParallel, ""),
    "DDP in DMP": (lambda model: parallel(DistributedDataParallel(model)), ""),
    "DMP in DDP": (lambda model: DistributedDataParallel(parallel(model)), ""),
    "DMP in DMP": (lambda model: parallel(parallel(model)), ""),
    "DMP in a module": (lambda model: Outer(parallel(model)), "inner."),
    "a module in DDP": (lambda model: DistributedDataParallel(Outer(parallel(model))), "inner."),
    "DDP of a part": (with_parallel_top, ""),
    "DDP of a part in DMP": (lambda model: parallel(with_parallel_top(model)), ""),
}


@every(("wrap", "prefix"), WRAPPED.values(), ids=WRAPPED)
def test_what_is_saved_has_the_names_of_a_plain_model_however_it_is_wrapped(
    tmp_path: Path, wrap: Callable[[torch.nn.Module], torch.nn.Module], prefix: str
) -> None:
    plain = dlrm()
    with EmbeddingClient.local(tables_of(dlrm(), optimizer=SgdConfig(lr=LR)), consistency="sync") as client:
        load(plain, client)
        model = wrap(shard(dlrm(), client))
        names = list(model.state_dict())
        save(model, tmp_path / "model.pt")
        assert list(model.state_dict()) == names
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    found = {name.removeprefix(prefix): weight for name, weight in saved.items()}
    again = dlrm()
    again.load_state_dict(found)  # TorchRec's own, which is strict
    assert all(name.startswith(prefix) for name in saved)
    for name, weight in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)


def test_a_model_without_wrapper_may_hold_a_module_of_that_name(tmp_path: Path) -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torchrec.EmbeddingBagCollection(bag_configs())

    with EmbeddingClient.local(tables_of(Holder(), optimizer=SgdConfig(lr=LR))) as client:
        save(
            DistributedDataParallel(Outer(torch.nn.Sequential(shard(Holder(), client), torch.nn.Linear(1, 1)))),
            tmp_path / "model.pt",
        )
    names = list(torch.load(tmp_path / "model.pt", weights_only=True))
    assert names[0] == "inner.0.module.embedding_bags.t0.weight"
