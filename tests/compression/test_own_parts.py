"""Parts of the user's own that the documents show, run as written: the classes of the guide, and the examples."""

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
from shardkeep.compression.selection.selector import Step
from shardkeep.ps.checkpoints.folder import Checkpoints
from tests.support.cases import every
from tests.support.guide import block_of
from tests.support.import_path import ROOT
from tests.support.local_job import LocalJob
from tests.support.resumed_jobs import drawn_data, job_config


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
