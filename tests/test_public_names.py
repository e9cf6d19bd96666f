"""The names that `import shardkeep` offers: complete, lazy, and the same for type checkers and for the interpreter."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import shardkeep
from shardkeep.base import errors
from shardkeep.base.settings import Settings
from shardkeep.ps.server.table.optimizers.registry import OPTIMIZERS
from tests.support.cases import every

MODULES = {"callbacks", "config", "errors", "nn", "ray", "torchrec"}


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_shows_its_public_names_alone_and_has_each() -> None:
    shown = set(dir(shardkeep))
    assert len(shown - MODULES) <= 27 and shown > MODULES
    assert {name for name in shown if getattr(shardkeep, name, None) is None} == set()


def test_importing_the_package_loads_none_of_its_modules() -> None:
    run("import sys, shardkeep; dir(shardkeep); assert not [m for m in sys.modules if m.startswith('shardkeep.')]")


@pytest.mark.chaos
def test_a_module_needs_no_import_of_its_own() -> None:
    uses = "shardkeep.nn.Jagged, shardkeep.torchrec.shard, shardkeep.callbacks.StartEvent, shardkeep.errors.Diverged"
    assert "Jagged" in run(f"import shardkeep; print({uses}, shardkeep.config.CompressionConfig, shardkeep.ray.train)")


def test_every_error_is_public() -> None:
    tree = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__}
    assert tree == set(shardkeep.errors.__all__)


def test_every_row_optimizer_is_public() -> None:
    configs = [getattr(shardkeep, name) for name in dir(shardkeep) if name.endswith("Config")]
    fields = [config.model_fields for config in configs if issubclass(config, Settings)]
    assert set(OPTIMIZERS) <= {each["name"].default for each in fields if "name" in each}


def test_every_section_of_a_job_is_in_the_module_of_settings() -> None:
    sections = {field.annotation for field in shardkeep.JobConfig.model_fields.values()}
    kinds = {kind.__name__ for kind in sections if inspect.isclass(kind) and issubclass(kind, Settings)}
    assert len(kinds) > 12
    assert {name for name in kinds if not hasattr(shardkeep.config, name)} == set()


@every(
    ("name", "home"),
    [("CompressionConfig", "config"), ("JobStopped", "errors"), ("StartEvent", "callbacks"), ("Nothing", "")],
)
def test_a_name_that_stands_in_a_module_is_refused_with_its_place(name: str, home: str) -> None:
    with pytest.raises(AttributeError) as refused:
        getattr(shardkeep, name)
    assert str(refused.value).endswith(f"; it is shardkeep.{home}.{name}" if home else f"no attribute '{name}'")
