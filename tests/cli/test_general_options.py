"""Options before the command, the resolved config, completion, and the index that a launcher gives."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from shardkeep.cli.main import GROUPS, app
from shardkeep.cli.options import code_folder, load
from shardkeep.config import load_config
from shardkeep.launch.machine import PROCESSES
from tests.support.cases import every
from tests.support.import_path import ROOT
from tests.support.invoked import invoke


def test_the_version_is_the_packages() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert invoke("--version") == (0, f"{version}\n", "")


def test_an_error_is_one_line_and_a_traceback_with_debug_before_or_after_the_command() -> None:
    assert invoke("status", "/nowhere") == (2, "", "error: /nowhere: there is no such folder\n")
    for arguments in (("--debug", "status", "/nowhere"), ("status", "/nowhere", "--debug")):
        code, _, error = invoke(*arguments)
        assert code == 2 and "Traceback" in error and error.endswith("error: /nowhere: there is no such folder\n")


def test_the_resolved_config_loads_to_the_same_job(tmp_path: Path) -> None:
    code, text, _ = invoke("config", str(ROOT / "examples" / "adult.yaml"), "--set", "train.epochs=7")
    (tmp_path / "resolved.yaml").write_text(text, encoding="utf-8")
    assert code == 0
    given = load_config(ROOT / "examples" / "adult.yaml", ["train.epochs=7"])
    assert load_config(tmp_path / "resolved.yaml") == given and given.train.epochs == 7


def test_checking_a_config_that_is_wrong_or_right_loads_no_torch() -> None:
    probe = (
        "import sys\nfrom typer.testing import CliRunner\nfrom shardkeep.cli.main import app\n"
        "done = CliRunner().invoke(app, ['config', 'demo', '--set', 'train.batchsize=3'])\n"
        "assert (done.exit_code, done.stdout) == (2, '') and len(done.stderr.splitlines()) == 1\n"
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


@every(
    ("words", "offered"),
    [
        ("stat", ["status"]),
        ("train cl", ["clicks.yaml"]),
        ("status ", ["runs/first"]),
        ("train --resume r", ["runs/first"]),
        ("estimate sub/", ["sub/more.yaml"]),
    ],
)
def test_the_shell_completes_commands_files_and_runs(
    words: str,
    offered: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("clicks.yaml", "runs/first/config.yaml", "sub/more.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("_SHARDKEEP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"shardkeep {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" "))))
    with pytest.raises(SystemExit):
        app(prog_name="shardkeep")
    assert capsys.readouterr().out.split() == offered


def test_commands_are_listed_by_group_and_each_once_and_no_help_has_doubled_brackets() -> None:
    text = invoke("--help")[1]
    titles = [line for line in text.splitlines() if re.fullmatch(r"[A-Z].*:", line)]
    assert titles == ["Options:", *(f"{group}:" for group in GROUPS)]
    assert text.index("A trained model:") < text.index("\n  tables ") < text.index("Before and beside")
    commands: Any = typer.main.get_command(app)
    for name, command in commands.commands.items():
        assert text.count(f"\n  {name} ") == (not command.hidden), name
        for words in [[name], *([name, each] for each in getattr(command, "commands", ()))]:
            code, shown, _ = invoke(*words, "--help")
            assert code == 0 and not re.search(r"\[\[|\]\]|\.\.\.\]?\.\.\.|\{\{", shown), shown


def test_tables_shows_a_run_and_its_other_commands_have_names() -> None:
    shown = invoke("tables", "/nowhere")
    assert shown == invoke("tables", "show", "/nowhere") and shown[0] == 2 and "/nowhere" in shown[2]
    assert invoke("tables", "--top", "3", "/nowhere") == shown
    assert "Missing argument 'RUN'" in invoke("tables")[2]
    assert "Missing option '--table'" in invoke("tables", "export", "/nowhere")[2]
    code, _, error = invoke("--debug", "tables", "export", "/nowhere", "--table", "user")
    assert code == 2 and "Traceback" in error


def test_own_modules_are_searched_beside_the_config_and_for_the_built_in_job_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_folder(Path("demo"), load(Path("demo"), None)[0]) == tmp_path
    assert code_folder(Path("jobs/mine.yaml"), Path("jobs/mine.yaml")) == tmp_path / "jobs"
