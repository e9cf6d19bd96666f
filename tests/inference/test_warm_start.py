"""`train --from RUN`: a job that begins with the rows, the dense model and the scaling of another run."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import shardkeep
from shardkeep.base.errors import CheckpointError, ConfigError, UserError
from shardkeep.base.yaml_text import write_yaml
from shardkeep.cli.main import app
from shardkeep.inference.scoring import evaluate_run
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.run.reader import RunReader
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.records import records_in

ADAM = {"default": {"dim": 4, "optimizer": {"name": "adam", "lr": 0.01}}}


def job_of(folder: Path, name: str = "monday", *, seed: int = 7, **changes: Any) -> shardkeep.JobConfig:
    """A job over 160 rows of its own; `changes` are of whole groups."""
    data = folder / f"{name}.csv"
    if not data.exists():
        write_csv(data, click_rows(160, seed=seed))
    job = click_job(data, tables=ADAM)
    job |= {key: {**job.get(key, {}), **value} if isinstance(value, dict) else value for key, value in changes.items()}
    return shardkeep.JobConfig.model_validate(job)


def train(config: shardkeep.JobConfig, run: Path, start: Path | None = None) -> shardkeep.callbacks.Summary:
    return shardkeep.train(config, run_dir=run, quiet=True, from_run=start)


@pytest.fixture(scope="module")
def monday(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("monday")
    train(job_of(folder), folder / "run")
    return folder / "run"


def scales_of(run: Path) -> dict[str, Any]:
    return shardkeep.load(run).inputs.to_json()["scales"]  # type: ignore[no-any-return]


def test_before_its_first_step_a_job_has_the_model_of_the_other_run_and_its_scaling(
    monday: Path, tmp_path: Path
) -> None:
    still = {"default": {"dim": 4, "optimizer": {"name": "adam", "lr": 1e-30}}}
    tuesday = job_of(tmp_path, "tuesday", seed=8, train={"max_steps": 1}, tower={"optimizer": {"lr": 1e-30}})
    train(tuesday.model_copy(update={"tables": job_of(tmp_path, tables=still).tables}), tmp_path / "run", monday)
    file = write_csv(tmp_path / "wednesday.csv", click_rows(100, seed=9))
    before, after = evaluate_run(monday, files=[file]), evaluate_run(tmp_path / "run", files=[file])
    assert before["samples"] == after["samples"] and before["logloss"] == pytest.approx(after["logloss"], rel=1e-6)
    ids, (first, second) = np.arange(50), [shardkeep.load(run) for run in (monday, tmp_path / "run")]
    np.testing.assert_allclose(first.rows("item", ids), second.rows("item", ids), atol=1e-9)
    assert np.abs(first.rows("item", ids) - second.rows("item", ids + 10_000)).max() > 0.01
    assert scales_of(tmp_path / "run") == scales_of(monday)


def test_refit_fits_the_scaling_again(monday: Path, tmp_path: Path) -> None:
    refit = job_of(tmp_path, "tuesday", seed=8, train={"max_steps": 1}, data={"refit": True})
    train(refit, tmp_path / "run", monday)
    train(job_of(tmp_path, "tuesday", train={"max_steps": 1}), tmp_path / "fresh")
    assert scales_of(tmp_path / "run") == scales_of(tmp_path / "fresh") != scales_of(monday)


def test_resume_with_more_rows_keeps_scaling_and_calls_the_evaluation_data_unchanged(tmp_path: Path) -> None:
    run, held = tmp_path / "run", write_csv(tmp_path / "eval.csv", click_rows(40, seed=9))
    job_of(tmp_path)  # writes monday.csv
    days = {"train": str(tmp_path / "*day.csv"), "eval": str(held), "split": None}
    train(job_of(tmp_path, data=days), run)
    before = scales_of(run)
    job_of(tmp_path, "tuesday", seed=8)
    with pytest.raises(ConfigError) as refused:
        shardkeep.resume(run, overrides=["train.epochs=3"], quiet=True)
    text = str(refused.value)
    assert "evaluation" not in text, text
    accepted = text.split("data.accept=")[1].split()[0].strip("'\".,;")
    shardkeep.resume(run, overrides=["train.epochs=3", f"data.accept={accepted}"], quiet=True)
    assert scales_of(run) == before


def test_training_goes_on_as_in_one_job_over_the_same_rows(tmp_path: Path) -> None:
    """Adam's bias correction counts on: three passes in three jobs equal three passes in one."""
    stored, all_rows = {"order": "stored"}, {"split": None}
    whole = train(job_of(tmp_path, train={**stored, "epochs": 3}, data=all_rows), tmp_path / "whole")
    runs = [None, *(tmp_path / str(number) for number in range(3))]
    one, two, three = (
        train(job_of(tmp_path, train=stored, data=all_rows), run, before) for before, run in itertools.pairwise(runs)
    )
    assert one.steps == two.steps == three.steps and 3 * one.steps == whole.steps
    assert three.state_digest == whole.state_digest != two.state_digest


def test_a_plateau_lowers_the_rates_of_rows_and_dense_model(tmp_path: Path) -> None:
    """Three passes, the third at half the rates, equal two passes and one more that begins with their model."""

    def job(rate: float, epochs: int, **plateau: Any) -> shardkeep.JobConfig:
        return job_of(
            tmp_path,
            train={"order": "stored", "epochs": epochs, "plateau": plateau or None},
            tables={"default": {"dim": 4, "optimizer": {"name": "rowwise_adagrad", "lr": 0.04 * rate}}},
            tower={"optimizer": {"lr": 0.002 * rate}},
        )

    falls = {"factor": 0.5, "min_delta": 1.0}  # the second evaluation is not better by 1
    three = train(job(1.0, 3, **falls), tmp_path / "three")
    train(job(1.0, 2, **falls), tmp_path / "two")
    half = train(job(0.5, 1), tmp_path / "half", tmp_path / "two")
    assert three.state_digest == half.state_digest
    assert half.state_digest != train(job(1.0, 1), tmp_path / "full", tmp_path / "two").state_digest
    records = [r for r in records_in(tmp_path / "three" / "metrics.jsonl") if r.get("phase") == "plateau"]
    assert [(r["step"], r["lr_factor"]) for r in records] == [(2 * half.steps, 0.5), (3 * half.steps, 0.25)]
    more = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "two"), "--set", "train.epochs=3"])
    assert more.exit_code == 0, more.output
    assert (RunReader(tmp_path / "two").summary() or {})["state_digest"] == three.state_digest


def test_files_are_linked_or_copied_and_the_same_start_gives_the_same_bits_to_a_resumed_job_too(
    monday: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    config = job_of(tmp_path, "tuesday", seed=8)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        patch.setattr(shutil, "copyfile", full)
        with pytest.raises(CheckpointError, match=r"copied/checkpoints: cannot be written \(No space left on device\)"):
            train(config, tmp_path / "copied", monday)
    assert not (tmp_path / "copied").exists()
    with monkeypatch.context() as patch:  # another disk: files are copied
        patch.setattr(os, "link", full)
        copied = train(config, tmp_path / "copied", monday)
    run = tmp_path / "linked"
    linked = train(job_of(tmp_path, "tuesday", checkpoint={"keep": 9}), run, monday)
    assert copied.state_digest == linked.state_digest != train(config, tmp_path / "new").state_digest
    for folder, has_links in ((tmp_path / "copied", False), (run, True)):
        rows = folder / "checkpoints" / "step-00000000" / "server-0" / "rows-00000.safetensors"
        assert (rows.stat().st_nlink > 1) == has_links
    with pytest.raises(UserError, match="there is no checkpoint of that step"):
        shardkeep.load(run, 0)
    # What is left by a job that died before a checkpoint of its own:
    for path in (run / "checkpoints").glob("step-*[1-9]*"):
        path.rename(path.with_name(f".{path.name}"))
    (run / "summary.json").unlink()
    done = CliRunner().invoke(app, ["train", "--resume", str(run)])
    assert done.exit_code == 0 and "at step 0 from step-00000000" in done.output
    assert (RunReader(run).summary() or {})["state_digest"] == linked.state_digest


@pytest.mark.slow
def test_a_start_is_planned_before_kernels_are_loaded(monday: Path) -> None:
    lines = [
        "import sys; from pathlib import Path; import shardkeep",
        "from shardkeep.run.origin.warm_start import plan_warm_start",
        f"run = Path({str(monday)!r}); plan_warm_start(shardkeep.config.load_config(run / 'config.yaml'), run)",
        "print([name for name in ('numba', 'torch', 'pyarrow') if name in sys.modules])",
    ]
    done = subprocess.run([sys.executable, "-c", "; ".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_increment_is_merged_with_what_it_builds_on(tmp_path: Path) -> None:
    increments = {"every_steps": 2, "full_every": 3, "keep": 9}
    plain = train(job_of(tmp_path, train={"max_steps": 4}), tmp_path / "plain")
    chained = train(job_of(tmp_path, train={"max_steps": 4}, checkpoint=increments), tmp_path / "chained")
    assert plain.state_digest == chained.state_digest
    last = Checkpoints(tmp_path / "chained" / "checkpoints").latest()
    assert last is not None and last.base is not None
    after = [
        train(job_of(tmp_path, "tuesday"), tmp_path / f"from-{name}", tmp_path / name) for name in ("plain", "chained")
    ]
    assert after[0].state_digest == after[1].state_digest
    assert not (tmp_path / "from-chained" / "checkpoints" / "step-00000000" / "base").exists()


@every("model", [{"name": "dlrm", "bottom": [7], "hidden": [9, 5]}, {"name": "deepfm", "hidden": [9, 5]}])
def test_new_columns_change_no_first_score_and_those_that_are_gone_take_their_weights_with_them(
    tmp_path: Path, model: dict[str, Any]
) -> None:
    runs, still = [tmp_path / name for name in ("monday", "tuesday", "wednesday")], {"name": "adam", "lr": 1e-30}
    job = click_job(write_csv(tmp_path / "monday.csv", click_rows(160)), model=model, tables=ADAM)
    train(shardkeep.JobConfig.model_validate(job), runs[0])
    lines = (tmp_path / "monday.csv").read_text().splitlines()
    more = [f"{line},{'city,height' if n == 0 else f'c{n % 7},{n}'}" for n, line in enumerate(lines)]
    (tmp_path / "tuesday.csv").write_text("\n".join(more) + "\n")
    job["tables"] = {"default": {"dim": 4, "optimizer": still}}
    job |= {"tower": {"amp": "off", "optimizer": {"lr": 1e-30}}, "train": {"batch_size": 32, "max_steps": 1}}
    columns = {"sparse": ["city", *job["data"]["sparse"]], "dense": ["price", "height", "age"]}
    shown = []
    for data, before, run in (
        (job["data"] | columns, *runs[:2]),
        (job["data"] | {"sparse": ["city", "item"], "dense": ["age"]}, *runs[1:]),
    ):
        path = tmp_path / f"{run.name}.yaml"
        path.write_text(write_yaml(job | {"data": data | {"train": str(tmp_path / "tuesday.csv")}}))
        done = CliRunner().invoke(app, ["train", str(path), "--from", str(before), "--run-dir", str(run)])
        assert done.exit_code == 0, done.output
        shown.append(" ".join(done.output.split()))
    zeros = "; tables whose rows begin at 0: city" if model["name"] == "deepfm" else ""
    assert f"of {runs[0]}; new columns: height, city{zeros}" in shown[0], shown
    assert f"of {runs[1]}; columns that are gone, with their weights: price, height, user, tags" in shown[1], shown
    file = write_csv(tmp_path / "new.csv", click_rows(100, seed=9))
    extended = [
        f"{line},{'city,height' if n == 0 else f'c{n % 9},{n}'}" for n, line in enumerate(file.read_text().splitlines())
    ]
    file.write_text("\n".join(extended) + "\n")
    before, after = (evaluate_run(run, files=[file]) for run in runs[:2])
    assert after["logloss"] == pytest.approx(before["logloss"], rel=1e-6)


@every(
    ("changes", "text"),
    [
        ({"model": {"hidden": [9, 6]}}, r"model.hidden: \[9, 6\]; --from .* was trained with \[9, 5\]"),
        ({"tables": {"default": {"dim": 8, "optimizer": {"name": "adam"}}}}, "tables.user.dim: 8; .* trained with 4"),
        ({"tables": {"default": {"dim": 4}}}, "tables.user.optimizer.name: rowwise_adagrad; .* trained with adam"),
        ({"tower": {"optimizer": {"name": "sgd"}}}, "tower.optimizer.name: sgd; .* trained with adam"),
        ({"checkpoint": {"every_steps": "off"}}, "checkpoint.every_steps: off with --from"),
        (
            {"data": {"sparse": ["user", "item", {"column": "tags", "separator": "|"}]}},
            "data.sparse: tags is not read as in the run of --from",
        ),
    ],
)
def test_what_differs_from_the_other_run_is_refused_by_name(
    monday: Path, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        train(job_of(tmp_path, **changes), tmp_path / "run", monday)
    assert not (tmp_path / "run").exists()


def test_a_folder_of_checkpoints_with_the_start_of_another_run_is_refused(monday: Path, tmp_path: Path) -> None:
    shared = {"dir": str(tmp_path / "shared")}
    train(job_of(tmp_path, checkpoint=shared), tmp_path / "a", monday)
    with pytest.raises(UserError, match="holds the start of another run"):
        train(job_of(tmp_path, checkpoint=shared), tmp_path / "b")
    with pytest.raises(UserError, match="is not a run folder"):
        train(job_of(tmp_path), tmp_path / "c", tmp_path)
