"""TorchRec models whose tables have admission and eviction. Needs torchrec (installed as CONTRIBUTING.md says)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkeep import EmbeddingClient, SgdConfig, TableSpec
from shardkeep.base.errors import ConfigError
from shardkeep.config import AdmitConfig, EvictConfig
from shardkeep.torchrec import load, save, shard, tables_of, unshard
from tests.support.late_import import late_import

torchrec = late_import("torchrec")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROWS = 40


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        bag = torchrec.EmbeddingBagConfig(name="bag", embedding_dim=4, num_embeddings=ROWS, feature_names=["b"])
        row = torchrec.EmbeddingConfig(name="row", embedding_dim=4, num_embeddings=ROWS, feature_names=["r"])
        self.bags = torchrec.EmbeddingBagCollection(tables=[bag])
        self.rows = torchrec.EmbeddingCollection(tables=[row])

    def forward(self, features: Any) -> torch.Tensor:
        score: torch.Tensor = self.bags(features).values().sum() + self.rows(features)["r"].values().sum()
        return score


def batch(*ids: int) -> Any:
    values = torch.tensor([*ids, *ids])
    return torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=["b", "r"], values=values, lengths=torch.tensor([len(ids), len(ids)])
    )


def tables(model: nn.Module, **policies: Any) -> list[TableSpec]:
    return [spec.model_copy(update=policies) for spec in tables_of(model, optimizer=SgdConfig(lr=0.5))]


def counts(client: EmbeddingClient, what: str) -> list[int]:
    return [table[what] for table in client.summary()["tables"]]


def test_rows_of_a_model_go_and_read_their_initial_values_again() -> None:
    model = Model()
    specs = tables(model, evict=EvictConfig(ttl_steps=2, sweep_steps=1))
    with EmbeddingClient.local(specs, consistency="sync") as client:
        model = shard(model, client)
        initial = client.read({name: torch.arange(ROWS) for name in ("bag", "row")})
        model(batch(1, 2, 3)).backward()
        for _ in range(4):
            model(batch(7)).backward()
        assert counts(client, "rows") == [1, 1] and counts(client, "evicted_rows") == [3, 3]
        model = unshard(model)
    for name, weight in (
        ("bag", model.bags.embedding_bags["bag"].weight),
        ("row", model.rows.embeddings["row"].weight),
    ):
        changed = (weight != initial[name]).any(dim=1).nonzero()[:, 0].tolist()
        assert changed == [7]


def test_ids_below_the_bar_are_read_and_not_trained() -> None:
    model = Model()
    with EmbeddingClient.local(tables(model, admit=AdmitConfig(min_count=2)), consistency="sync") as client:
        model = shard(model, client)
        before = model(batch(1)).item()
        model(batch(1, 2)).backward()
        assert model(batch(1)).item() == before and counts(client, "rows") == [0, 0]
        model(batch(1)).backward()
        assert model(batch(1)).item() != before and counts(client, "admitted_rows") == [1, 1]
        assert counts(client, "refused_rows") == [2, 2]


def test_loaded_weights_count_as_one_push_and_a_saved_state_has_what_is_left(tmp_path: Path) -> None:
    """A loaded row that goes then reads the table's initial value, not its loaded weight."""
    model = Model()
    loaded = {name: weight.clone() for name, weight in model.state_dict().items()}
    specs = tables(model, evict=EvictConfig(ttl_steps=3, sweep_steps=1), admit=AdmitConfig(min_count=2))
    with EmbeddingClient.local(specs, consistency="sync") as client:
        load(model, client)
        model = shard(model, client)
        assert counts(client, "rows") == [ROWS, ROWS]
        for _ in range(6):
            model(batch(7)).backward()
        assert counts(client, "rows") == [1, 1] and counts(client, "evicted_rows") == [ROWS - 1, ROWS - 1]
        save(model, tmp_path / "model.pt")
        read = client.read({"bag": torch.arange(ROWS)})["bag"]
    state = torch.load(tmp_path / "model.pt")
    weight, before = (each["bags.embedding_bags.bag.weight"] for each in (state, loaded))
    assert torch.equal(weight, read)
    torch.testing.assert_close(weight[7], before[7] - 6 * 0.5)
    assert not (weight == before).all(dim=1).any()


@pytest.mark.chaos
@pytest.mark.waits_for_processes
def test_a_model_with_policies_trains_on_server_processes_as_in_its_own() -> None:
    evict, admit = EvictConfig(ttl_steps=2, sweep_steps=1), AdmitConfig(min_count=2)
    digests = []
    for place in ("local", "serve"):
        model: nn.Module = Model()
        specs = tables(model, evict=evict, admit=admit)
        started = (
            EmbeddingClient.local(specs, consistency="sync")
            if place == "local"
            else EmbeddingClient.serve(specs, servers=2, consistency="sync")
        )
        with started as client:
            model = shard(model, client)
            for step in range(12):
                model(batch(step, step + 1, 30)).backward()
            summary = client.summary(digest=True)
            digests.append((summary["state_digest"], counts(client, "rows"), counts(client, "evicted_rows")))
    assert digests[0] == digests[1] and digests[0][2][0] > 5


def test_a_frozen_table_with_a_policy_is_refused_by_name() -> None:
    model = Model()
    model.rows.embeddings["row"].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"^tables\.row: evict: with freeze: true, which neither creates"):
        EmbeddingClient.local(tables(model, evict=EvictConfig(ttl_steps=2)))
