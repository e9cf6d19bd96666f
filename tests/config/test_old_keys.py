"""Old names of settings: refused where a user writes them, read where an earlier version stored them.

`golden/run` and `golden/out` are a run folder and an export of a version that wrote every old name.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import shardkeep
from shardkeep.base.config.old_keys import KEYS, ZEROS, under_new_names
from shardkeep.base.errors import ConfigError
from shardkeep.base.yaml_text import read_yaml, write_yaml
from shardkeep.cli.main import app
from shardkeep.config import JobConfig, parse_config, stored_config
from shardkeep.config.overrides import merged
from shardkeep.page.state import changed_settings
from shardkeep.ps.config import TableSpec
from tests.support.cases import every

GOLDEN = Path(__file__).parent / "golden"


def nested(key: str, value: Any) -> Any:
    for part in reversed(key.replace("*", "user").split(".")):
        value = {part: value}
    return value


def lines_of(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        parse_config(text, overrides, origin="job.yaml")
    return str(refused.value).splitlines()


@every(
    ("old", "said"),
    [
        *((old, f"is now {new}") for old, new in KEYS.items()),
        *((key, f"0 is now {word}") for key, word in ZEROS.items()),
    ],
)
def test_an_old_key_or_zero_is_refused_in_one_line_that_names_the_new_one(old: str, said: str) -> None:
    key, value = old.replace("*", "user"), 0 if said.startswith("0") else "x"
    line = f"{key}: {said.replace('*', 'user')}"
    assert lines_of(write_yaml(nested(key, value))) == [f"job.yaml: {line}"]
    assert lines_of("name: a", f"{key}={value}") == [f"--set {key}={value}: {line}"]
    if value:
        with pytest.raises(ValueError, match="is now"):
            JobConfig.model_validate(nested(key, value))


def test_every_old_key_of_a_config_is_named_at_once_also_in_python() -> None:
    text = "tables: {user: {rows: fp16}, item: {rows: int8, state: bf16}}"
    keys = ["tables.user.rows", "tables.item.rows", "tables.item.state"]
    assert [line.split(": ")[1] for line in lines_of(text)] == keys
    with pytest.raises(ValueError, match=r"rows\n  is now tables.user.dtype"):
        TableSpec(name="user", rows="fp16")  # type: ignore[call-arg]


@every(("key", "word"), ZEROS.items())
def test_a_word_is_read_where_a_zero_was_stored(key: str, word: str, tmp_path: Path) -> None:
    more = {"pool_rows": 9, "keep_values": 0.5} if "dgc" in key else {"pool_rows": 9}
    text = write_yaml(nested(key, 0) if "push" not in key else merged({"compression": {"push": more}}, nested(key, 0)))
    (tmp_path / "config.yaml").write_text(text + "tables: {default: {optimizer: sgd}}\n")
    assert f"{key.rpartition('.')[2]}: {'' if word == 'epoch' else chr(39)}{word}" in stored_config(tmp_path).to_yaml()


def test_a_stored_config_of_before_is_read_as_what_it_meant() -> None:
    config = stored_config(GOLDEN / "run")
    assert (config.launch.start, config.web.page, config.web.metrics) == ("spawn", "off", "off")
    assert (config.recovery.journal, config.recovery.restarts, config.profile.steps) == ("off", 0, "off")
    assert (config.tables["default"].dtype, config.tables["default"].state_dtype) == ("bf16", "bf16")
    again = parse_config(config.to_yaml())
    assert again == config.model_copy(update={"data": again.data})


@every("damage", ["web: 5", "recovery: [1]"])
def test_a_damaged_stored_config_of_before_is_refused_and_gives_no_raw_error(damage: str, tmp_path: Path) -> None:
    raw = read_yaml((GOLDEN / "run" / "config.yaml").read_text()) | read_yaml(damage)
    (tmp_path / "config.yaml").write_text(write_yaml(raw))
    with pytest.raises(ConfigError):
        stored_config(tmp_path)


def test_a_stored_config_takes_new_keys_alone_by_set() -> None:
    assert stored_config(GOLDEN / "run", ["tables.default.dtype=fp16"]).tables["default"].dtype == "fp16"
    with pytest.raises(ConfigError, match=r"--set tables.default.rows=fp16: tables.default.rows: is now"):
        stored_config(GOLDEN / "run", ["tables.default.rows=fp16"])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "run", tmp_path / "run"))


def done(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_each_command_reads_a_run_folder_of_before(run: Path, tmp_path: Path) -> None:
    assert "bf16" in done("tables", str(run), "--table", "C1")
    assert "completed" in done("status", str(run))
    done("report", str(run), "--html", str(tmp_path / "report.html"))
    assert "tables.default.dtype" in str(
        changed_settings(under_new_names(read_yaml((run / "config.yaml").read_text())))
    )
    done("evaluate", str(run))
    done("export", str(run), str(tmp_path / "out"))
    frame = {"I1": [0.5, -1.0], "I2": [0.1, 2.0], "C1": [1, 2], "C2": [3, 4]}
    read = [shardkeep.load(folder) for folder in (run, tmp_path / "out", GOLDEN / "out")]
    assert [predictor.step for predictor in read[:2]] == [8, 8]
    first, *others = (predictor.predict(frame).tolist() for predictor in read)
    assert others == [first, first]


def test_a_run_of_before_is_resumed_and_begun_from(run: Path, tmp_path: Path) -> None:
    done("train", "--resume", str(run), "--set", "train.epochs=2", "--set", "servers=0")
    assert "dtype: bf16" in (run / "config.yaml").read_text()
    job = tmp_path / "job.yaml"
    job.write_text(stored_config(run).to_yaml())  # with 0 servers: no process is spawned
    done("train", str(job), "--from", str(GOLDEN / "run"), "--run-dir", str(tmp_path / "next"))


def test_golden_configs_have_every_old_name() -> None:
    raw = read_yaml((GOLDEN / "run" / "config.yaml").read_text())
    for key in KEYS:
        node = raw
        for part in key.replace("*", "default").split("."):
            assert part in node, key
            node = node[part]
