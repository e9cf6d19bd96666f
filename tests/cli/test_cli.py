"""The command line: what a user sees of it, its errors and exit codes."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from typer.testing import CliRunner

from shardkeep.base.files import atomic_write
from shardkeep.base.yaml_text import write_yaml
from shardkeep.cli.main import app
from shardkeep.trust.endpoint import make_token
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.cluster import Cluster

ROOT = Path(__file__).resolve().parent.parent.parent


def invoke(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


def test_help_names_every_command() -> None:
    code, out, _ = invoke("--help")
    assert code == 0
    for command in ("train", "coordinator", "server", "worker", "status", "certs", "estimate", "sweep", "version"):
        assert f"\n  {command} " in out


def test_the_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert invoke("version") == (0, f"{project['version']}\n", "")


def test_importing_the_package_or_asking_for_help_loads_nothing_heavy() -> None:
    probe = (
        "import sys, shardkeep, shardkeep.cli.main\n"
        "heavy = {'torch', 'numba', 'grpc', 'pyarrow', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_take_over_without_what_the_coordinator_kept_says_what_to_do(tmp_path: Path) -> None:
    config, run = tmp_path / "job.yaml", tmp_path / "run"
    config.write_text("name: job\n")
    options = ("coordinator", str(config), "--run-dir", str(run), "--take-over")
    code, _, error = invoke(*options)
    assert (code, error) == (2, f"error: --take-over: no job was running in --run-dir {run}\n")
    run.mkdir()
    (run / "coordinator.json").write_text('{"address": "127.0.0.1:1", "pid": 1}')
    (run / "standing.json").touch()
    code, _, error = invoke(*options)
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith(
        f"error: --take-over: no coordinator can take over, for its members are known to nobody: {run}"
    )
    assert error.endswith("standing.json is empty; --continue in its place resumes from the newest checkpoint\n")


def test_a_missing_config_is_one_line_and_code_2(tmp_path: Path) -> None:
    code, out, error = invoke("train", str(tmp_path / "job.yaml"))
    assert (code, out) == (2, "")
    assert error == f"error: {tmp_path}/job.yaml: cannot be read (No such file or directory)\n"


def test_a_wrong_setting_is_one_line_and_code_2(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("seed: 1\n")
    code, _, error = invoke("train", str(tmp_path / "job.yaml"), "--set", "train.batch_sise=2")
    assert code == 2
    assert error == "error: --set train.batch_sise=2: train.batch_sise: unknown key; did you mean batch_size?\n"
    (tmp_path / "job.yaml").write_text("train: {batch_sise: 2}\n")
    code, _, error = invoke("train", str(tmp_path / "job.yaml"))
    assert code == 2
    assert error == f"error: {tmp_path}/job.yaml: train.batch_sise: unknown key; did you mean batch_size?\n"


def test_all_that_is_wrong_with_a_file_and_the_settings_is_told_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("servers: two\ndata: {sparse: 7}\nseed: 1\n")
    code, out, error = invoke("train", str(tmp_path / "job.yaml"), "--set", "tables.default.optimizer=adom")
    assert (code, out) == (2, "")
    assert error.splitlines() == [
        f"error: {tmp_path}/job.yaml: servers: 'two' is not allowed; allowed: a whole number from 0 to 1,024",
        f"error: {tmp_path}/job.yaml: data.sparse: 7 is not allowed; allowed: a list",
        "error: --set tables.default.optimizer=adom: tables.default.optimizer.name: 'adom' is not allowed; "
        "allowed: adadelta, adagrad, adam, ftrl, lamb, lars_sgd, partial_rowwise_adam, rmsprop, rowwise_adagrad or "
        "sgd; did you mean adam?",
    ]


@every("text", ["", "seed: 1\n", "data: {}\n", "data:\n"], ids=["empty", "other", "braces", "null"])
@every("command", ["train", "estimate"])
def test_a_config_without_data_starts_nothing(tmp_path: Path, command: str, text: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    code, out, error = invoke(command, str(tmp_path / "job.yaml"))
    assert (code, out) == (2, "")
    assert "data" in error and "data: {train: [clicks.csv], label: clicked" in error and error.count("\n") == 1


def test_a_folder_of_another_run_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data: {source: synthetic}\n")
    code, _, error = invoke("train", str(tmp_path / "config.yaml"), "--run-dir", str(tmp_path))
    assert code == 2
    resume = f"or resume the run there by `shardkeep train --resume {tmp_path}`"
    assert error == f"error: --run-dir {tmp_path}: holds a run already; choose another folder, {resume}\n"


def test_missing_data_is_one_line_and_code_2_and_leaves_no_run_folder(tmp_path: Path) -> None:
    text = "data: {source: csv, train: [absent.csv], label: y, sparse: [c]}\n"
    (tmp_path / "job.yaml").write_text(text)
    code, _, error = invoke("train", str(tmp_path / "job.yaml"), "--run-dir", str(tmp_path / "run"))
    assert code == 2
    assert error.startswith("error: ")
    assert "absent.csv" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_table_that_no_feature_uses_leaves_no_run_folder_either(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("tables: {City: {dim: 8}}\ndata: {synthetic: {train_samples: 100}}\n")
    code, _, error = invoke("train", str(tmp_path / "job.yaml"), "--run-dir", str(tmp_path / "run"))
    assert code == 2 and not (tmp_path / "run").exists()
    assert (
        error.startswith("error: tables.City: no feature uses this table; the tables are ") and error.count("\n") == 1
    )


@every("sparse", ["[user, {column: site, table: place}]", '["*"]'], ids=["named", "pattern"])
@every("suffix", ["csv", "parquet"])
def test_a_table_that_no_feature_uses_is_found_before_a_row_is_read(tmp_path: Path, suffix: str, sparse: str) -> None:
    frame = pa.table({"click": ["neither 0 nor 1"], "user": ["a"], "site": ["b"]})  # converting it would be an error
    pq.write_table(frame, tmp_path / "a.parquet")
    pacsv.write_csv(frame, tmp_path / "a.csv")
    data = f"data: {{train: [a.{suffix}], label: click, sparse: {sparse}}}"
    (tmp_path / "job.yaml").write_text(f"tables: {{usr: {{dim: 8}}}}\n{data}\n")
    code, _, error = invoke("train", str(tmp_path / "job.yaml"), "--run-dir", str(tmp_path / "run"))
    tables = "user, site" if "*" in sparse else "user, place"
    assert (code, error) == (2, f"error: tables.usr: no feature uses this table; the tables are {tables}\n")
    assert not (tmp_path / ".shardkeep-cache").exists()


@every("arguments", [["train"], ["nonsense"], ["server", "--index", "0"], ["worker", "--index", "-1"]], ids=" ".join)
def test_wrong_use_of_a_command_is_code_2(arguments: list[str]) -> None:
    assert invoke(*arguments)[0] == 2


def test_a_traceback_shows_with_debug_only(tmp_path: Path) -> None:
    assert "Traceback" not in invoke("train", str(tmp_path / "no.yaml"))[2]
    assert "Traceback" in invoke("train", str(tmp_path / "no.yaml"), "--debug")[2]


def test_status_of_what_is_no_run_folder_is_code_2(tmp_path: Path) -> None:
    assert invoke("status", str(tmp_path))[0] == 2


def test_status_of_a_coordinator_that_is_not_there_is_one_line_and_code_1(tmp_path: Path) -> None:
    atomic_write(tmp_path / "token", make_token(), private=True)
    code, _, error = invoke("status", "--coordinator", "127.0.0.1:1", "--token-file", str(tmp_path / "token"))
    assert code == 1
    assert "127.0.0.1:1" in error
    assert error.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.waits_for_processes
@every("form", ["text", "json"])
def test_a_job_whose_output_is_on_a_full_device_is_completed(tmp_path: Path, cluster: Cluster, form: str) -> None:
    csv = write_csv(tmp_path / "train.csv", click_rows(200))
    (tmp_path / "job.yaml").write_text(write_yaml(click_job(csv)))
    words = ["train", str(tmp_path / "job.yaml"), "--run-dir", str(tmp_path / "run"), "--log-format", form]
    assert cluster.command(*words, main="tests.support.full_output:main").end().code == 0
    assert '"completed"' in (tmp_path / "run" / "summary.json").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@every("arguments", [["version"], ["config", "--help"]], ids=" ".join)
def test_output_on_a_full_device_is_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shardkeep", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert (
        done.stderr
        == "error: standard output cannot be written (No space left on device); free space there, or use another disk\n"
    )
