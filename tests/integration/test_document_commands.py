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
from tests.support.cases import every
from tests.support.cluster import Cluster
from tests.support.forked import SCRIPT, SHARDKEEP

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/guide/*.md")))
BLOCK = re.compile(r"^```(\w+)[ \t]*([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"[\w/-]+\.\w+")
PLAIN = re.compile(r"(?:(?:shardkeep|python) [^|&;<>()$`\\*?~#\n]+\n)+")
"""Commands that need no shell."""
LIMIT_S = 400


class Block(NamedTuple):
    """A fenced block: its language, what stands behind it, and its text."""

    language: str
    info: str
    text: str


def blocks(page: str) -> list[Block]:
    """The blocks of a page that have a language."""
    return [Block(*found) for found in BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))]


def commands(page: str) -> list[str]:
    """The blocks of a page that are run."""
    return [block.text for block in blocks(page) if block.language == "bash" and not block.info]


def path() -> dict[str, str]:
    """A PATH with the programs of this environment."""
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run_by_bash(text: str, folder: Path, environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def run_forked(text: str, folder: Path, environment: Mapping[str, str]) -> None:
    with Cluster(folder) as cluster:
        for line in text.splitlines():
            program, *arguments = shlex.split(line)
            main = SCRIPT if program == "python" else SHARDKEEP
            command = cluster.command(*arguments, cwd=folder, env=environment, main=main)
            assert command.end(limit_s=LIMIT_S).code == 0, f"{line}\n{command.printed()[-6000:]}"


IN_CI = {"README.md", *(f"docs/guide/{name}.md" for name in ("start", "data", "predict", "tables", "own-loop"))}
"""The pages that CI follows; `make chaos` follows all."""


def of_its_own(page: str) -> Any:
    """A page as a parameter: any test worker may take it, those with many commands first."""
    count = "".join(commands(page)).count("\n")
    often = pytest.mark.slow if page in IN_CI else pytest.mark.chaos
    return pytest.param(page, marks=[pytest.mark.group(page), pytest.mark.timeout(600 + 60 * count), often])


@pytest.mark.waits_for_processes
@pytest.mark.parametrize("page", [of_its_own(page) for page in PAGES if commands(page)])
def test_the_commands_of_a_page_run_as_they_stand(
    page: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    readme = page == "README.md"
    environment = dict(built(tmp_path_factory).environment.variables()) if readme else os.environ | path()
    environment["TMPDIR"] = str(tmp_path_factory.mktemp("temporary"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in blocks(page):
        if FILE.fullmatch(block.info):
            (tmp_path / block.info).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.info).write_text(block.text, encoding="utf-8")
        elif block.language == "bash" and not block.info:
            forks = not readme and PLAIN.fullmatch(block.text)
            (run_forked if forks else run_by_bash)(block.text, tmp_path, environment)


def test_no_two_pages_write_one_file_or_one_run_folder() -> None:
    """A reader follows several pages in one folder."""
    pages: dict[str, set[str]] = {}
    for page in PAGES:
        for block in blocks(page):
            made = [block.info] if FILE.fullmatch(block.info) else []
            if block.language == "bash":
                made += re.findall(r"--run-dir (\S+)", block.text)
            for name in made:
                pages.setdefault(name, set()).add(page)
    assert {name: sorted(found) for name, found in pages.items() if len(found) > 1} == {}


@every("page", PAGES)
def test_no_block_of_commands_hides_in_another_language(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    openings = re.findall(r"^```(.*)\n(.*)\n", text, re.MULTILINE)
    assert not [
        first for opening, first in openings if opening in {"", "sh", "console"} and first.startswith("shardkeep ")
    ]
