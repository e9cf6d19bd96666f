"""`shardkeep bench`: what it finds, how it runs a script, and one of the real scripts through the command."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.errors import UserError
from shardkeep.cli.bench import FOLDER, bench_all, benchmarks, chosen, run

ROOT = Path(__file__).resolve().parents[2]

ECHO = '''"""What was I told?

More.
"""
import json, sys

def main():
    options = dict(zip(sys.argv[1::2], sys.argv[2::2]))  # takes "--json", "--rounds"
    open(options["--json"], "w").write(json.dumps(options))

main()
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "echo.py").write_text(ECHO)
    (scripts / "fails.py").write_text("def main():\n    raise SystemExit(3)\n\nmain()\n")
    (scripts / "words.py").write_text("WORDS = ()\n")
    return scripts


def test_every_script_with_a_main_is_a_benchmark_and_nothing_else() -> None:
    with_main = {
        path.stem
        for path in FOLDER.glob("*.py")
        if any(isinstance(n, ast.FunctionDef) and n.name == "main" for n in ast.parse(path.read_text()).body)
    }
    found = benchmarks()
    assert set(found) == with_main
    assert {"pull_push", "scaling", "start_up", "quality"} <= set(found)
    for benchmark in found.values():
        assert benchmark.question, f"{benchmark.path} has no docstring"
        assert "--smoke" in benchmark.options, f"{benchmark.path} takes no --smoke"


def test_a_script_gets_the_options_it_takes_and_its_file_is_found(folder: Path, tmp_path: Path) -> None:
    echo = benchmarks(folder)["echo"]
    assert echo.question == "What was I told?"
    ended = run(echo, options={"--rounds": "2", "--seconds": "9", "--smoke": None}, out=tmp_path / "out")
    assert (ended.code, ended.json) == (0, tmp_path / "out" / "echo.json")
    assert json.loads((tmp_path / "out" / "echo.json").read_text()) == {
        "--rounds": "2",
        "--json": str(tmp_path / "out" / "echo.json"),
    }


def test_a_script_that_fails_is_told_and_the_others_still_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = bench_all(chosen(["fails", "echo"], folder), options={}, smoke=False, out=tmp_path / "out")
    assert code == 1
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("fails: failed with exit code 3 after ") and first.endswith("; nothing written")
    assert second.startswith("echo: done after ") and second.endswith("; " + str(tmp_path / "out" / "echo.json"))


def test_an_unknown_name_is_told_with_those_there_are(folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        chosen(["ecko"], folder)
    assert str(caught.value) == "bench ecko: is not a benchmark; the benchmarks are echo, fails"


def test_a_folder_that_cannot_be_made_is_the_users_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out .*file/out: cannot be written"):
        run(benchmarks(folder)["echo"], options={}, out=tmp_path / "file" / "out")


@pytest.mark.processes
def test_the_command_lists_the_benchmarks_with_their_questions() -> None:
    command = [sys.executable, "-m", "shardkeep", "bench", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(benchmarks())


WAITS = """
import signal, sys, time
def main():
    try:
        print("up", flush=True)
        time.sleep(60)
    finally:
        time.sleep(0.5)
        open({target!r}, "w").write("cleaned up")
main()
"""


@pytest.mark.processes
def test_ctrl_c_leaves_a_script_the_time_to_clean_up(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS.format(target=str(tmp_path / "cleaned")))
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a shell's `&` has it ignored
        "from pathlib import Path; from shardkeep.cli.bench import bench_all, chosen; "
        f"bench_all(chosen([], Path({str(tmp_path)!r})), options={{}}, smoke=False, out=Path({str(tmp_path)!r}))"
    )
    bench = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert bench.stdout is not None
    while bench.stdout.readline() != b"up\n":
        assert bench.poll() is None
    began = time.monotonic()
    os.killpg(bench.pid, signal.SIGINT)
    bench.communicate(timeout=30)
    assert time.monotonic() - began < 20
    assert (tmp_path / "cleaned").read_text() == "cleaned up"


@pytest.mark.processes
def test_a_real_benchmark_runs_through_the_command(tmp_path: Path) -> None:
    written = smoke("codecs", tmp_path)
    assert written["benchmark"] == "codecs" and written["results"]


@pytest.mark.slow
@pytest.mark.processes
def test_start_up_runs_real_jobs(tmp_path: Path) -> None:
    assert smoke("start_up", tmp_path)["results"]["rounds"]["shardkeep --help"][0]["seconds"] > 0


@pytest.mark.slow
@pytest.mark.processes
def test_scaling_runs_on_real_jobs(tmp_path: Path) -> None:
    points = smoke("scaling", tmp_path)["results"]["points"]
    assert [(point["servers"], point["workers"]) for point in points] == [(1, 1), (1, 2)]
    assert all(0 < point["server_cores"]["median"] < point["cores"]["median"] for point in points)


def smoke(name: str, folder: Path) -> dict[str, Any]:
    """What `shardkeep bench NAME --smoke` wrote."""
    command = [sys.executable, "-m", "shardkeep", "bench", name, "--smoke", "--out", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"{name}: done after ")
    return dict(json.loads((folder / f"{name}.json").read_text()))
