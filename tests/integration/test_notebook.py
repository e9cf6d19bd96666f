"""The notebook of the first hour, in a kernel of its own: what its cells show, and what its square button does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
