"""Builds of this tree: a checkout of it, its sdist, its wheel, and the environment that a plain install makes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.environments import Environment, empty_environment, linked
from tests.support.once import once
from tests.support.requirements import closure

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ROOMS = sorted(path.name for path in (ROOT / "src" / "shardkeep").iterdir() if path.is_symlink())
"""The folders that are linked into the package."""
_TREE = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "src", "tests", "benchmarks", *ROOMS)


def copied(target: Path) -> Path:
    """Copies what a build may see of this tree, with its links, into a new folder."""
    target.mkdir(parents=True)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in _TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, target)
    return target


def building(source: Path, kind: str, out: Path, *, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Builds the `sdist` or `wheel` of a source tree, as pip does, with the setuptools of a Python's environment."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    return subprocess.run([python, "-c", code], cwd=source, capture_output=True, text=True, timeout=300)


def build(source: Path, kind: str, out: Path) -> Path:
    before = set(out.glob("*"))
    done = building(source, kind, out)
    assert done.returncode == 0, done.stderr
    (path,) = set(out.glob("*")) - before
    return path


def dependencies() -> set[str]:
    """The distributions that a plain install of shardkeep brings here."""
    return closure(PROJECT["dependencies"])


@dataclass(frozen=True)
class Built:
    """What tests of an installation share. Nobody writes into it."""

    checkout: str
    sdist: str
    wheel: str
    """Of the sdist, which holds folders and no links."""
    dependencies: str
    """A folder with what shardkeep needs, and nothing else."""
    bare: str
    """An environment with the wheel and its dependencies."""

    @property
    def environment(self) -> Environment:
        return Environment(Path(self.bare))


def built(folders: pytest.TempPathFactory) -> Built:
    """Builds and installs this tree, once for all workers of a test run."""
    return Built(**once(folders, "built", _build))


def _build(folder: Path) -> dict[str, str]:
    checkout = copied(folder / "home" / "shardkeep")
    sdist = build(checkout, "sdist", folder / "dist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    wheel = build(source, "wheel", folder / "dist")
    needed = linked(folder / "dependencies", dependencies())
    bare = empty_environment(folder / "environment", needed)
    bare.install(str(wheel))
    return asdict(Built(*map(str, (checkout, sdist, wheel, needed, bare.folder))))
