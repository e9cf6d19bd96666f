"""Packages that some features need and a plain install has not: which are missing, and how to install them."""

from __future__ import annotations

import importlib.util

EXTRAS = {
    "cryptography": "tls",
    "httptools": "web",
    "matplotlib": "report",
    "optuna": "tune",
    "prometheus_client": "web",
    "ray": "ray",
    "scipy": "report",
    "starlette": "web",
    "uvicorn": "web",
}
"""By module: the extra of pyproject.toml that brings it. Modules that are not here have no extra."""
PAGE = ("starlette", "uvicorn", "httptools")
METRICS = (*PAGE, "prometheus_client")


def missing(*modules: str) -> str | None:
    """Returns "needs NAMES: pip install WHAT" for those that are not installed, None if all are. Imports none."""
    names = [name for name in modules if importlib.util.find_spec(name) is None]
    if not names:
        return None
    wanted = {f"'shardkeep[{EXTRAS[name]}]'" if name in EXTRAS else name for name in names}
    return f"needs {', '.join(names)}: pip install {' '.join(sorted(wanted))}"
