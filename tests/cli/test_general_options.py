"""Options before the command, the resolved config, completion, and the index that a launcher gives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import shardkeep
from shardkeep.cli.main import GROUPS, app
from shardkeep.config import load_config
from shardkeep.launch.machine import PROCESSES
from tests.support.cases import every
from tests.support.import_path import IMPORT_PATH

ROOT = Path(__file__).resolve().parents[2]


def invoke(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


def test_the_version_is_an_option_too() -> None:
    assert invoke("--version") == (0, f"{shardkeep.__version__}\n", "")


@every("arguments", [("--debug", "status", "/nowhere"), ("status", "/nowhere", "--debug")], ids=["before", "after"])
def test_debug_shows_a_traceback_before_and_after_the_command(arguments: tuple[str, ...]) -> None:
    code, _, error = invoke(*arguments)
    assert code == 2 and "Traceback" in error and error.endswith("error: /nowhere: there is no such folder\n")


def test_without_debug_an_error_is_one_line() -> None:
    assert invoke("status", "/nowhere") == (2, "", "error: /nowhere: there is no such folder\n")


def test_the_resolved_config_loads_to_the_same_job(tmp_path: Path) -> None:
    code, text, _ = invoke("config", str(ROOT / "examples" / "adult.yaml"), "--set", "train.epochs=7")
    (tmp_path / "resolved.yaml").write_text(text, encoding="utf-8")
    assert code == 0
    given = load_config(ROOT / "examples" / "adult.yaml", ["train.epochs=7"])
    assert load_config(tmp_path / "resolved.yaml") == given and given.train.epochs == 7


def test_a_config_that_is_wrong_is_one_line_and_exit_code_2() -> None:
    code, out, error = invoke("config", "demo", "--set", "train.batchsize=3")
    assert (code, out) == (2, "") and "did you mean batch_size" in error and len(error.splitlines()) == 1


def test_checking_a_config_loads_no_torch() -> None:
    probe = (
        "import sys\nfrom typer.testing import CliRunner\nfrom shardkeep.cli.main import app\n"
        "assert CliRunner().invoke(app, ['config', 'demo']).exit_code == 0\n"
        "assert not {'torch', 'numba', 'grpc'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_without_an_index_and_a_launcher_the_command_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROCESSES:
        monkeypatch.delenv(name, raising=False)
    code, _, error = invoke("server", "--coordinator", "127.0.0.1:1")
    assert code == 2 and "no index: give it" in error


def completions(words: str, folder: Path) -> list[str]:
    """What bash is offered for the last word."""
    environment = os.environ | {
        "_SHARDKEEP_COMPLETE": "complete_bash",
        "COMP_WORDS": f"shardkeep {words}",
        "COMP_CWORD": str(len(words.split(" "))),
    }
    command = [sys.executable, "-c", "from shardkeep.cli.main import main; main()"]
    done = subprocess.run(
        command, cwd=folder, env=environment | {"PYTHONPATH": IMPORT_PATH}, capture_output=True, text=True, timeout=60
    )
    return done.stdout.split()


@every(
    ("words", "offered"),
    [
        ("stat", ["status"]),
        ("train cl", ["clicks.yaml"]),
        ("status ", ["runs/first"]),
        ("train --resume r", ["runs/first"]),
        ("estimate sub/", ["sub/more.yaml"]),
    ],
    ids=["command", "config", "run", "resume", "folder"],
)
def test_the_shell_completes_commands_files_and_runs(words: str, offered: list[str], tmp_path: Path) -> None:
    for name in ("clicks.yaml", "runs/first/config.yaml", "sub/more.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert completions(words, tmp_path) == offered


def test_commands_are_listed_by_group_and_each_once() -> None:
    text = invoke("--help")[1]
    titles = [line for line in text.splitlines() if re.fullmatch(r"[A-Z].*:", line)]
    assert titles == ["Options:", *(f"{group}:" for group in GROUPS)]
    commands: Any = typer.main.get_command(app)
    for name, command in commands.commands.items():
        assert text.count(f"\n  {name} ") == (not command.hidden), name
    assert text.index("A trained model:") < text.index("\n  tables ") < text.index("Before and beside")


def test_no_help_has_doubled_brackets() -> None:
    commands: Any = typer.main.get_command(app)
    for name, command in commands.commands.items():
        for words in [[name], *([name, each] for each in getattr(command, "commands", ()))]:
            code, text, _ = invoke(*words, "--help")
            assert code == 0 and not re.search(r"\[\[|\]\]|\.\.\.\]?\.\.\.|\{\{", text), text


def test_tables_shows_a_run_and_its_other_commands_have_names() -> None:
    shown = invoke("tables", "/nowhere")
    assert shown == invoke("tables", "show", "/nowhere") and shown[0] == 2 and "/nowhere" in shown[2]
    assert invoke("tables", "--top", "3", "/nowhere") == shown
    assert "Missing argument 'RUN'" in invoke("tables")[2]
    assert "Missing option '--table'" in invoke("tables", "export", "/nowhere")[2]
    code, _, error = invoke("--debug", "tables", "export", "/nowhere", "--table", "user")
    assert code == 2 and "Traceback" in error
