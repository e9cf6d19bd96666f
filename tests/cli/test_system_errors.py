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

WAYS = {
    errno.ENOSYS: "local disk",
    errno.EIO: "mount fails",
    errno.EROFS: "can be written",
    errno.ENOSPC: "free space",
    errno.EMFILE: "ulimit -n",
    errno.ENAMETOOLONG: "shorter names",
}
COMMANDS = [
    "config @/job.yaml",
    "train @/job.yaml --run-dir @/new",
    "train --resume @/run",
    "train @/job.yaml --from @/run --run-dir @/new",
    "status @/run",
    "stop @/run",
    "scale @/run --workers 2",
    "tables export @/run --table user --out @/rows.npy",
    "init @/clicks.csv --out @/new.yaml --force",
    "predict @/run --data @/clicks.csv --out @/scores.csv",
    "export @/run @/out",
    "serve @/run --listen PORT --http off",
    "report @/run --no-scores --html @/report.html",
    "sweep @/sweep.yaml --out @/sweep",
    "certs @/tls",
    "view @/run --listen PORT --token-file @/token",
    "cache @/job.yaml --clean --unused 0",
    "with --servers 1 --run-dir @/new -- true",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    trained(folder)
    csv = write_csv(folder / "clicks.csv", click_rows(200))
    (folder / "job.yaml").write_text(write_yaml(click_job(csv)))
    (folder / "sweep.yaml").write_text(write_yaml({"base": "job.yaml", "vary": {"seed": [1]}}))
    (folder / "token").write_text("0" * 64)
    (folder / "token").chmod(0o600)
    return folder


def errors_of(folder: Path, command: str) -> list[str]:
    """The lines of errors of a command, with or without which it ends in order."""
    result = CliRunner().invoke(app, command.replace("@", str(folder)).split())
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == (result.exit_code != 0) and result.exit_code in (0, 1, 2), result.stderr
    return lines


@every("number", range(len(COMMANDS)), ids=COMMANDS)
def test_a_refused_file_operation_is_one_line_with_a_path_and_the_way_out(folder: Path, number: int) -> None:
    """Each error meets several kinds of commands."""
    turns = [*WAYS.items(), *WAYS.items()][number % len(WAYS) :][: len(WAYS)]
    with socket.create_server(("127.0.0.1", 0)) as taken:  # so that what would serve ends
        command = COMMANDS[number].replace("PORT", f"127.0.0.1:{taken.getsockname()[1]}")
        for turn, (kind, way_out) in enumerate(turns):
            with refusing(folder, kind, after=turn % 3) as refused:
                lines = errors_of(folder, command)
            if refused.left < 0 and lines and os.strerror(kind) in lines[0]:
                assert str(folder) in lines[0] and way_out in lines[0], lines
                return
    pytest.fail("it came to no such operation, or needs none")


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


def test_a_run_folder_whose_name_is_no_utf_8_is_refused_or_read_in_one_line(folder: Path) -> None:
    name = os.fsdecode(bytes(folder) + b"/cut\xff")
    line = f"error: --run-dir {folder}/cut\\udcff: cannot be written as utf-8; use another name"
    assert errors_of(folder, f"train @/job.yaml --run-dir {name}") == [line] and not Path(name).exists()
    shutil.copytree(folder / "run", name)
    for command in ("train --resume RUN", "train @/job.yaml --from RUN --run-dir @/of-it", "tables RUN"):
        assert all("cut" in line for line in errors_of(folder, command.replace("RUN", name)))


def test_a_name_that_is_utf_8_is_refused_with_the_locale_to_set_where_the_locale_is_another(folder: Path) -> None:
    env = {**os.environ, "PYTHONPATH": IMPORT_PATH, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "shardkeep", "train", str(folder / "job.yaml"), "--run-dir", "läufe"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, timeout=120, check=False)
    (line,) = done.stderr.splitlines()
    why = b"cannot be written as utf-8; set LC_ALL=C.UTF-8: the name is utf-8, this locale is not"
    assert line.startswith(b"error: --run-dir ") and line.endswith(why)
    assert done.returncode == 2


@pytest.mark.waits_for_processes
def test_a_name_that_is_no_utf_8_is_printed_where_the_terminal_takes_only_utf_8(folder: Path, cluster: Cluster) -> None:
    run = os.fsdecode(bytes(folder) + b"/run\xfe")
    shutil.copytree(folder / "run", run)
    ended = cluster.command("status", run).end()
    assert ended.code == 0 and "Traceback" not in ended.err, ended.err


def raised_by(act: object, *arguments: object) -> BaseException:
    with pytest.raises(Exception) as raised:
        act(*arguments)  # type: ignore[operator]
    return raised.value


def test_an_error_names_the_file_or_the_limit_and_one_of_a_connection_no_path(tmp_path: Path) -> None:
    def read(path: Path) -> str:
        return path.read_text(encoding="utf-8")

    def connect(_folder: Path) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    def no_temporary(_folder: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    (tmp_path / "token").write_bytes(b"ab\xff")
    way = "; set TMPDIR to a folder that can be written"
    assert in_words(raised_by(no_temporary, tmp_path)) == f"No usable temporary directory found in ['/tmp']{way}"
    error = raised_by(read, tmp_path / "token")
    assert in_words(error) == f"{tmp_path}/token: byte 2 is not utf-8; write the file as UTF-8"
    assert in_words(raised_by(connect, tmp_path)) == "Connection refused"
    limit = "; raise the limit of processes (ulimit -u, pids.max)"
    assert in_words(RuntimeError("can't start new thread")).endswith(limit)


@pytest.mark.slow
def test_a_job_trains_with_all_standard_streams_closed(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(write_yaml({**TINY, "servers": 1, "workers": 1}))
    command = shlex.join([sys.executable, "-m", "shardkeep", "train", "job.yaml", "--run-dir", "run"])
    environment = {**os.environ, "PYTHONPATH": IMPORT_PATH, "OMP_NUM_THREADS": "1"}
    shell = ["sh", "-c", f"exec {command} <&- >&- 2>&-"]
    assert subprocess.run(shell, cwd=tmp_path, env=environment, check=False).returncode == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"
