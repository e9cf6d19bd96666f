"""The scripts of benchmarks/: each says its question and can be tried; some of them run, small."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import every

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def test_every_script_with_a_main_says_its_question_and_takes_smoke() -> None:
    sources = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")}
    trees = {name: ast.parse(source) for name, source in sources.items()}
    scripts = {
        name
        for name, tree in trees.items()
        if any(isinstance(n, ast.FunctionDef) and n.name == "main" for n in tree.body)
    }
    assert {"pull_push", "scaling", "start_up", "quality"} <= scripts
    for name in scripts:
        assert ast.get_docstring(trees[name]), f"{name}.py has no docstring"
        assert re.search(r'"--smoke"|harness\.(seed_)?arguments\(', sources[name]), f"{name}.py takes no --smoke"


@pytest.mark.slow
@pytest.mark.waits_for_processes
@every("name", ["codecs", "many_ranks"])
def test_a_script_writes_its_figures(name: str, tmp_path: Path) -> None:
    written = smoke(name, tmp_path)
    assert written["benchmark"] == name and written["results"]
    for job in written["results"].get("rounds", {}).get("bounded 8", []):  # of many_ranks: one server is killed
        assert job["steps"] >= 3 and job["server ms"] > 0 and job["death s"] > 0 == job["death lost steps"]


@pytest.mark.chaos
@pytest.mark.waits_for_processes
def test_start_up_runs_real_jobs(tmp_path: Path) -> None:
    assert smoke("start_up", tmp_path)["results"]["rounds"]["shardkeep --help"][0]["seconds"] > 0


@pytest.mark.chaos
@pytest.mark.waits_for_processes
def test_scaling_runs_on_real_jobs(tmp_path: Path) -> None:
    points = smoke("scaling", tmp_path)["results"]["points"]
    assert [(point["servers"], point["workers"]) for point in points] == [(1, 1), (1, 2)]
    assert all(0 < point["server_cores"]["median"] < point["cores"]["median"] for point in points)


def smoke(name: str, folder: Path) -> dict[str, Any]:
    """What a script wrote to its --json."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--smoke", "--json", str(folder / "figures.json")]
    own = {**os.environ, "TMPDIR": str(folder)}  # where a script keeps its data
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads((folder / "figures.json").read_text()))
