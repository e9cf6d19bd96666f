"""The command line: what a user sees of it, its errors and exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from shardkeep.base.files import atomic_write
from shardkeep.base.yaml_text import write_yaml
from shardkeep.trust.endpoint import make_token
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.cluster import Cluster
from tests.support.invoked import invoke

OPTIMIZERS = "adagrad, adam, ftrl, lamb, lars_sgd, partial_rowwise_adam, rowwise_adagrad or sgd"
UNKNOWN = "train.batch_sise: unknown key; did you mean batch_size?"


@every(
    ("text", "settings", "lines"),
    [
        (None, [], ["FILE: cannot be read (No such file or directory)"]),
        ("seed: 1", ["train.batch_sise=2"], [f"--set train.batch_sise=2: {UNKNOWN}"]),
        ("train: {batch_sise: 2}", [], [f"FILE: {UNKNOWN}"]),
        (
            "servers: two\ndata: {sparse: 7}\nseed: 1",
            ["tables.default.optimizer=adom"],
            [
                "FILE: servers: 'two' is not allowed; allowed: a whole number from 0 to 1,024",
                "FILE: data.sparse: 7 is not allowed; allowed: a list",
                "--set tables.default.optimizer=adom: tables.default.optimizer.name: 'adom' is not allowed; "
                f"allowed: {OPTIMIZERS}; did you mean adam?",
            ],
        ),
        *((text, [], ["...data: {train: [clicks.csv], label: clicked..."]) for text in ("", "data: {}", "data:")),
        ("data: {source: csv, train: [absent.csv], label: y, sparse: [c]}", [], ["...absent.csv..."]),
        (
            "tables: {City: {dim: 8}}\ndata: {synthetic: {train_samples: 100}}",
            [],
            ["tables.City: no feature uses this table; the tables are ..."],
        ),
    ],
)
def test_all_that_is_wrong_with_a_job_is_told_line_by_line_and_leaves_no_run_folder(
    tmp_path: Path, text: str | None, settings: list[str], lines: list[str]
) -> None:
    file, run = tmp_path / "job.yaml", tmp_path / "run"
    if text is not None:
        file.write_text(f"{text}\n")
    changes = [word for setting in settings for word in ("--set", setting)]
    code, out, error = invoke("train", str(file), "--run-dir", str(run), *changes)
    assert (code, out) == (2, "") and not run.exists()
    for line, expected in zip(error.splitlines(), lines, strict=True):
        pattern = re.escape(f"error: {expected}".replace("FILE", str(file))).replace(r"\.\.\.", ".*")
        assert re.fullmatch(pattern, line)


@every(("sparse", "tables"), [("[user, {column: site, table: place}]", "user, place"), ('["*"]', "user, site")])
@every("suffix", ["csv", "parquet"])
def test_a_table_that_no_feature_uses_is_found_before_a_row_is_read(
    tmp_path: Path, suffix: str, sparse: str, tables: str
) -> None:
    frame = pa.table({"click": ["neither 0 nor 1"], "user": ["a"], "site": ["b"]})  # converting it would be an error
    pq.write_table(frame, tmp_path / "a.parquet")
    pacsv.write_csv(frame, tmp_path / "a.csv")
    data = f"data: {{train: [a.{suffix}], label: click, sparse: {sparse}}}"
    (tmp_path / "job.yaml").write_text(f"tables: {{usr: {{dim: 8}}}}\n{data}\n")
    code, _, error = invoke("train", str(tmp_path / "job.yaml"), "--run-dir", str(tmp_path / "run"))
    assert (code, error) == (2, f"error: tables.usr: no feature uses this table; the tables are {tables}\n")
    assert not (tmp_path / ".shardkeep-cache").exists()


@every("arguments", [["train"], ["nonsense"], ["server", "--index", "0"], ["worker", "--index", "-1"]], ids=" ".join)
def test_wrong_use_of_a_command_is_code_2(arguments: list[str]) -> None:
    assert invoke(*arguments)[0] == 2


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


def test_status_of_a_coordinator_that_is_not_there_is_one_line_and_code_1(tmp_path: Path) -> None:
    atomic_write(tmp_path / "token", make_token(), private=True)
    code, _, error = invoke("status", "--coordinator", "127.0.0.1:1", "--token-file", str(tmp_path / "token"))
    assert code == 1
    assert "127.0.0.1:1" in error and error.count("\n") == 1


NO_FULL_DEVICE = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")


@NO_FULL_DEVICE
@pytest.mark.waits_for_processes
@every("form", ["text", "json"])
def test_a_job_whose_output_is_on_a_full_device_is_completed(tmp_path: Path, cluster: Cluster, form: str) -> None:
    csv = write_csv(tmp_path / "train.csv", click_rows(200))
    (tmp_path / "job.yaml").write_text(write_yaml(click_job(csv)))
    words = ["train", str(tmp_path / "job.yaml"), "--run-dir", str(tmp_path / "run"), "--log-format", form]
    assert cluster.command(*words, main="tests.support.full_output:main").end().code == 0
    assert '"completed"' in (tmp_path / "run" / "summary.json").read_text()


@NO_FULL_DEVICE
@every("arguments", [["--version"], ["config", "--help"]], ids=" ".join)
def test_output_on_a_full_device_is_one_line(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "shardkeep", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    why = "standard output cannot be written (No space left on device); free space there, or use another disk"
    assert (done.returncode, done.stderr) == (1, f"error: {why}\n")
