"""Running a sweep: what is done is not run again, what fails does not stop the others, and a killed one continues."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from shardkeep.base.errors import JobError, UserError
from shardkeep.cli.main import app
from shardkeep.experiments.plan import load_sweep
from shardkeep.experiments.results import Results, curve_of
from shardkeep.run.reader import RunReader
from tests.support.cases import every
from tests.support.cluster import within
from tests.support.forked import started
from tests.support.trial_runs import StandIns, started_sweep, sweep, write_sweep


class Sweeps:
    """Sweeps into one folder, by the stand-in for `shardkeep train`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.printed = ""

    def run(self, *, jobs: int = 1, **changes: Any) -> Results:
        console = io.StringIO()
        try:
            plan = load_sweep(write_sweep(self.folder, **changes))
            return sweep(plan, out=self.out, console=Console(file=console, width=200), jobs=jobs, starter=StandIns())
        finally:
            self.printed = console.getvalue()

    def tell(self, name: str, *runs: str) -> None:
        self.out.mkdir(exist_ok=True)
        (self.out / name).write_text(" ".join(runs))

    def started(self) -> list[str]:
        path = self.out / "started"
        found = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return found

    def rows(self) -> list[dict[str, str]]:
        return list(csv.DictReader((self.out / "results.csv").read_text().splitlines()))


@pytest.fixture
def sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweeps:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what plots show is tested elsewhere
    return Sweeps(tmp_path)


ALL = ["fp32-seed1", "fp16-seed1", "fp32-seed2", "fp16-seed2"]


def test_trials_run_once_a_failed_one_again_and_of_another_seed_or_recipe_only_what_is_new(sweeps: Sweeps) -> None:
    sweeps.tell("fail", "fp16-seed1")
    with pytest.raises(JobError) as caught:
        sweeps.run()
    assert sweeps.started() == ALL, "a failed trial stops no other"
    failed = "1 of 4 trials failed (fp16-seed1: this run fails on purpose); the same command tries them again"
    assert str(caught.value) == failed
    printed = sweeps.printed.splitlines()
    assert f"sweep     4 trials into {sweeps.out}, 1 at once, by auc" in printed
    line = "trial     fp16-seed1: failed: this run fails on purpose; 2 of 4 trials, 0:"
    assert any(each.startswith(line) for each in printed)
    assert any(each.startswith("trial     fp16-seed2: 0.79200; 4 of 4 trials, 0:00:00 left") for each in printed)
    assert [row["status"] for row in sweeps.rows()] == ["completed", "missing", "completed", "completed"]
    report = (sweeps.out / "report.html").read_text()
    assert "runs/fp16-seed1" in report.split("Not completed")[1].split("</table>")[0]
    sweeps.tell("fail")
    results = sweeps.run()
    assert sweeps.started() == ["fp16-seed1"] and [row["status"] for row in results.rows] == ["completed"] * 4
    sweeps.run()
    assert sweeps.started() == [] and "4 trials into" in sweeps.printed and ", 4 of them done" in sweeps.printed
    assert all((sweeps.out / name).exists() for name in ("results.csv", "summary.json", "report.html"))
    assert pq.read_table(sweeps.out / "results.parquet").to_pylist() == list(results.rows)
    assert [row["run"] for row in sweeps.rows()] == [f"runs/{name}" for name in ALL]  # no path of this machine
    shutil.rmtree(sweeps.out / "runs/fp32-seed2")
    own = {"name": "few", "settings": {"compression.push": {"keep": 0.5, "pool_rows": 10}}}
    sweeps.run(recipes=["fp32", own], seeds=[1, 2, 3], jobs=2)
    few = {f"few-seed{seed}" for seed in (1, 2, 3)}
    assert {*sweeps.started()} == {"fp32-seed2", "fp32-seed3", "fp16-seed3", *few}  # its folder was deleted


def test_when_the_first_trials_all_fail_the_others_are_not_tried(sweeps: Sweeps) -> None:
    sweeps.tell("fail", *ALL)
    with pytest.raises(JobError, match="none of the first 3 trials completed: fp32-seed2: this run fails on purpose"):
        sweeps.run()
    assert sweeps.started() == ALL[:3] and len(sweeps.rows()) == 4


def test_a_sweep_of_other_settings_or_other_code_is_refused_by_the_key_or_the_file_that_differs(
    sweeps: Sweeps,
) -> None:
    """Code of the user is the model that the config names, and what it imports."""
    files = {
        "net.py": "from parts.layers import WIDTH\nimport torch\n",
        "parts/layers.py": "from deep import WIDTH\n",
        "deep/__init__.py": "from .sizes import WIDTH\n",
        "deep/sizes.py": "WIDTH = 3\n",
        "plots.py": "# nothing that a run imports\n",
    }
    for name, text in files.items():
        (sweeps.folder / name).parent.mkdir(exist_ok=True)
        (sweeps.folder / name).write_text(text)
    own, seeds = {"model.name": "net:Net"}, [1]
    few = {"name": "few", "settings": {"train.batch_size": 10}}
    sweeps.run(settings=own, seeds=seeds, recipes=[few])
    sweeps.started()

    def refused(why: str, **changes: Any) -> None:
        with pytest.raises(UserError) as caught:
            sweeps.run(**{"settings": own, "seeds": seeds, "recipes": [few], **changes})
        assert str(caught.value) == f"--out {sweeps.out}: has trials with {why}; give --out a new folder"

    refused("train.batch_size=50, now it is 25", settings=own | {"train.batch_size": 25})
    few["settings"] = {"train.batch_size": 20}
    refused("few.train.batch_size=10, now it is 20")
    few["settings"] = {"train.batch_size": 10}
    write_sweep(sweeps.folder, settings=own, seeds=seeds, recipes=[few])
    (sweeps.folder / "plots.py").write_text("# edited\n")
    code, printed = ended(started_sweep(sweeps.folder))  # in another process: one reads code once
    assert code == 0 and ", 3 of them done" in printed
    for edited in files.keys() - {"plots.py"}:
        (sweeps.folder / edited).write_text(files[edited] + "# edited\n")
        code, printed = ended(started_sweep(sweeps.folder))
        assert code == 2 and f"has trials with another {edited} than there is now; give --out a new folder" in printed
        (sweeps.folder / edited).write_text(files[edited])
    journal = sweeps.out / "journal.jsonl"
    file = "shardkeep/compression/recipes.py"
    facts, *others = journal.read_text().splitlines()
    code_then = json.loads(facts)
    assert file in code_then["facts"]["code"]
    code_then["facts"]["code"][file] = "of another commit"
    journal.write_text("\n".join([json.dumps(code_then), *others, ""]))
    refused(f"another {file} than there is now")
    assert sweeps.started() == []


@every(
    ("settings", "refused"),
    [({}, ""), ({"model.name": "net:Net"}, r"has trials with data\.root=")],
)
def test_a_sweep_may_be_moved_unless_it_reads_its_folder(
    tmp_path: Path, sweeps: Sweeps, settings: dict[str, str], refused: str
) -> None:
    sweeps = Sweeps(tmp_path)
    sweeps.run(settings=settings, seeds=[1])
    sweeps.started()
    sweeps.folder /= "elsewhere"
    sweeps.folder.mkdir()
    with pytest.raises(UserError, match=refused) if refused else contextlib.nullcontext():
        sweeps.run(settings=settings, seeds=[1])
    assert sweeps.started() == []


def ended(process: Any) -> tuple[int, str]:
    with process.stdin, process.stdout, process.stderr:
        printed = process.stdout.read()
        return process.wait(100), printed


@pytest.mark.waits_for_processes
def test_kill_9_loses_at_most_the_trials_in_progress_and_the_next_sweep_waits_for_their_processes(
    sweeps: Sweeps,
) -> None:
    sweeps.tell("hang", "fp32-seed2", "fp16-seed2")
    write_sweep(sweeps.folder)
    first = started_sweep(sweeps.folder)  # two at once
    for name in ("fp32-seed2", "fp16-seed2"):
        within(150, (sweeps.out / "runs" / name).exists, name, lambda: first.poll() is None)
    with pytest.raises(UserError, match="another sweep is running in this folder"):
        sweeps.run()
    first.kill()
    ended(first)
    with (sweeps.out / "journal.jsonl").open("a") as journal:
        journal.write('{"trial": "fp32-seed2", "sta')  # as if it had been killed within a line
    sweeps.tell("hang")
    sweeps.run()
    assert sorted((sweeps.out / "ended").read_text().split()) == ["fp16-seed2", "fp32-seed2"]  # with their stdin
    assert sorted(sweeps.started()) == sorted([*ALL, *ALL[2:]])
    assert [row["status"] for row in sweeps.rows()] == ["completed"] * 4


@pytest.mark.waits_for_processes
def test_ctrl_c_ends_the_trials_and_keeps_what_is_done(sweeps: Sweeps) -> None:
    sweeps.tell("hang", "fp16-seed1")
    write_sweep(sweeps.folder, seeds=[1])
    process = started_sweep(sweeps.folder)
    for made in ("fp16-seed1", "fp32-seed1/summary.json"):
        within(150, (sweeps.out / "runs" / made).exists, made, lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    code, printed = ended(process)
    assert code == 1
    assert "of 2 trials done; the same command continues" in printed
    assert [row["status"] for row in sweeps.rows()] == ["completed", "missing"]


JOB: dict[str, Any] = {
    "servers": 0,
    "workers": 1,
    "data": {"synthetic": {"train_samples": 4800, "eval_samples": 1000, "num_dense": 2, "table_sizes": [50, 200]}},
    "model": {"bottom": [8], "hidden": [8]},
    "tables": {"default": {"dim": 4}},
    "tower": {"compile": "off"},
    "train": {"batch_size": 100},
    "eval": {"every_steps": 16},
    "checkpoint": {"every_steps": "off"},
}


@pytest.mark.waits_for_processes
def test_a_job_whose_sweep_is_gone_stops(tmp_path: Path) -> None:
    data = {"synthetic": {**JOB["data"]["synthetic"], "train_samples": 10**8}}
    (tmp_path / "job.yaml").write_text(json.dumps({**JOB, "data": data}))
    command = ["train", str(tmp_path / "job.yaml"), "--parent-pipe", "--run-dir", str(tmp_path / "run")]
    job = started(command, env=os.environ, cwd=Path(__file__).resolve().parents[2])
    try:
        within(150, (tmp_path / "run" / "metrics.jsonl").exists, "metrics.jsonl", lambda: job.poll() is None)
        assert job.stdin is not None
        job.stdin.close()
        assert job.wait(60) == 1
    finally:
        job.kill()
        job.wait()
        for stream in (job.stdout, job.stderr):
            stream.close()
    assert (RunReader(tmp_path / "run").last_summary() or {})["status"] == "stopped"


@pytest.mark.waits_for_processes
@pytest.mark.slow
def test_real_jobs_run_at_once_and_their_ledger_curve_and_cpu_time_are_in_the_results(sweeps: Sweeps) -> None:
    plan = load_sweep(write_sweep(sweeps.folder, base=JOB, seeds=[3]))
    results = sweep(plan, out=sweeps.out, console=Console(quiet=True), jobs=2)
    for row in results.rows:
        assert (row["status"], row["steps"], row["samples"]) == ("completed", 48, 4800)
        run = sweeps.out / row["run"]
        summary, curve = RunReader(run).last_summary() or {}, curve_of(run, "auc")
        assert len(curve) == 3 and 0 < curve[0][0] < curve[-1][0] <= row["total_bytes"] / 1e6
        assert curve[-1][0] > 0.95e-6 * row["total_bytes"]  # calls of the end are still to come
        assert row["bytes_per_sample"] == pytest.approx(summary["bytes"]["per_sample"])
        assert 0 < row["cpu_s_per_sample"] < 0.1
    assert [row["auc"] for row in sweeps.rows()] == [str(row["auc"]) for row in results.rows]


@every(("seeds", "code", "says"), [("", 2, "error: "), ("1", 0, "")])
def test_the_command_s_exit_code_and_its_one_line(
    tmp_path: Path, sweeps: Sweeps, seeds: str, code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeps = Sweeps(tmp_path)
    sweeps.run(seeds=[1])
    monkeypatch.setattr("shardkeep.experiments.runner.starting", lambda *_: contextlib.nullcontext(StandIns()))
    done = CliRunner().invoke(app, ["sweep", str(tmp_path / "sweep.yaml"), "--out", str(sweeps.out), "--seeds", seeds])
    assert (done.exit_code, len(done.stderr.splitlines())) == (code, int(bool(says)))
    assert done.stderr.startswith(says)
    assert (", 2 of them done" in done.stdout) == (code == 0)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--out .*file/out: cannot be written"):
        sweep(load_sweep(write_sweep(tmp_path)), out=tmp_path / "file" / "out", console=Console(quiet=True), jobs=1,
              starter=StandIns())  # fmt: skip
