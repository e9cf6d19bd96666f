"""The example scripts and the notebook of the first hour train: each of them, as a user would run it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.forked import SCRIPT, SHARDKEEP

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.chaos, pytest.mark.timeout(400)]

EXAMPLES = Path(__file__).parents[2] / "examples"
AROUND = ("with", "--servers", "2", "--run-dir", "run", "--")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
PYTHON = ("env", "WANDB_MODE=offline", sys.executable)
"""For libraries that leave something to the end of the interpreter."""
COMMANDS: dict[str, tuple[str | None, tuple[str, ...], float]] = {
    "custom_loop.py": (None, (), 0.5),
    "hstu.py": (None, (), 4.0),
    "torchrec_dlrm.py": ("torchrec", AROUND + TORCHRUN, 0.45),
    "lightning_module.py": ("lightning", (), 0.2),
    "mlflow_callback.py": ("mlflow", PYTHON, 0.65),
    "wandb_callback.py": ("wandb", PYTHON, 0.65),
}
"""By script: the library that it needs, what stands before it (nothing: a forked `python`), and a loss that a model
without training cannot have."""


@pytest.mark.parametrize("script", COMMANDS)
def test_an_example_trains(tmp_path: Path, cluster: Cluster, script: str) -> None:
    library, command, at_most = COMMANDS[script]
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    words = (*command, str(EXAMPLES / script))
    if command == PYTHON:
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        ended = cluster.command(*words, cwd=tmp_path, main=SHARDKEEP if command else SCRIPT).end()
        code, out, err = ended.code, ended.out, ended.err
    assert code == 0, err
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", out)]
    assert losses and losses[-1] < at_most, out


def test_the_notebook_of_the_first_hour_runs_as_it_stands(tmp_path: Path) -> None:
    nbformat, nbclient = (pytest.importorskip(name) for name in ("nbformat", "nbclient"))
    pytest.importorskip("ipykernel")
    book = nbformat.read(EXAMPLES / "first_hour.ipynb", as_version=4)
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    train, predict, report = [cell for cell in book["cells"] if cell["cell_type"] == "code"][1:]
    value, predicted, drawn = (
        next(out["data"] for out in cell["outputs"] if out["output_type"] == "execute_result")
        for cell in (train, predict, report)
    )
    assert float(value["text/plain"]) > 0.65
    printed = "".join(output["text"] for output in train["outputs"] if output["output_type"] == "stream")
    lines = printed.strip().split("\n")
    assert lines[0].startswith("data ") and lines[-1].startswith("run folder")
    bars = [line for line in lines if line.lstrip("\r").startswith("train ")]
    assert len(bars) <= 6 and "162/162" in bars[-1].split("\r")[-1], bars  # drawn over itself between other lines
    assert predicted["text/plain"].startswith("array([0.")
    assert "<iframe" in drawn["text/html"] and "srcdoc" in drawn["text/html"]
