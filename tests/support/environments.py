"""Environments for tests of an installation: nothing is in them except distributions that are linked from this one."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

LIMIT_S = 500.0


@dataclass(frozen=True)
class Environment:
    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def install(self, *what: str) -> None:
        """Installs without dependencies and without an index, by the pip of this environment."""
        pip = ["-m", "pip", "--python", self.python, "install", "--quiet", "--disable-pip-version-check"]
        checked(sys.executable, *pip, "--no-deps", "--no-index", "--no-build-isolation", *what, cwd=self.folder)

    def variables(self) -> dict[str, str]:
        """The variables of processes in it: its programs first in PATH, no module from elsewhere."""
        own = {"PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own


def empty_environment(folder: Path, *searched: Path) -> Environment:
    """A new environment that searches these folders after its own."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "searched.pth").write_text("".join(f"{path}\n" for path in searched))
    return Environment(folder)


def linked(folder: Path, distributions: Iterable[str]) -> Path:
    """A new folder with links to what these distributions have in this environment."""
    folder.mkdir()
    for name in distributions:
        site = Path(str(metadata.distribution(name).locate_file("")))
        for top in {file.parts[0] for file in metadata.files(name) or []} - {"..", "__pycache__"}:
            if not (folder / top).is_symlink():
                (folder / top).symlink_to(site / top)
    return folder


def checked(*command: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
