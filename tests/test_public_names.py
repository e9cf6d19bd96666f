"""The names that `import shardkeep` offers: complete, lazy, and the same for type checkers and for the interpreter."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import shardkeep
from shardkeep.base import errors
from shardkeep.base.settings import Settings
from shardkeep.ps.shard.table.optimizers.registry import OPTIMIZERS

SOURCE = Path(shardkeep.__file__).read_text(encoding="utf-8")


def typed_names() -> set[str]:
    """The names that the package imports for type checkers only."""
    (block,) = (node for node in ast.parse(SOURCE).body if isinstance(node, ast.If))
    return {alias.asname or "" for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_type_checkers_and_the_interpreter_see_the_same_names() -> None:
    assert typed_names() == set(shardkeep.__all__) - {"__version__"}


def test_every_error_is_public() -> None:
    tree = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__}
    assert tree <= set(shardkeep.__all__)


def test_every_row_optimizer_is_public() -> None:
    configs = {
        kind for kind in shardkeep.__all__ if kind.endswith("Config") and issubclass(getattr(shardkeep, kind), Settings)
    }
    names = {
        getattr(shardkeep, kind).model_fields["name"].default
        for kind in configs
        if "name" in getattr(shardkeep, kind).model_fields
    }
    assert set(OPTIMIZERS) <= names


def test_the_old_name_of_serve_raises_one_line() -> None:
    with pytest.raises(
        shardkeep.UserError, match=r"^shardkeep\.serve\(\.\.\.\) is EmbeddingClient\.serve\(\.\.\.\) now"
    ):
        shardkeep.serve([shardkeep.TableSpec(name="user")], servers=2)


def test_importing_the_package_loads_none_of_its_modules() -> None:
    probe = "import sys, shardkeep; assert not [m for m in sys.modules if m.startswith('shardkeep.')]"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
