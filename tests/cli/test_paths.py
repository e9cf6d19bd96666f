"""Whose folder a path starts at: the shell's on the command line, the file's in a file. `~` is the home folder."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

import shardkeep
from shardkeep.base.errors import ConfigError, ShardkeepError
from shardkeep.base.settings import FilePath
from shardkeep.cli.main import app
from shardkeep.config import JobConfig, load_config
from shardkeep.config.paths import anchored
from shardkeep.experiments.plan import load_sweep
from shardkeep.run.reader import RunReader
from shardkeep.workers.data.sources.registry import open_data
from tests.support.cases import every

SETTINGS = ("data.root", "data.train", "data.eval", "data.test", "data.cache", "checkpoint.dir")
ROW_FILE = "tables.init.path"
"""In the entry of each table."""
DATA = {"source": "csv", "label": "y", "dense": ["x"]}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `files` for configs, `home`, and `shell`, the current folder. Its name looks like a pattern."""
    places = tmp_path.resolve() / "run[1]"
    for name in ("files", "home", "shell"):
        (places / name).mkdir(parents=True)
    monkeypatch.chdir(places / "shell")
    monkeypatch.setenv("HOME", str(places / "home"))
    return places


def job(places: Path, **groups: Any) -> Path:
    path = places / "files" / "job.yaml"
    path.write_text(yaml.safe_dump({"data": {"train": ["a.csv"], **DATA, **groups.pop("data", {})}, **groups}))
    return path


def value(config: JobConfig, setting: str) -> Any:
    group, key = setting.split(".")
    return getattr(getattr(config, group), key)


def settings_of_paths(model: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        marks = [*field.metadata, *(m for kind in kinds for m in getattr(kind, "__metadata__", ()))]
        if any(m in marks for m in FilePath.__metadata__):
            yield f"{above}{name}"
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from settings_of_paths(kind, f"{above}{name}.")


def test_the_cases_are_all_settings_that_hold_paths() -> None:
    assert sorted(settings_of_paths(JobConfig)) == sorted([*SETTINGS, ROW_FILE])


@every("address", ["s3://bucket/it", "hf://datasets/me/it", "file:///it", "https://host/it"])
@every("setting", [*SETTINGS, ROW_FILE])
def test_an_address_is_refused_for_every_path(setting: str, address: str, places: Path) -> None:
    *above, key = setting.replace("tables.", "tables.t.").split(".")
    group: Any = {key: address} | ({"name": "file"} if "init" in above else {})
    for name in reversed(above):
        group = {name: group}
    for text, overrides in (
        (yaml.safe_dump(group), []),
        ("{}", [f"{setting.replace('tables.', 'tables.t.')}={address}"]),
    ):
        file = places / "files" / "address.yaml"
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"{re.escape(address)} is an address"):
            load_config(file, overrides)
    for opened in (RunReader, load_config, shardkeep.load, shardkeep.init, partial(shardkeep.connect, index=0)):
        with pytest.raises(ShardkeepError, match="is an address"):
            opened(address)
    assert not list((places / "shell").iterdir())


@every("whole_group", [False, True], ids=["by key", "in its group"])
@every(
    ("path", "expected"),
    [("below/it", "shell/below/it"), ("../it", "it"), ("~/it", "home/it"), ("/else/it", "/else/it")],
)
@every("setting", SETTINGS)
def test_a_path_in_set_starts_at_the_shells_folder(
    setting: str, path: str, expected: str, whole_group: bool, places: Path
) -> None:
    group, name = setting.split(".")
    file = job(places, data={"root": "../data"}, checkpoint={"dir": "kept"})
    others = {"train": ["a.csv"], **DATA} if group == "data" else {}
    override = f"{group}={json.dumps({**others, name: path})}" if whole_group else f"{setting}={path}"
    found = value(load_config(file, [override]), setting)
    whole = str(places / expected)
    assert found == ([whole] if setting in ("data.train", "data.eval", "data.test") else whole)


@every(
    ("setting", "expected"),
    [
        ("data.root", "files/it"),
        ("data.train", ["it"]),
        ("data.eval", ["it"]),
        ("data.cache", "it"),
        ("checkpoint.dir", "files/it"),
    ],
)
def test_a_path_in_a_file_starts_at_the_files_folder_or_at_data_root(setting: str, expected: Any, places: Path) -> None:
    group, name = setting.split(".")
    path = job(places, **{group: {name: "it"}})
    found = value(load_config(path), setting)
    assert found == (str(places / expected) if "files" in expected else expected)
    raw = JobConfig.model_validate(yaml.safe_load(path.read_text()))
    assert value(anchored(raw, path.parent, JobConfig), setting) == found  # a config that a program has made


@every(
    ("override", "expected"),
    [
        ([], "files/rows.npy"),
        (["tables.user.init.path=other.npy"], "shell/other.npy"),
        (["tables.user.init={name: file, path: ~/other.npy}"], "home/other.npy"),
        (["tables={user: {init: {name: file, path: ../other.npy}}}"], "other.npy"),
    ],
)
def test_a_row_file_starts_at_the_files_folder_and_in_set_at_the_shells(
    override: list[str], expected: str, places: Path
) -> None:
    file = job(places, tables={"user": {"init": {"name": "file", "path": "rows.npy"}}})
    init = load_config(file, override).tables["user"].init
    assert init is not None and init.path == str(places / expected)


@every("entry", ["day-*.csv", "../shell/day-?.csv", "[day-1.csv, day-2.csv]", "~/days", "../shell"])
def test_data_files_of_the_command_line_are_read_from_the_shells_folder(entry: str, places: Path) -> None:
    for folder in (places / "shell", places / "home" / "days"):
        folder.mkdir(exist_ok=True)
        for number in (1, 2):
            (folder / f"day-{number}.csv").write_text("x,y\n1,0\n2,1\n")
    config = load_config(job(places, data={"root": "../nowhere"}), [f"data.train={entry}", "data.cache=../converted"])
    assert len(open_data(config.data, seed=1).train) == 4
    shutil.rmtree(places / "converted")
    of_file = load_config(job(places, data={"root": str(places / "shell"), "train": ["day-*.csv"]}))
    assert len(open_data(of_file.data, seed=1).train) == 4


def test_what_a_link_of_the_command_line_is_called_says_what_it_holds_and_a_home_that_nobody_has_is_one_line(
    places: Path,
) -> None:
    (places / "blob").write_text("x,y\n1,0\n2,1\n")
    Path("day.csv").symlink_to(places / "blob")
    assert load_config(job(places), ["data.train=day.csv"]).data.train == [str(places / "shell" / "day.csv")]
    with pytest.raises(ConfigError, match=r"^--set data\.train=~nobodyx/a: .*there is no home folder of nobodyx$"):
        load_config(job(places), ["data.train=~nobodyx/a"])
    done = CliRunner().invoke(app, ["train", "~nobodyx/job.yaml"])
    assert done.exit_code == 2 and "~nobodyx/job.yaml: " in done.stderr


@every("where", ["settings", "recipes"])
def test_a_folder_in_a_sweep_file_starts_at_that_file(where: str, places: Path) -> None:
    job(places)
    changes: dict[str, Any] = {
        "settings": {"settings": {"data.root": "../days"}, "recipes": ["balanced"]},
        "recipes": {"recipes": [{"name": "mine", "settings": {"data.root": "../days"}}]},
    }
    (places / "sweeps").mkdir(exist_ok=True)
    (places / "sweeps" / "s.yaml").write_text(
        yaml.safe_dump({"base": "../files/job.yaml", "seeds": [1], **changes[where]})
    )
    runs = load_sweep(Path("../sweeps/s.yaml")).trials
    assert runs[-1].config.data.root == str(places / "days")
    assert runs[0].config.data.root == str(places / ("days" if where == "settings" else "files"))


# ---- options ----


@every(
    ("words", "text"),
    [
        (["train", "{path}"], "{path}: cannot be read"),
        (["coordinator", "{job}", "--take-over", "--run-dir", "{path}"], "in --run-dir {path}"),
        (["coordinator", "{job}", "--tls", "{path}"], "{path}/ca.pem: cannot be read"),
        (["status", "--coordinator", "{path}"], "{path}: there is no such folder"),
    ],
)
def test_the_folder_of_an_option_is_the_shells_or_home(words: list[str], text: str, places: Path) -> None:
    for given, shown in (("../none/x", "../none/x"), ("~/none/x", f"{places}/home/none/x")):
        done = CliRunner().invoke(app, [word.format(path=given, job=job(places)) for word in words])
        assert done.exit_code in (1, 2) and text.format(path=shown) in done.stderr, done.stderr


def test_certificates_are_made_below_the_shells_folder(places: Path) -> None:
    assert CliRunner().invoke(app, ["certs", "../kept"]).exit_code == 0
    assert (places / "kept" / "ca" / "ca.pem").is_file()


def paths_of_commands() -> Iterator[tuple[str, Any]]:
    """Every argument and option that takes a path, and what reads it."""
    groups = [group.typer_instance for group in app.registered_groups]
    for command in [each for one in (app, *groups) if one is not None for each in one.registered_commands]:
        for name, parameter in inspect.signature(command.callback, eval_str=True).parameters.items():  # type: ignore[arg-type]
            kind, *marks = get_args(parameter.annotation) or [None]
            if kind is Path or Path in get_args(kind) or name == "coordinator":
                yield f"{command.callback.__name__} {name}", marks[0].parser  # type: ignore[union-attr]


@every(("name", "read"), list(paths_of_commands()), ids=lambda value: value if isinstance(value, str) else "")
def test_every_path_of_every_command_may_begin_with_home(name: str, read: Any, places: Path) -> None:
    assert read is not None, f"{name} has no parser for ~"
    assert str(read("~/it")) == f"{places}/home/it"
    assert str(read("it:1")) == "it:1"
    with pytest.raises(typer.Exit) as end:
        read("s3://bucket/it")
    assert end.value.exit_code == 2
