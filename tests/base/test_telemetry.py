"""What a summary states of the code and the machine it ran on."""

from __future__ import annotations

import subprocess
from pathlib import Path

from shardkeep.base.machine.versions import commit, machine


def git(folder: Path, *arguments: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", *names, "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_is_that_of_the_checkout_which_holds_the_code(tmp_path: Path) -> None:
    code, installed = tmp_path / "package" / "base", tmp_path / ".venv" / "base"
    for folder in (code, installed):
        folder.mkdir(parents=True)
        (folder / "versions.py").touch()
    assert commit(code) is None  # no checkout at all
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-q", "-m", "Add it")
    head = git(tmp_path, "rev-parse", "HEAD")
    commit.cache_clear()
    assert commit(code) == head
    (code / "versions.py").write_text("changed = True\n")
    commit.cache_clear()
    assert commit(code) == f"{head}-dirty"
    assert commit(installed) is None  # an installed package inside somebody's repository


def test_a_machine_has_a_processor_with_a_name_and_cores() -> None:
    found = machine()
    assert str(found["processor"]).strip() and int(found["cores"]) >= 1
