"""The example of docs/guide/compression.md, run as written: a number format of the user's own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from shardkeep import EmbeddingClient, TableSpec
from shardkeep.compression.config import CompressionConfig
from shardkeep.compression.values.codecs import Codecs
from shardkeep.compression.values.registry import PULL_TAG, PUSH_TAG
from tests.support.import_path import ROOT


def block_of(kind: str) -> str:
    guide = (ROOT / "docs" / "guide" / "compression.md").read_text(encoding="utf-8")
    section = guide.split("\n## A number format of your own\n")[1]
    return re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL)[0]


def test_the_example_of_the_guide_works_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(block_of("python mine.py"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "mine", sys)  # so that the test leaves no module behind
    del sys.modules["mine"]
    exec(block_of("python test_mine.py"), {})
    compression = CompressionConfig.model_validate(yaml.safe_load(block_of("yaml"))["compression"])
    names = [Codecs(compression)[tag].name for tag in (PUSH_TAG, PULL_TAG)]
    assert names == ["mine:Bf16", "mine:Bf16"]
    with EmbeddingClient.local([TableSpec(name="user", dim=4)], compression=compression) as client:
        rows = client.lookup({"user": np.arange(9)})
        rows["user"].sum().backward()
        client.apply(rows)
        sent = client.summary()["bytes"]
    assert sent["pull"]["values"] == sent["push"]["values"] == 9 * 2 * 4
