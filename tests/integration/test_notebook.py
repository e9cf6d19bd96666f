"""The notebook of the first hour, in a kernel of its own: what its cells show, and what its square button does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from shardkeep.ps.checkpoints.folder import Checkpoints

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
start_new_kernel = pytest.importorskip("jupyter_client.manager").start_new_kernel
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]
NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_hour.ipynb"


def printed(cell: Any) -> str:
    return "".join(output["text"] for output in cell["outputs"] if output["output_type"] == "stream")


def value(cell: Any, kind: str = "text/plain") -> str:
    return next(str(out["data"][kind]) for out in cell["outputs"] if out["output_type"] == "execute_result")


def test_the_first_hour_runs_as_it_stands(tmp_path: Path) -> None:
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    train, predict, report = [cell for cell in book["cells"] if cell["cell_type"] == "code"][1:]
    assert float(value(train)) > 0.65
    lines = printed(train).strip().split("\n")
    assert lines[0].startswith("data ") and lines[-1].startswith("run folder")
    drawn = [line for line in lines if line.lstrip("\r").startswith("train ")]
    assert len(drawn) <= 6 and "162/162" in drawn[-1].split("\r")[-1], drawn  # drawn over itself between other lines
    assert value(predict).startswith("array([0.")
    assert "<iframe" in value(report, "text/html") and "srcdoc" in value(report, "text/html")


def test_a_cell_that_is_stopped_leaves_a_checkpoint(tmp_path: Path) -> None:
    book = nbformat.read(NOTEBOOK, as_version=4)
    data, train = [cell for cell in book["cells"] if cell["cell_type"] == "code"][:2]
    train["source"] = train["source"].replace('"epochs": 3', '"epochs": 3000')
    assert "3000" in train["source"]
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    try:
        assert client.execute(data["source"], reply=True, timeout=100)["content"]["status"] == "ok"
        client.execute(train["source"])
        run = first_run(tmp_path)
        await_step(run)
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=100)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert (reply["content"]["status"], reply["content"]["ename"]) == ("error", "JobStopped")
    assert list(Checkpoints(run / "checkpoints").complete())


def first_run(folder: Path) -> Path:
    """Waits for the run's folder, with a config."""
    end = time.monotonic() + 100
    while not (found := [path.parent for path in folder.glob("runs/*/config.yaml")]):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found[0]


def await_step(run: Path) -> None:
    end = time.monotonic() + 100
    while not (run / "metrics.jsonl").exists() or '"progress"' not in (run / "metrics.jsonl").read_text():
        assert time.monotonic() < end
        time.sleep(0.1)
