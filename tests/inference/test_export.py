"""Exports beside the runs that they are of: equal scores, formats, replacing, damage of every kind, a full disk."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import shardkeep
from shardkeep.base.errors import CheckpointError, ShardkeepError, UserError
from shardkeep.cli.main import app
from shardkeep.inference.export import opening, writing
from shardkeep.inference.export.manifest import read_manifest
from shardkeep.inference.export.program import read_program
from shardkeep.inference.export.rows import write_rows
from shardkeep.inference.export.tower import write_tower
from shardkeep.inference.export.writing import Formats, export_run
from shardkeep.inference.scoring import evaluate_run
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.forked import SCRIPT, started
from tests.support.served_clicks import texts

OWN = """
from torch import nn
import torch
class Net(nn.Module):
    def __init__(self, *, num_dense, features):
        super().__init__()
        self.layer = nn.Linear(num_dense + sum(features.values()), 1)
        self.register_buffer("shift", torch.tensor(0.25))
    def forward(self, dense_BI, embeddings):
        return torch.tanh(self.layer(torch.cat([dense_BI, *embeddings.values()], dim=1))) + self.shift
"""


ROWS = {name: [*column, "stranger" if name == "user" else column[0]] for name, column in texts(230, seed=8).items()}


def trained(folder: Path, **settings: Any) -> Path:
    """A run, in a folder with its train.csv."""
    job = click_job(write_csv(folder / "train.csv", click_rows(100))) | settings
    job["data"]["root"] = str(folder)  # where a model of one's own is looked for
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=folder / "run", quiet=True)
    return folder / "run"


@pytest.fixture
def out(exported: Path, tmp_path: Path) -> Path:
    return shutil.copytree(exported, tmp_path / "out")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@every(
    ("model", "tables"),
    [
        ({"name": "lr"}, {}),
        ({"name": "deepfm", "hidden": [16], "norm": "batch", "activation": "dice"}, {"default": {"dim": 4}}),
    ],
)
def test_an_export_scores_as_its_run_bit_for_bit(tmp_path: Path, model: dict[str, Any], tables: dict[str, Any]) -> None:
    run, out = trained(tmp_path, model=model, tables=tables), tmp_path / "out"
    before, summary = shardkeep.load(run), json.loads((run / "summary.json").read_text())
    expected, rows = before.predict(ROWS), before.rows("user", ROWS["user"])
    assert evaluate_run(run) == {"step": summary["steps"]} | summary["eval"]  # as the trainer's
    export_run(run, out)
    file = write_csv(tmp_path / "new.csv", click_rows(60, seed=9))
    wanted = evaluate_run(run, files=[file])
    shutil.move(run, tmp_path / "gone")
    (tmp_path / "train.csv").unlink()
    found = shardkeep.load(out, verify=True)
    assert np.array_equal(found.predict(ROWS), expected) and expected.std() > 0.001
    assert np.array_equal(found.rows("user", ROWS["user"]), rows)  # the last one is of an id without a row
    assert evaluate_run(out, files=[file]) == wanted
    assert found.columns and found.step == read_manifest(out).step


@every(("rows", "most"), [("fp16", 2e-3), ("int8", 2e-2)])
def test_smaller_formats_cost_little_and_the_manifest_says_how_much(
    clicks: Path, exported: Path, tmp_path: Path, rows: Any, most: float
) -> None:
    small = export_run(clicks, tmp_path / "small", formats=Formats(rows, "int8"))
    expected, found = shardkeep.load(exported), shardkeep.load(tmp_path / "small", verify=True)
    assert np.abs(found.predict(ROWS) - expected.predict(ROWS)).max() < 0.05
    exact, stored = expected.rows("user", ROWS["user"]), found.rows("user", ROWS["user"])
    assert 0 < np.abs(stored - exact).max() < most * np.abs(exact).max()
    before, after = evaluate_run(clicks), small.cost
    assert after is not None and set(after) >= {"auc", "logloss"} and abs(after["auc"]) < 0.01
    assert small.metrics["auc"] == before["auc"]


@pytest.mark.slow
def test_a_model_of_ones_own_becomes_a_program_without_pickles(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "mine.py").chmod(0o644)
    run = trained(tmp_path, model={"name": "mine:Net"})
    expected = shardkeep.load(run).predict(ROWS)
    out = tmp_path / "out"
    export_run(run, out)
    script = (
        "import sys, json, numpy, shardkeep; d = json.load(open(sys.argv[2])); p = shardkeep.load(sys.argv[1]); "
        "numpy.save(sys.argv[3], p.predict(d)); assert 'mine' not in sys.modules"
    )
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "mine.py").unlink()
    command = [sys.executable, "-c", script, str(out), str(tmp_path / "rows.json"), str(tmp_path / "scores.npy")]
    subprocess.run(command, check=True, timeout=120, cwd=tmp_path)
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), expected, atol=1e-6)
    again = pickle.loads(pickle.dumps(shardkeep.load(out)))
    np.testing.assert_allclose(again.predict(ROWS), expected, atol=1e-6)
    with pytest.raises(UserError, match=r"--amp bf16: the dense model of .* is a program"):
        shardkeep.load(out, amp="bf16")
    program = next(out.glob("files-*/tower.pt2"))
    with zipfile.ZipFile(program) as archive:
        assert [entry.file_size for entry in archive.infolist() if "sample_inputs" in entry.filename] == [0]
    with zipfile.ZipFile(program, "a") as archive:
        archive.writestr("tower/data/sample_inputs/other.pt", b"cos\nsystem\n")
    with pytest.raises(CheckpointError, match=r"tower\.pt2: damaged"):
        shardkeep.load(out)
    with pytest.raises(CheckpointError, match=r"has an entry that is not read \(tower/data/sample_inputs/other\.pt\)"):
        read_program(program)


def test_a_new_export_takes_the_place_of_an_old_one_that_is_open(clicks: Path, out: Path) -> None:
    old = shardkeep.load(out)
    expected = old.predict(ROWS)
    export_run(clicks, out, formats=Formats("fp16", "fp32"))
    assert np.array_equal(old.predict(ROWS), expected)  # its files are mapped
    assert len(list(out.iterdir())) == 2 and not np.array_equal(shardkeep.load(out).predict(ROWS), expected)


WRITERS = {
    "write_rows": "table-0.rows.safetensors",
    "write_tower": "tower.safetensors",
    "write_program": "tower.pt2",
    "commit": "manifest.json",
}


def full_in(writer: str, size_bytes: int) -> Callable[..., Any]:
    """The writer of an export's files, on a disk that becomes full meanwhile: the system's own error comes from it, as
    no file of this process grows beyond that."""
    real = getattr(writing, writer)

    def write(*arguments: Any) -> Any:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
        try:
            return real(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return write


@every(
    ("writer", "size_bytes"),
    [("write_rows", 0), ("write_rows", 1000), ("write_tower", 1000), ("write_program", 1000), ("commit", 100)],
)
def test_a_disk_that_is_full_leaves_the_older_export_whole_and_of_a_first_one_nothing(
    clicks: Path, exported: Path, tmp_path: Path, writer: str, size_bytes: int
) -> None:
    shutil.copytree(exported, out := tmp_path / "out")
    before, program = contents(out), ["--with-program"] * (writer == "write_program")
    for folder in (out, tmp_path / "first") if writer == "write_rows" else (out,):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writing, writer, full_in(writer, size_bytes))
            done = CliRunner().invoke(app, ["export", str(clicks), str(folder), *program])
        assert done.exit_code == 1 and "Traceback" not in done.output
        (line,) = [line for line in done.output.splitlines() if line.startswith("error: ")]
        assert WRITERS[writer] in line and "File too large" in line
    assert contents(out) == before and not (tmp_path / "first").exists()
    assert np.array_equal(shardkeep.load(out, verify=True).predict(ROWS), shardkeep.load(exported).predict(ROWS))


def test_a_folder_without_file_locks_is_an_error_and_nothing_is_left(
    clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("shardkeep.base.files.fcntl.flock", none)
    with pytest.raises(OSError, match="No locks available"):
        export_run(clicks, tmp_path / "out")
    assert not (tmp_path / "out").exists()


KILLED = """
import pathlib, sys, shardkeep.inference.export.writing as writing
writing.records_of = lambda *_: (print("ready", flush=True), sys.stdin.read())
writing.export_run(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
"""


@pytest.mark.waits_for_processes
def test_kill_9_while_exporting_leaves_the_old_export_whole(
    clicks: Path, exported: Path, out: Path, tmp_path: Path
) -> None:
    (tmp_path / "export.py").write_text(KILLED)
    process = started([str(tmp_path / "export.py"), str(clicks), str(out)], env=os.environ, main=SCRIPT)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait(90)
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()
    assert np.array_equal(shardkeep.load(out, verify=True).predict(ROWS), shardkeep.load(exported).predict(ROWS))
    assert len(list(out.iterdir())) > 2
    export_run(clicks, out)
    assert len(list(out.iterdir())) == 2  # the half written files are gone


def test_each_file_that_is_cut_or_has_another_byte_is_refused_by_name(out: Path) -> None:
    for file in sorted(path for path in out.rglob("*") if path.is_file()):
        content = file.read_bytes()
        half = len(content) // 2
        other = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
        for damaged in (b"", content[:7], content[:half], content[:-1], other):
            file.write_bytes(damaged)
            with pytest.raises(ShardkeepError, match=file.name):
                shardkeep.load(out, verify=damaged == other)
        file.write_bytes(content)
    shardkeep.load(out)


@every(("name", "at"), [("table-0.rows.safetensors", 20), ("table-0.index.safetensors", -5)])
def test_a_damaged_header_or_index_is_refused_without_reading_all(
    exported: Path, tmp_path: Path, name: str, at: int
) -> None:
    damaged = shutil.copytree(exported, tmp_path / "damaged")
    file = next(damaged.glob(f"files-*/{name}"))
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        shardkeep.load(damaged)


@every("name", ["checkpoint", "site", "backup", "thesis"])
def test_folders_and_files_that_are_no_export_are_left_alone(clicks: Path, tmp_path: Path, name: str) -> None:
    other = tmp_path / name
    if name == "checkpoint":
        shutil.copytree(next((clicks / "checkpoints").glob("step-*")), other)
    else:
        (other / "files-2024").mkdir(parents=True)
        (other / "files-2024" / "photo.jpg").touch()
        (other / "thesis.txt").touch()
        if name == "site":
            (other / "manifest.json").write_text('{"name": "my site"}')
    before = sorted(str(path) for path in other.rglob("*"))
    with pytest.raises(UserError, match="is a folder of something else"):
        export_run(clicks, other)
    assert sorted(str(path) for path in other.rglob("*")) == before
    if name == "thesis":
        with pytest.raises(UserError, match="is a file"):
            export_run(clicks, other / "thesis.txt")
        with pytest.raises(UserError, match="has no manifest"):
            read_manifest(other)


def test_an_interrupt_after_the_manifest_leaves_the_new_export(
    clicks: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path) -> None:
        if path == out:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shardkeep.inference.export.manifest.sync_folder", interrupted)
        export_run(clicks, out, formats=Formats("fp16", "fp32"))
    assert shardkeep.load(out, verify=True) and read_manifest(out).tables[0].format == "fp16"


def test_two_exports_into_one_folder_do_not_meet(clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, write = tmp_path / "out", writing.write_tower

    def during(*arguments: Any) -> None:
        with pytest.raises(UserError, match="another export writes to it"):
            export_run(clicks, out)
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_tower", during)
        export_run(clicks, out)
    assert shardkeep.load(out, verify=True)


def test_an_export_that_is_replaced_while_it_opens_opens_again(
    clicks: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped, replaced = opening.map_rows, []

    def replace_first(*arguments: Any) -> Any:
        if not replaced:
            replaced.append(export_run(clicks, out))
        return mapped(*arguments)

    monkeypatch.setattr(opening, "map_rows", replace_first)
    assert np.array_equal(shardkeep.load(out).predict(ROWS), shardkeep.load(clicks).predict(ROWS))


def test_values_that_a_small_format_does_not_have_are_refused(tmp_path: Path) -> None:
    rows = np.array([[1.0, np.nan]], np.float32)
    spec = shardkeep.TableSpec(name="user", dim=2)
    for name in ("fp16", "int8"):
        with pytest.raises(UserError, match=f"--rows {name}: table user has values that are not finite"):
            write_rows(tmp_path, 0, spec, [(np.array([5]), rows)], name)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="--tower int8: weight has values that are not finite"):
        write_tower(tmp_path / "tower", {"weight": torch.tensor([[1.0, float("inf")]])}, "int8")
