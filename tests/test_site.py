"""The site: every link of every document leads somewhere, and every public name has its docstring there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardkeep
from tests.support.builds import ROOT


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_the_site_is_built_without_a_warning_and_has_every_public_name(tmp_path: Path) -> None:
    pytest.importorskip("furo")
    source, site = tmp_path / "shardkeep", tmp_path / "site"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "runs", "__pycache__"))
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(site)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=800, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    page = (site / "build" / "api" / "shardkeep.html").read_text(encoding="utf-8")
    modules = {"__version__", "callbacks", "config", "errors", "nn", "ray", "torchrec"}
    assert {name for name in dir(shardkeep) if name not in modules and f">{name}</span>" not in page} == set()
    (source / "docs" / "guide" / "start.md").write_text("# Start\n\n[nowhere](nowhere.md)\n")
    broken = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=800, check=False)
    assert broken.returncode and "nowhere.md" in broken.stderr
