"""The user's own modules: found last, and only where nobody else could have put them. The plugs of every registry."""

from __future__ import annotations

import importlib.util
import queue
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.base.plugging.modules import check_found, load_named, search_last
from shardkeep.base.plugging.plugs import Plug
from shardkeep.compression.config import FORMS
from shardkeep.compression.values.registry import FORMATS
from shardkeep.workers.config import LOSSES, METRICS
from shardkeep.workers.data_config import SOURCES
from shardkeep.workers.model_config import MODELS
from tests.support.cases import every


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "code"
    folder.mkdir(mode=0o755)
    for name, text in {
        "theirs_a": "import theirs_b\nNet = theirs_b.Net",
        "theirs_b": "import random\nclass Net: random = random",
        "random": "raise RuntimeError('shadows')",
        "queue": "Queue = 'mine'",
        "colorsys": "Net = 1",
        "yaml": "Net = 1",
        "theirs_broken": "1 / 0",
    }.items():
        (folder / f"{name}.py").write_text(text)
        (folder / f"{name}.py").chmod(0o644)
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name.startswith("theirs_"):
            del sys.modules[name]


def test_a_module_and_those_beside_it_are_found_and_pythons_own_come_first(folder: Path) -> None:
    net = load_named("theirs_a:Net", setting="model.name", folder=folder)
    assert sys.path[-1] == str(folder)
    assert not net.random.__file__.startswith(str(folder))


def test_nothing_is_searched_where_the_module_is_on_the_import_path_already(folder: Path) -> None:
    assert load_named("queue:Queue", setting="model.name", folder=folder.parent) is queue.Queue
    assert str(folder.parent) not in sys.path


@every(
    ("name", "hidden_by"),
    [("queue:Queue", "Python's own module"), ("colorsys:Net", "Python's own module"), ("yaml:Net", "the module /")],
    ids=["loaded", "not loaded", "installed"],
)
def test_a_file_with_the_name_of_another_module_is_refused_by_name(folder: Path, name: str, hidden_by: str) -> None:
    file = folder / f"{name.partition(':')[0]}.py"
    said = rf"^model\.name: {name} cannot be loaded: {hidden_by}.* comes before {file}, which has the same name; rename"
    with pytest.raises(ConfigError, match=said):
        load_named(name, setting="model.name", folder=folder)
    search_last(folder)
    with pytest.raises(ConfigError, match=said):
        load_named(name, setting="model.name")
    sys.path.remove(str(folder))


@every(
    ("name", "said"),
    [
        ("theirs_none:Net", "module 'theirs_none' cannot be imported (looked in FOLDER last): ModuleNotFoundError: "),
        ("theirs_broken:Net", "module 'theirs_broken' cannot be imported (looked in FOLDER last): ZeroDivisionError: "),
        ("theirs_a:Nett", "module 'theirs_a' has no 'Nett'"),
    ],
)
def test_what_cannot_be_loaded_is_named_in_one_line(folder: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_named(name, setting="data.source", folder=folder)
    assert str(refused.value).startswith(f"data.source: {said.replace('FOLDER', str(folder))}")
    assert "\n" not in str(refused.value)


def test_a_module_that_is_nowhere_is_refused_before_processes_start(folder: Path) -> None:
    check_found(["theirs_a:Net", "json:loads", "shardkeep.examples.absent:X"], (folder, "."))
    where = rf"on the import path or in {folder}; set data\.root to the folder of theirs_none\.py"
    with pytest.raises(ConfigError, match=rf"^theirs_none:Net: there is no module 'theirs_none' {where}$"):
        check_found(["theirs_none:Net"], (None, folder, str(folder)))
    with pytest.raises(ConfigError, match=r"named 'theirs_none'; put theirs_none\.py there, or set data\.root to its"):
        load_named("theirs_none:Net", setting="model.name", folder=folder)
    assert "theirs_a" not in sys.modules


@every("at", [".", "..", "theirs_b.py"], ids=["the folder", "the one above", "a module in it"])
def test_a_folder_that_others_can_write_is_not_searched(folder: Path, at: str) -> None:
    place = (folder / at).resolve()
    mode = place.stat().st_mode
    place.chmod(0o777)
    with pytest.raises(ConfigError, match=r"folder of your modules .* can be written by other users \(mode 0777\)"):
        load_named("theirs_a:Net", setting="model.name", folder=folder)
    assert str(folder) not in sys.path and "theirs_a" not in sys.modules
    place.chmod(mode)


# ---- plugs of registries ----


REGISTRIES: tuple[dict[str, Plug[Any, Any]], ...] = (FORMATS, FORMS, SOURCES, MODELS, LOSSES, METRICS)


@every(("name", "plug"), [item for registry in REGISTRIES for item in registry.items()])
def test_a_plug_has_its_name_its_code_and_its_kernels(name: str, plug: Plug[Any, Any]) -> None:
    assert plug.name == name and callable(plug.load())
    assert all(importlib.util.find_spec(module) is not None for module in plug.kernels)
