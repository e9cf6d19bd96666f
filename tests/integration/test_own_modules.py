"""Files beside a config that have the names of Python's own modules: without effect in every process."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkeep.base.yaml_text import write_yaml
from tests.support.cluster import Cluster
from tests.support.configs import TINY

pytestmark = pytest.mark.waits_for_processes
SHADOWS = ("random", "queue", "types", "inspect", "token", "platform", "statistics", "sitecustomize", "usercustomize")
MODEL = """
import random, statistics
from torch import nn
from mine_too import Width
class Net(nn.Module):
    def __init__(self, *, num_dense, features):
        super().__init__()
        self.layer = nn.Linear(num_dense + sum(features.values()), Width)
    def forward(self, dense_BI, embeddings):
        import torch
        return self.layer(torch.cat([dense_BI, *embeddings.values()], dim=1))
"""


@pytest.mark.chaos
def test_a_job_with_a_model_of_its_own_trains_beside_files_named_like_pythons_own_modules(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder, here = tmp_path / "jobs", tmp_path / "here"
    folder.mkdir(mode=0o755)
    here.mkdir()
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"open({str(folder / name)!r}, 'w').close()\nraise SystemExit(7)\n")
    (folder / "mine.py").write_text(MODEL)
    (folder / "mine_too.py").write_text("Width = 1\n")
    config = {**TINY, "servers": 1, "workers": 1, "model": {"name": "mine:Net"}}
    (folder / "job.yaml").write_text(write_yaml(config))
    job = str(folder / "job.yaml")
    train = cluster.command("train", job, "--run-dir", "run", cwd=here, fresh=True).end()
    assert train.code == 0, train.err
    assert cluster.command("estimate", job, cwd=here, fresh=True).end().code == 0
    assert cluster.command("status", str(here / "run"), cwd=folder.parent, fresh=True).end().code == 0
    assert not [name for name in SHADOWS if (folder / name).exists()]

    (folder / "mine_too.py").chmod(0o666)
    refused = cluster.command("train", job, "--run-dir", "again", cwd=here, fresh=True).end()
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert f"{folder}/mine_too.py can be written by other users (mode 0666); chmod go-w" in refused.err
