"""The command blocks of the README and of docs/guide, run as they stand, page by page, each in an empty folder. The
README's have an environment with shardkeep's wheel and its dependencies alone.

A block ```bash is run. ```bash REASON is not, for that reason. ```LANGUAGE FILE is written to FILE.

bash runs the blocks of the README, and blocks that need a shell. A block of plain `shardkeep` and `python` commands of
another page is run by processes that are forked from one preloaded process: this saves 3 to 10 CPU s of imports per
command.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.builds import built
from tests.support.cluster import Cluster
from tests.support.forked import SCRIPT, SHARDKEEP

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)[ \t]*([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"[\w/-]+\.\w+")
PLAIN = re.compile(r"(?:(?:shardkeep|python) [^|&;<>()$`\\*?~#\n]+\n)+")
"""Commands that need no shell."""
IN_CI = {"README.md", *(f"docs/guide/{name}.md" for name in ("start", "data", "predict", "tables", "own-loop"))}
"""The pages that CI follows; `make chaos` follows all."""
LIMIT_S = 400


class Block(NamedTuple):
    """A fenced block with a language; `info` stands behind that."""

    language: str
    info: str
    text: str

    @property
    def runs(self) -> bool:
        return self.language == "bash" and not self.info

    @property
    def is_file(self) -> bool:
        return bool(FILE.fullmatch(self.info))


FILES = [ROOT / "README.md", *sorted(ROOT.glob("docs/guide/*.md"))]
PAGES = {
    path.relative_to(ROOT).as_posix(): [Block(*found) for found in BLOCK.findall(path.read_text(encoding="utf-8"))]
    for path in FILES
}


def run_by_bash(text: str, folder: Path, environment: Mapping[str, str]) -> None:
    how: dict[str, Any] = {"cwd": folder, "env": environment, "stdin": subprocess.DEVNULL, "timeout": LIMIT_S}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], capture_output=True, text=True, **how)
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def run_forked(text: str, folder: Path, environment: Mapping[str, str]) -> None:
    with Cluster(folder) as cluster:
        for line in text.splitlines():
            program, *arguments = shlex.split(line)
            main = SCRIPT if program == "python" else SHARDKEEP
            command = cluster.command(*arguments, cwd=folder, env=environment, main=main)
            assert command.end(limit_s=LIMIT_S).code == 0, f"{line}\n{command.printed()[-6000:]}"


def of_its_own(page: str) -> Any:
    """A page as a parameter: any test worker may take it, those with many commands first."""
    count = "".join(block.text for block in PAGES[page] if block.runs).count("\n")
    often = pytest.mark.slow if page in IN_CI else pytest.mark.chaos
    return pytest.param(page, marks=[pytest.mark.group(page), pytest.mark.timeout(600 + 60 * count), often])


@pytest.mark.waits_for_processes
@pytest.mark.parametrize("page", [of_its_own(page) for page in PAGES if any(block.runs for block in PAGES[page])])
def test_the_commands_of_a_page_run_as_they_stand(
    page: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    readme, path = page == "README.md", f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = dict(built(tmp_path_factory).environment.variables()) if readme else os.environ | {"PATH": path}
    environment["TMPDIR"] = str(tmp_path_factory.mktemp("temporary"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in PAGES[page]:
        if block.is_file:
            (tmp_path / block.info).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.info).write_text(block.text, encoding="utf-8")
        elif block.runs:
            forks = not readme and PLAIN.fullmatch(block.text)
            (run_forked if forks else run_by_bash)(block.text, tmp_path, environment)


def test_no_two_pages_write_one_file_or_one_run_folder_and_no_command_hides_in_another_language() -> None:
    """A reader follows several pages in one folder."""
    pages: dict[str, set[str]] = {}
    for page, blocks in PAGES.items():
        made = {block.info for block in blocks if block.is_file}
        for name in made.union(*(re.findall(r"--run-dir (\S+)", b.text) for b in blocks if b.language == "bash")):
            pages.setdefault(name, set()).add(page)
    assert {name: sorted(found) for name, found in pages.items() if len(found) > 1} == {}
    for path in FILES:
        openings = re.findall(r"^```(.*)\n(.*)\n", path.read_text(encoding="utf-8"), re.MULTILINE)
        hidden = [first for opening, first in openings if opening in {"", "sh", "console"}]
        assert not [first for first in hidden if first.startswith("shardkeep ")], path
