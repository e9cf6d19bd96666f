"""shardkeep: parameter-server training of large recommendation models in PyTorch.

`__init__.pyi` has the public names. They load on first use; `import shardkeep` itself loads nothing.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re

__version__ = "0.1.0"


@functools.cache
def _homes() -> dict[str, str]:
    """The module or package that each public name is imported from."""
    stub = (pkgutil.get_data(__name__, "__init__.pyi") or b"").decode()
    found = re.findall(r"^from (\S+) import (\([^)]*\)|.*)", stub, re.MULTILINE)
    return {name: home for home, names in found for name in re.findall(r"(\w+) as", names)}


def __getattr__(name: str) -> object:
    if (home := _homes().get(name)) is not None:
        module = importlib.import_module(home)
        value = vars(module)[name] if name in vars(module) else importlib.import_module(f"{home}.{name}")
        globals()[name] = value
        return value
    elsewhere = ("config", "errors", "callbacks") if name[:1].isupper() else ()
    here = [f"; it is shardkeep.{each}.{name}" for each in elsewhere if hasattr(__getattr__(each), name)]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{''.join(here[:1])}")


def __dir__() -> list[str]:
    return sorted({*_homes(), "__version__"})
