"""Running a sweep: what is done is not run again, what fails does not stop the others, and a killed one continues."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shardkeep.base.errors import JobError, UserError
from shardkeep.cli.main import app
from shardkeep.sweep.plan import load_sweep
from shardkeep.sweep.results import Results, read_summary
from shardkeep.sweep.sweep import sweep
from tests.support.cases import every
from tests.support.forked import started
from tests.support.forked_sweeps import forked_runs, started_sweep
from tests.support.sweep_runs import BASE, TRAIN, write_run, write_sweep


class Sweeps:
    """Sweeps into one folder, by the stand-in for `shardkeep train`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.printed = ""

    def run(self, **changes: Any) -> Results:
        console = io.StringIO()
        try:
            plan = load_sweep(write_sweep(self.folder, **changes))
            return sweep(plan, out=self.out, console=Console(file=console, width=200), train=TRAIN)
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
def sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sweeps]:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what plots show is tested elsewhere
    with forked_runs():
        yield Sweeps(tmp_path)


ALL = ["fp32-seed1", "fp16-seed1", "fp32-seed2", "fp16-seed2"]


def test_runs_are_made_once_a_failed_one_again_and_of_another_seed_or_recipe_only_what_is_new(sweeps: Sweeps) -> None:
    sweeps.tell("fail", "fp16-seed1")
    with pytest.raises(JobError) as caught:
        sweeps.run()
    assert sweeps.started() == ALL, "a failed run stops no other"
    failed = "1 of 4 runs failed (fp16-seed1: this run fails on purpose); the same command tries them again"
    assert str(caught.value) == failed
    printed = sweeps.printed.splitlines()
    assert printed[0] == f"4 runs into {sweeps.out}: fp32, fp16; seeds 1, 2"
    assert "run 2/4 fp16-seed1: failed: this run fails on purpose" in printed
    assert "run 4/4 fp16-seed2: AUC 0.7920, 138.0 bytes per sample, 2.0 s" in printed
    assert [row["status"] for row in sweeps.rows()] == ["completed", "missing", "completed", "completed"]
    assert "fp16-seed1" in (sweeps.out / "report.html").read_text().split("Not completed")[1].split("</ul>")[0]
    sweeps.tell("fail")
    results = sweeps.run()
    assert sweeps.started() == ["fp16-seed1"] and [run.status for run in results.runs] == ["completed"] * 4
    sweeps.run()
    assert sweeps.started() == [] and "4 of 4 runs are done already" in sweeps.printed
    assert all((sweeps.out / name).exists() for name in ("results.csv", "summary.json", "report.html"))
    assert [row["status"] for row in sweeps.rows()] == ["completed"] * 4
    assert [row["run"] for row in sweeps.rows()] == [f"runs/{name}" for name in ALL]  # no path of this machine
    own = {"name": "few", "settings": {"compression.push": {"keep": 0.5, "pool_rows": 10}}}
    sweeps.run(recipes=["fp32", own], seeds=[1, 2, 3])
    assert sweeps.started() == ["few-seed1", "few-seed2", "fp32-seed3", "fp16-seed3", "few-seed3"]


@every(("as_user", "kind"), [(True, UserError), (False, JobError)])
def test_when_the_first_runs_all_fail_the_others_are_not_tried(
    tmp_path: Path, sweeps: Sweeps, as_user: bool, kind: type[Exception]
) -> None:
    sweeps = Sweeps(tmp_path)
    sweeps.tell("fail", *ALL)
    if as_user:  # as a data file that is not there: exit code 2
        sweeps.tell("as-user")
    with pytest.raises(kind, match="fp32-seed1: this run fails on purpose"):
        sweeps.run()
    assert sweeps.started() == ALL[:3]


def test_runs_of_other_own_code_are_refused_and_the_file_is_named(sweeps: Sweeps) -> None:
    """The model and the source that the config names, and what they import."""
    files = {
        "net.py": "from parts.layers import WIDTH\nimport torch\n",
        "parts/layers.py": "from deep import WIDTH\n",
        "deep/__init__.py": "from .sizes import WIDTH\n",
        "deep/sizes.py": "WIDTH = 3\n",
        "reader.py": "def read(split): ...\n",
        "plots.py": "# nothing that a run imports\n",
    }
    for name, text in files.items():
        (sweeps.folder / name).parent.mkdir(exist_ok=True)
        (sweeps.folder / name).write_text(text)
    own = {"model.name": "net:Net", "data": {"source": "reader:read"}}
    base = {**BASE, "data": {}}
    sweeps.run(settings=own, base=base, seeds=[1])
    sweeps.started()
    (sweeps.folder / "plots.py").write_text("# edited\n")
    sweeps.run(settings=own, base=base, seeds=[1])
    assert "2 of 2 runs are done already" in sweeps.printed
    for edited in files.keys() - {"plots.py"}:
        (sweeps.folder / edited).write_text(files[edited] + "# edited\n")
        code, printed = ended(started_sweep(sweeps.folder))  # in another process: one reads code once
        assert code == 2 and f"fp32-seed1 is done with another {edited} than there is now; give --out a new" in printed
        (sweeps.folder / edited).write_text(files[edited])
    assert sweeps.started() == []


def test_runs_of_another_base_or_code_of_shardkeep_or_without_the_metric_that_decides_are_refused(
    sweeps: Sweeps,
) -> None:
    sweeps.run(seeds=[1])
    before, run = sweeps.rows(), sweeps.out / "runs" / "fp32-seed1"

    def refused(why: str, settings: Any = None, **facts: Any) -> None:
        """With these facts in the summary of the run."""
        summary = json.loads((run / "summary.json").read_text()) | facts
        (run / "summary.json").write_text(json.dumps(summary))
        with pytest.raises(UserError, match=f"fp32-seed1 {why}"):
            sweeps.run(settings=settings, seeds=[1])

    base = "is done with train.batch_size=50, but now the sweep says 25; give --out a new"
    refused(base, {"train.batch_size": 25})
    assert sweeps.rows() == before
    no_auc = {"auc": None, "note": "all 9 labels are 0; AUC needs both classes"}
    refused("has no AUC, by which a sweep compares: all 9 labels are 0", eval=no_auc)
    code = json.loads((run / "code.json").read_text())
    code["digests"]["shardkeep"] = "of another commit"
    (run / "code.json").write_text(json.dumps(code))
    for commit, says in (("0123", "another code of shardkeep: 0123, now "), (None, "9.9, now ")):
        refused(f"is done with .*{says}", commit=commit, versions={"shardkeep": "9.9"})
    (run / "code.json").unlink()  # of an earlier version
    refused("is done with .*9.9, now ")


@every(
    ("settings", "refused"),
    [({}, ""), ({"model.name": "net:Net"}, r"fp32-seed1 is done with data\.root=")],
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


def wait_for(path: Path, limit_s: float = 150.0) -> None:
    until = time.monotonic() + limit_s
    while not path.exists():
        assert time.monotonic() < until, f"{path} is not there after {limit_s:g} s"
        time.sleep(0.01)


@pytest.mark.waits_for_processes
def test_a_killed_sweep_leaves_nothing_running_and_the_next_goes_on(sweeps: Sweeps) -> None:
    sweeps.tell("hang", "fp32-seed2")
    write_sweep(sweeps.folder)
    first = started_sweep(sweeps.folder)
    wait_for(sweeps.out / "runs" / "fp32-seed2")
    with pytest.raises(UserError, match="another sweep is running in this folder"):
        sweeps.run()
    first.kill()
    ended(first)
    sweeps.tell("hang")
    sweeps.run()  # waits for the run that the killed one had started: it ends with its stdin
    assert (sweeps.out / "orphan-ended").exists()
    assert sweeps.started() == [*ALL[:3], *ALL[2:]]
    assert [row["status"] for row in sweeps.rows()] == ["completed"] * 4


@pytest.mark.waits_for_processes
def test_ctrl_c_ends_the_run_and_keeps_what_is_done(sweeps: Sweeps) -> None:
    sweeps.tell("hang", "fp16-seed1")
    write_sweep(sweeps.folder)
    process = started_sweep(sweeps.folder)
    wait_for(sweeps.out / "runs" / "fp16-seed1")
    process.send_signal(signal.SIGINT)
    code, printed = ended(process)
    assert code == 1
    assert "stopped with 1 of 4 runs done; the same command continues" in printed
    assert [row["status"] for row in sweeps.rows()] == ["completed", "missing", "missing", "missing"]


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
        wait_for(tmp_path / "run" / "metrics.jsonl")
        assert job.stdin is not None
        job.stdin.close()
        assert job.wait(60) == 1
    finally:
        job.kill()
        job.wait()
        for stream in (job.stdout, job.stderr):
            stream.close()
    assert (read_summary(tmp_path / "run") or {})["status"] == "stopped"


@pytest.mark.waits_for_processes
@pytest.mark.slow
def test_a_real_job_is_run_and_its_ledger_curve_and_cpu_time_are_told(sweeps: Sweeps) -> None:
    plan = load_sweep(write_sweep(sweeps.folder, base=JOB, seeds=[3]))
    fp16 = plan.runs[1]
    write_run(sweeps.out / "runs" / fp16.name, fp16.config.to_yaml(), auc=0.5)  # done already
    fp32, _ = sweep(plan, out=sweeps.out, console=Console(quiet=True)).runs
    assert (fp32.status, fp32.summary["steps"], fp32.samples) == ("completed", 48, 4800)
    assert [(point.step, point.samples) for point in fp32.curve] == [(16, 1600), (32, 3200), (48, 4800)]
    assert 0 < fp32.curve[0].train_bytes < fp32.curve[-1].train_bytes <= fp32.train_bytes
    assert fp32.curve[-1].train_bytes > 0.95 * fp32.train_bytes  # calls of the end are still to come
    assert fp32.bytes_per_sample == pytest.approx(fp32.summary["bytes"]["per_sample"])
    assert fp32.cpu_s_per_sample is not None and 0 < fp32.cpu_s_per_sample < 0.1
    assert sweeps.rows()[0]["status"] == "completed"


@every(("seeds", "code", "said"), [([], 2, "error: "), ([1], 0, "")])
def test_the_command_s_exit_code_and_its_one_line(
    tmp_path: Path, sweeps: Sweeps, seeds: list[int], code: int, said: str
) -> None:
    sweeps = Sweeps(tmp_path)
    path = write_sweep(sweeps.folder, seeds=seeds)
    for run in load_sweep(path).runs if seeds else ():
        write_run(sweeps.out / "runs" / run.name, run.config.to_yaml(), auc=0.8)
    done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(sweeps.out)])
    assert (done.exit_code, len(done.stderr.splitlines())) == (code, int(bool(said)))
    assert done.stderr.startswith(said)
    assert ("2 of 2 runs are done already" in done.stdout) == (code == 0)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--out .*file/out: cannot be written"):
        sweep(load_sweep(write_sweep(tmp_path)), out=tmp_path / "file" / "out", console=Console(quiet=True))
