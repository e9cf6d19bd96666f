"""Weights of a TorchRec model on their way to servers and back. Needs torchrec (installed as CONTRIBUTING.md says)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkeep import EmbeddingClient, SgdConfig, UserError
from shardkeep.base.errors import CheckpointError
from shardkeep.torchrec import load, save, shard, tables_of, unshard
from tests.support.late_import import late_import

torchrec = late_import("torchrec")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROWS = 40


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        bags = [
            torchrec.EmbeddingBagConfig(name=f"t{i}", embedding_dim=4, num_embeddings=ROWS + i, feature_names=[f"f{i}"])
            for i in range(2)
        ]
        row = torchrec.EmbeddingConfig(name="seq", embedding_dim=8, num_embeddings=ROWS, feature_names=["s"])
        self.bags = torchrec.EmbeddingBagCollection(tables=bags)
        self.rows = torchrec.EmbeddingCollection(tables=[row])
        self.top = nn.Linear(8, 1)

    def forward(self, features: Any) -> torch.Tensor:
        score: torch.Tensor = self.top(self.bags(features).values()) + self.rows(features)["s"].values().sum()
        return score


def batch() -> Any:
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 4, (24,), generator=random)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=random)
    return torchrec.KeyedJaggedTensor.from_lengths_sync(keys=["f0", "f1", "s"], values=values, lengths=lengths)


def client_of(model: nn.Module) -> EmbeddingClient:
    return EmbeddingClient.local(tables_of(model, optimizer=SgdConfig(lr=0.1)), consistency="sync")


def equal(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_model_continues_on_servers_and_comes_back(tmp_path: Path) -> None:
    plain, model = Model(), Model()
    model.load_state_dict(plain.state_dict())
    with client_of(model) as client:
        assert load(model, client) == ["t0", "t1", "seq"]
        model = shard(model, client)
        save(model, tmp_path / "start.pt")
        assert equal(torch.load(tmp_path / "start.pt"), plain.state_dict())
        assert torch.equal(model(batch()), plain(batch()))
        for each in (model, plain):
            each(batch()).square().sum().backward()
        save(model, tmp_path / "trained.pt")
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    trained = torch.load(tmp_path / "trained.pt")
    for name, weight in plain.state_dict().items():
        if "embedding" in name:
            torch.testing.assert_close(trained[name], weight, rtol=1e-6, atol=1e-7)
    again = Model()
    again.load_state_dict(trained)  # TorchRec's own reads it
    with client_of(Model()) as client:
        assert len(load(tmp_path / "trained.pt", client)) == 3
        restored = unshard(shard(Model(), client)).state_dict()
        assert all(torch.equal(rows, trained[name]) for name, rows in restored.items() if "embedding" in name)


def test_tables_may_have_other_names_on_the_servers() -> None:
    model = Model()
    specs = tables_of(model, optimizer=SgdConfig(lr=0.1))
    renamed = {spec.name: f"server_{spec.name}" for spec in specs}
    with EmbeddingClient.local([spec.model_copy(update={"name": renamed[spec.name]}) for spec in specs]) as client:
        load(model.state_dict(), client, tables=renamed)
        found = unshard(shard(Model(), client, tables=renamed)).state_dict()
        assert torch.equal(found["bags.embedding_bags.t1.weight"], model.bags.embedding_bags["t1"].weight)


def test_what_is_no_such_state_is_refused(tmp_path: Path) -> None:
    model = Model()
    (tmp_path / "garbage.pt").write_bytes(b"garbage")
    torch.save([1], tmp_path / "list.pt")
    sharded: Any = nn.Parameter(torch.zeros(2, 4)).to_sparse()
    states: list[tuple[type[Exception], str, Any]] = [
        (UserError, "no table", nn.Linear(2, 2)),
        (CheckpointError, r"nothing\.pt: No such file", tmp_path / "nothing.pt"),
        (CheckpointError, r"garbage\.pt", tmp_path / "garbage.pt"),
        (CheckpointError, r"list\.pt: holds a list", tmp_path / "list.pt"),
        (UserError, "no table other", {"x.embedding_bags.other.weight": torch.zeros(2, 4)}),
        (UserError, "is a dict; allowed: a whole tensor", {"embeddings.t0.weight": {"parts": sharded}}),
    ]
    with client_of(model) as client:
        for kind, text, state in states:
            with pytest.raises(kind, match=text):
                load(state, client)
        with pytest.raises(UserError, match="no module of the model is on servers"):
            save(model, tmp_path / "x.pt")
        model = shard(model, client)
        with pytest.raises(CheckpointError, match="save: "):
            save(model, tmp_path / "no" / "x.pt")
        assert not list(tmp_path.glob(".*"))


def test_a_table_without_gradient_is_frozen_and_comes_back_so() -> None:
    plain, model = Model(), Model()
    for each in (plain, model):
        each.bags.embedding_bags["t0"].weight.requires_grad_(False)
    model.load_state_dict(plain.state_dict())
    assert [spec.freeze for spec in tables_of(model, optimizer=SgdConfig(lr=0.1))] == [True, False, False]
    with client_of(Model()) as trained, pytest.raises(UserError, match="t0: its weight has requires_grad False"):
        shard(model, trained)
    with client_of(model) as client:
        load(model, client)
        model = shard(model, client)
        before = {name: weight.clone() for name, weight in plain.state_dict().items()}
        for each in (model, plain):
            each(batch()).square().sum().backward()
        restored = unshard(model)
    torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1).step()
    own, expected = restored.state_dict(), plain.state_dict()
    assert torch.equal(own["bags.embedding_bags.t0.weight"], before["bags.embedding_bags.t0.weight"])
    for name in (name for name in expected if "embedding" in name):
        torch.testing.assert_close(own[name], expected[name], rtol=1e-6, atol=1e-7)
    assert not restored.bags.embedding_bags["t0"].weight.requires_grad
    assert restored.bags.embedding_bags["t1"].weight.requires_grad
