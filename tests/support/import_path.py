"""The import path of child processes that import this checkout's package and its tests."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMPORT_PATH = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
