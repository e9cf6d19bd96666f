"""Plugs that the documents show, run as written: the number format of docs/guide/compression.md, and the examples."""

from __future__ import annotations

import ast
import json
import re
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import yaml

from shardkeep import EmbeddingClient, TableSpec
from shardkeep.compression.config import CompressionConfig
from shardkeep.compression.values.codecs import Codecs
from shardkeep.compression.values.registry import PULL_TAG, PUSH_TAG
from shardkeep.ps.checkpoints.folder import Checkpoints
from tests.support.cases import every
from tests.support.import_path import ROOT
from tests.support.local_job import LocalJob
from tests.support.resumed_jobs import drawn_data, job_config


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


def first_lines(path: Path) -> str:
    """The job's `compression` in the docstring of an example, as JSON, with a small pool."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    block = re.search(r"^ *compression:.*?(?=\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    return json.dumps(yaml.safe_load(textwrap.dedent(block[0]))["compression"]).replace("200000", "500")


@every("path", sorted((ROOT / "examples" / "compression").glob("*.py")))
def test_an_example_trains_as_its_first_lines_say_and_a_resume_changes_no_bit(tmp_path: Path, path: Path) -> None:
    config = job_config(1, 2, compression=first_lines(path), train__max_steps=5, train__batch_size=4)
    whole = LocalJob(config, drawn_data(), Checkpoints(tmp_path)).run()
    resumed = LocalJob(config, drawn_data(), resumed=Checkpoints(tmp_path).load(3)).run()
    assert (whole["steps"], resumed["state_digest"]) == (5, whole["state_digest"])
