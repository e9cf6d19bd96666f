"""What a command says where the system refuses: one line with the path and the way out, never a traceback."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardkeep.base.system_errors import in_words
from shardkeep.base.yaml_text import write_yaml
from shardkeep.cli.main import app
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.cluster import Cluster
from tests.support.configs import TINY
from tests.support.import_path import IMPORT_PATH
from tests.support.refused_files import refusing
from tests.support.served_clicks import trained

NUMBERS = (errno.ENOSYS, errno.EIO, errno.EROFS, errno.ENOSPC, errno.EMFILE, errno.ENAMETOOLONG)
WAYS = ("local disk", "mount fails", "can be written", "free space", "ulimit -n", "shorter names")
COMMANDS = {
    "config": "config @/job.yaml",
    "train": "train @/job.yaml --run-dir @/new",
    "train --resume": "train --resume @/run",
    "train --from": "train @/job.yaml --from @/run --run-dir @/new",
    "estimate": "estimate @/job.yaml",
    "status": "status @/run",
    "stop": "stop @/run",
    "scale": "scale @/run --workers 2",
    "tables": "tables @/run",
    "tables export": "tables export @/run --table user --out @/rows.npy",
    "evaluate": "evaluate @/run",
    "init": "init @/clicks.csv --out @/new.yaml --force",
    "compare": "compare @/run @/run",
    "predict": "predict @/run --data @/clicks.csv --out @/scores.csv",
    "export": "export @/run @/out",
    "serve": "serve @/run --listen PORT --http off",
    "report": "report @/run --no-scores --html @/report.html",
    "sweep": "sweep @/sweep.yaml --out @/sweep",
    "certs": "certs @/tls",
    "view": "view @/run --listen PORT --token-file @/token",
    "cache": "cache @/job.yaml",
    "cache --clean": "cache @/job.yaml --clean --unused 0",
    "version": "version",
    "with": "with --servers 1 --run-dir @/new -- true",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("refused")
    trained(folder)
    csv = write_csv(folder / "clicks.csv", click_rows(200))
    (folder / "job.yaml").write_text(write_yaml(click_job(csv)))
    (folder / "sweep.yaml").write_text(write_yaml({"base": "job.yaml", "vary": {"seed": [1]}}))
    (folder / "token").write_text("0" * 64)
    (folder / "token").chmod(0o600)
    yield folder


@pytest.fixture
def taken() -> Iterator[str]:
    """An address that is taken, so that what would serve ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@every("number", range(len(COMMANDS)), ids=COMMANDS)
def test_a_refused_file_operation_is_one_line_with_a_path_and_the_way_out(
    folder: Path, taken: str, number: int
) -> None:
    """Each command meets two of the errors, each error several kinds of commands."""
    command = list(COMMANDS)[number]
    arguments = COMMANDS[command].replace("@", str(folder)).replace("PORT", taken).split()
    failed = 0
    for turn in range(len(NUMBERS)):
        kind = (number + turn) % len(NUMBERS)
        with refusing(folder, NUMBERS[kind], after=turn % 3) as refused:
            result = CliRunner().invoke(app, arguments)
        if refused.left >= 0 or os.strerror(NUMBERS[kind]) not in result.stderr:
            continue  # it came to no such operation, or needs none
        failed += 1
        assert isinstance(result.exception, SystemExit) and result.exit_code in (1, 2), result.exception
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert str(folder) in line and WAYS[kind] in line, line
        if failed == 2:
            break
    assert bool(failed) == (command != "version")  # which opens no file


@pytest.mark.waits_for_processes
@every(
    "role",
    [
        "coordinator @/run/config.yaml --set servers=1 --run-dir @/role",
        "server --coordinator @/run --index 0",
        "worker --coordinator @/run --index 0",
    ],
)
def test_a_role_says_the_same(folder: Path, cluster: Cluster, role: str) -> None:
    arguments = [str(folder), str(errno.ENOSYS), *role.replace("@", str(folder)).split()]
    ended = cluster.command(*arguments, main="tests.support.refused_files:main").end()
    *_, line = ended.err.splitlines()
    assert "Traceback" not in ended.err
    assert ended.code in (1, 2) and line.startswith(f"error: {folder}/") and line.endswith("on a local disk")


UNREADABLE = b"cut\xff"


def test_a_run_folder_whose_name_is_no_utf_8_is_refused_in_one_line(folder: Path) -> None:
    name = os.fsdecode(bytes(folder / "x") + UNREADABLE)
    result = CliRunner().invoke(app, ["train", str(folder / "job.yaml"), "--run-dir", name])
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert line == f"error: --run-dir {folder}/xcut\\udcff: cannot be written as utf-8; use another name"
    assert result.exit_code == 2 and not Path(name).exists()


@every("command", ["train --resume", "train --from", "evaluate", "tables"])
def test_a_run_in_a_folder_whose_name_is_no_utf_8_is_read_or_refused_in_one_line(folder: Path, command: str) -> None:
    run = Path(os.fsdecode(bytes(folder) + b"/" + UNREADABLE))
    if not run.exists():
        shutil.copytree(folder / "run", run)
    arguments = (
        COMMANDS[command].replace("@/run", str(run)).replace("@/new", "@/of-it").replace("@", str(folder)).split()
    )
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == (result.exit_code != 0) and all("cut" in line for line in lines), lines


def test_a_name_that_is_utf_8_is_refused_with_the_locale_to_set_where_the_locale_is_another(folder: Path) -> None:
    env = {**os.environ, "PYTHONPATH": IMPORT_PATH, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "shardkeep", "train", str(folder / "job.yaml"), "--run-dir", "läufe"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, timeout=120, check=False)
    (line,) = done.stderr.splitlines()
    assert line.startswith(b"error: --run-dir ") and line.endswith(
        b"cannot be written as utf-8; set LC_ALL=C.UTF-8: the name is utf-8, this locale is not"
    )
    assert done.returncode == 2


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("predict @/run --data {data} --out {data}.csv", marks=pytest.mark.chaos),
        "status @/{run}",
        pytest.param("train @/job.yaml --set data.train=@/d?.csv --run-dir @/of-d", marks=pytest.mark.chaos),
    ],
)
def test_names_that_are_no_utf_8_are_printed_where_the_terminal_takes_only_utf_8(folder: Path, command: str) -> None:
    data, run = (os.fsdecode(bytes(folder) + name) for name in (b"/d\xfe.csv", b"/run\xfe"))
    shutil.copy(folder / "clicks.csv", data)
    shutil.copytree(folder / "run", run, dirs_exist_ok=True)
    arguments = command.replace("@/{run}", run).replace("@", str(folder)).replace("{data}", data).split()
    env = {**os.environ, "PYTHONPATH": IMPORT_PATH, "PYTHONIOENCODING": "utf-8:strict"}
    call = [sys.executable, "-m", "shardkeep", *arguments]
    done = subprocess.run(call, env=env, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr


def test_a_text_file_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    def read(path: Path) -> str:
        return path.read_text(encoding="utf-8")

    (tmp_path / "token").write_bytes(b"ab\xff")
    with pytest.raises(UnicodeDecodeError) as raised:
        read(tmp_path / "token")
    assert in_words(raised.value) == f"{tmp_path}/token: byte 2 is not utf-8; write the file as UTF-8"


def test_a_thread_that_cannot_start_names_the_limit() -> None:
    assert in_words(RuntimeError("can't start new thread")).endswith(
        "; raise the limit of processes (ulimit -u, pids.max)"
    )


def test_an_error_of_a_connection_names_no_path(tmp_path: Path) -> None:
    def connect(_folder: Path) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    with pytest.raises(ConnectionRefusedError) as raised:
        connect(tmp_path)
    assert in_words(raised.value) == "Connection refused"


@pytest.mark.parametrize(
    ("servers", "more"),
    [
        pytest.param(0, (), marks=pytest.mark.chaos),
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(1, ("--log-format", "json"), marks=pytest.mark.chaos),
    ],
    ids=["one process", "processes", "JSON"],
)
def test_a_job_trains_with_all_standard_streams_closed(tmp_path: Path, servers: int, more: tuple[str, ...]) -> None:
    (tmp_path / "job.yaml").write_text(write_yaml({**TINY, "servers": servers, "workers": 1}))
    command = shlex.join([sys.executable, "-m", "shardkeep", "train", "job.yaml", "--run-dir", "run", *more])
    environment = {**os.environ, "PYTHONPATH": IMPORT_PATH, "OMP_NUM_THREADS": "1"}
    shell = ["sh", "-c", f"exec {command} <&- >&- 2>&-"]
    assert subprocess.run(shell, cwd=tmp_path, env=environment, check=False).returncode == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"
