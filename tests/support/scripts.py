"""A Python script in a forked process: `Command("train.py", ..., main=SCRIPT)`.

Not for a script that leaves something to the end of its interpreter.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Runs the script that the first argument names, or the module behind `-m`, as `python` would."""
    if sys.argv[1] == "-m":
        sys.argv = sys.argv[2:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
