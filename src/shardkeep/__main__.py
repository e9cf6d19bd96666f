"""`python -m shardkeep` is the same as the `shardkeep` command.

Launchers run this file by its path. The package is then loaded from this folder, independent of the import path, and
the folder above is not on the import path.
"""

import contextlib
import importlib.util
import sys
from pathlib import Path

if not __package__:
    if "shardkeep" not in sys.modules:
        _here = Path(__file__).resolve().parent
        _spec = importlib.util.spec_from_file_location("shardkeep", _here / "__init__.py")
        assert _spec is not None and _spec.loader is not None
        sys.modules["shardkeep"] = _package = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(_package)
elif not sys.flags.safe_path:
    with contextlib.suppress(
        OSError
    ):  # `python -m` puts the current folder before Python's own modules; the command does not
        sys.path[:1] = [folder for folder in sys.path[:1] if folder != str(Path.cwd())]

from shardkeep.cli.main import main

if __name__ == "__main__":
    main()
