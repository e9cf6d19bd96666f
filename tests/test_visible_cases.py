"""The cases beside the checkout, or in the folder that SHARDKEEP_CASES names, as `scripts/run-cases` runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CASES = (
    "lake-deleted", "files-twice", "padded-history", "seen-again", "prefix-rows", "cosine-resume", "balanced-weights",
    "mixed-writers", "column-added", "serve-odd", "formats", "data-01", "data-03",
)  # fmt: skip


@pytest.mark.slow
def test_every_case_is_right_or_refused(tmp_path: Path) -> None:
    folder = Path(os.environ.get("SHARDKEEP_CASES", ROOT.parent / "shared" / "cases"))
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing; SHARDKEEP_CASES names a folder of cases")
    command = [sys.executable, "scripts/run-cases", str(folder), *CASES, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
