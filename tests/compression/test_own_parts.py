"""The classes of docs/guide/compression.md, run as written: parts of the user's own."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from shardkeep import EmbeddingClient, TableSpec
from shardkeep.compression.config import CompressionConfig
from shardkeep.compression.selection.selector import Step
from tests.support.guide import block_of


def test_the_classes_of_the_guide_work_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("mine", "my_form", "per_table"):
        (tmp_path / f"{module}.py").write_text(block_of(f"python {module}.py"))
        monkeypatch.setitem(sys.modules, module, sys)  # so that the test leaves no module behind
        del sys.modules[module]
    exec(block_of("python check.py"), names := {})
    step = Step(0, 0.5, np.array([0, 4, 6]), np.arange(6), 1, np.zeros(2, np.uint64), np.float32([1, 9, 8, 0, 3, 4]))
    chosen = names["PerTable"](small=2).choose(step, np.zeros((6, 1), np.float32))
    assert np.flatnonzero(chosen).tolist() == [1, 2, 4, 5]
    compression = CompressionConfig.model_validate(yaml.safe_load(block_of("yaml"))["compression"])
    assert compression.own == ["mine:Bf16", "per_table:PerTable", "mine:Bf16", "my_form:Sign"]
    with EmbeddingClient.local([TableSpec(name="user", dim=4)], compression=compression) as client:
        rows = client.lookup({"user": np.arange(9)})
        rows["user"].sum().backward()
        client.apply(rows)
        sent = client.summary()["bytes"]
    assert sent["pull"]["values"] == 9 * 2 * 4 and sent["push"]["values"] == 9 * 2 * 4
