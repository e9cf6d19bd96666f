"""A state dict of a model whose rows are on servers has none of them: writing it warns, once a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.forked import SCRIPT

TRAIN = """
import copy, sys, torch
from torch import nn
from shardkeep import EmbeddingClient, TableSpec
from shardkeep.nn import EmbeddingBagCollection
with EmbeddingClient.local([TableSpec(name="item", dim=4)]) as client:
    model = nn.ModuleDict({"bags": EmbeddingBagCollection(client, {"item": "item"}), "top": nn.Linear(4, 1)})
    {lines}
    again = torch.load("model.pt", weights_only=True)
    assert all(torch.equal(again[name], weight) for name, weight in model.state_dict().items()) and len(again) == 2
    model.load_state_dict(again)
"""
WRITE = 'torch.save(model.state_dict(), "model.pt")'


@pytest.mark.waits_for_processes
@pytest.mark.parametrize(
    ("lines", "warnings"),
    [
        (f"torch.save([dict(a=1), model.state_dict()], 'other.pt'); {WRITE}; {WRITE}", 1),
        (f"client.save('rows', {{'model': copy.deepcopy(model.state_dict())}}); {WRITE}", 0),
    ],
    ids=["without rows", "rows saved"],
)
def test_a_state_dict_that_is_written_without_the_rows_warns_once(
    cluster: Cluster, tmp_path: Path, lines: str, warnings: int
) -> None:
    (tmp_path / "train.py").write_text(TRAIN.replace("{lines}", lines))
    ended = cluster.command("train.py", main=SCRIPT, cwd=tmp_path).end()
    assert ended.code == 0, ended.err
    assert len(ended.err.splitlines()) == warnings, ended.err
    for name in ("client.checkpoint", "client.save", "shardkeep.torchrec.save(model, FILE)"):
        assert ended.err.count(name) == warnings
