"""A run whose data lie elsewhere now, or in another form, continues where their fingerprint is the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.csv
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from shardkeep.base.yaml_text import read_yaml, write_yaml
from shardkeep.cli.main import app
from tests.support.click_files import click_job, click_rows, write_csv

PARTS = {"train": (1600, 1), "eval": (300, 2)}


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stderr


def written(folder: Path, seed: int = 0) -> dict[str, Path]:
    folder.mkdir()
    return {
        part: write_csv(folder / f"{part}.csv", click_rows(rows, seed=seed + own))
        for part, (rows, own) in PARTS.items()
    }


def moved(run: Path, steps: int, files: dict[str, Path], *more: str) -> tuple[int, str]:
    """Resumes a run with its data at another place."""
    changes = [f"train.max_steps={steps}", *(f"data.{part}=[{path}]" for part, path in files.items()), *more]
    return invoke("train", "--resume", str(run), *(word for change in changes for word in ("--set", change)))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two equal runs that stopped at step 10; the data of `run` are gone."""
    home = tmp_path_factory.mktemp("home")
    files = {part: [str(path)] for part, path in written(home / "data").items()}
    job: dict[str, Any] = click_job(Path(files["train"][0]))
    job["data"] |= files
    del job["data"]["eval_fraction"]
    (home / "job.yaml").write_text(write_yaml(job))
    for name in ("whole", "run"):
        words = ("train", str(home / "job.yaml"), "--run-dir", str(home / name), "--set", "train.max_steps=10")
        assert invoke(*words) == (0, "")
    assert invoke("train", "--resume", str(home / "whole"), "--set", "train.max_steps=40") == (0, "")
    (home / "data").rename(home / "elsewhere")
    return home


def digest(run: Path) -> str:
    return str(json.loads((run / "summary.json").read_text())["state_digest"])


def test_data_that_are_gone_are_missed_with_the_option_that_the_command_has(home: Path) -> None:
    run, gone = str(home / "run"), home / "data"
    code, error = invoke("train", "--resume", run, "--set", "train.max_steps=20")
    assert code == 2 and error.count("\n") == 1
    assert error.startswith(f"error: {gone / 'train.csv'}: no such file (data.train); there is no folder {gone}; ")
    assert error.endswith("; --set data.train=PATH or --set data.root=FOLDER names their place now\n")
    code, error = invoke("evaluate", run)
    assert code == 2 and error.endswith("; allowed: --data FILE, wherever the data are now\n"), error


def test_test_data_that_are_gone_are_missed_in_the_same_words(home: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(home / "run", tmp_path / "run"))
    config = read_yaml((run / "config.yaml").read_text())
    config["data"]["test"] = [str(home / "data" / "test.csv")]
    (run / "config.yaml").write_text(write_yaml(config))
    code, error = invoke("evaluate", str(run), "--split", "test")
    assert code == 2 and error.endswith("; allowed: --data FILE, wherever the data are now\n"), error


def test_other_data_at_the_place_are_refused_in_one_line(home: Path, tmp_path: Path) -> None:
    code, error = moved(home / "run", 20, written(tmp_path / "other", seed=50))
    assert code == 2 and error.count("\n") == 1 and "data: the training data are not those of " in error


def test_the_same_data_at_another_place_and_in_another_form_continue_with_the_same_bits(
    home: Path, tmp_path: Path
) -> None:
    there = {part: home / "elsewhere" / f"{part}.csv" for part in PARTS}
    assert moved(home / "run", 20, there) == (0, "")
    parquet = {part: tmp_path / f"{part}.parquet" for part in PARTS}
    text = pyarrow.csv.ConvertOptions(column_types={"tags": pyarrow.string()})
    for part, path in parquet.items():
        pyarrow.parquet.write_table(pyarrow.csv.read_csv(there[part], convert_options=text), path)
    assert moved(home / "run", 40, parquet, "data.source=parquet") == (0, "")
    assert digest(home / "run") == digest(home / "whole")
