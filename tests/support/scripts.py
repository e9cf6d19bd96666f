"""A Python script in a forked process: `Command("train.py", ..., main=SCRIPT)`.

It ends as `python` does, except that nothing is destroyed after its last exit function.
"""

from __future__ import annotations

import atexit
import runpy
import sys
import threading
from pathlib import Path


def main() -> None:
    """Runs the script that the first argument names, or the module behind `-m`, as `python` would."""
    atexit._clear()  # those of the process that this one was forked from
    try:
        _run()
    except Exception as error:
        sys.last_value = error
        raise
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _run() -> None:
    if sys.argv[1] == "-m":
        sys.argv = sys.argv[2:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
