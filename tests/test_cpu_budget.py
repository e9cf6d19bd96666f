"""scripts/cpu-budget: the limit on the CPU seconds of the default tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "cpu-budget"
WORK = "import time\nwhile time.process_time() < 0.6: pass"
ONCE = ("--loops", "1")


def budget(folder: Path, *command: str, cpu_s: float) -> subprocess.CompletedProcess[str]:
    """The script with `cpu_s` as the figure of a machine whose loop takes 1 s, several times as long as any here."""
    figures = folder / "figures.md"
    figures.write_text(f"| CPU seconds of `make test` | {cpu_s:g} |\n| seconds of the calibration loop | 1 |\n")
    arguments = [sys.executable, str(SCRIPT), *ONCE, "--figures", str(figures), *command]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=250)


def test_a_command_within_the_contributors_guides_figures_keeps_its_exit_code() -> None:
    arguments = [sys.executable, str(SCRIPT), *ONCE, sys.executable, "-c", "raise SystemExit(3)"]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=250)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert "wall clock" in ended.stdout and "the limit on this machine is" in ended.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="adoption of orphans is Linux's")
def test_a_command_whose_orphan_takes_too_long_fails(tmp_path: Path) -> None:
    """Its second child loses its parent at once, and ends before the command."""
    orphan = f"{WORK}\nopen({str(tmp_path / 'ended')!r}, 'w').close()"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}])"
    wait = f"until [ -e {tmp_path / 'ended'} ]; do sleep 0.05; done"
    ended = budget(tmp_path, "bash", "-c", f'{sys.executable} -c "$0"; {wait}', parent, cpu_s=0.5)
    assert ended.returncode == 1
    assert "error: the command took" in ended.stderr and "(0.5 s at 1 s per loop)" in ended.stderr


def test_a_document_without_the_figures_is_named(tmp_path: Path) -> None:
    (tmp_path / "figures.md").write_text("no table\n")
    arguments = [sys.executable, str(SCRIPT), "--figures", str(tmp_path / "figures.md"), "true"]
    ended = subprocess.run(arguments, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "there are 0 rows '| CPU seconds of `make test` | NUMBER |'" in ended.stderr
