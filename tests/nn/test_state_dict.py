"""A state dict of a model whose rows are on servers has none of them: writing it warns, once a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.import_path import IMPORT_PATH

SCRIPT = """
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


@pytest.mark.parametrize(
    ("lines", "warnings"),
    [
        (f"torch.save([dict(a=1), model.state_dict()], 'other.pt'); {WRITE}; {WRITE}", 1),
        pytest.param(
            f"client.save('rows', {{'model': copy.deepcopy(model.state_dict())}}); {WRITE}", 0, marks=pytest.mark.slow
        ),
    ],
    ids=["without rows", "rows saved"],
)
def test_a_state_dict_that_is_written_without_the_rows_warns_once(tmp_path: Path, lines: str, warnings: int) -> None:
    environment = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{lines}", lines)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == warnings, done.stderr
    for name in ("client.checkpoint", "client.save", "shardkeep.torchrec.save(model, FILE)"):
        assert done.stderr.count(name) == warnings
