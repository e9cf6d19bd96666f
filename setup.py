"""Refuses to build without the rooms. pyproject.toml says everything else."""

import sys
from pathlib import Path

from setuptools import setup

PACKAGE = Path(__file__).parent / "src" / "shardkeep"
for room in ("ps", "workers", "compression", "proto", "examples"):
    if not (PACKAGE / room).is_dir():
        sys.exit(
            f"error: src/shardkeep/{room} is no folder and no link to one: this checkout has lost its symbolic links; "
            "clone it with git clone -c core.symlinks=true, or install an sdist"
        )
setup()
