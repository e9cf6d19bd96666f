"""`shardkeep sweep`: runs the jobs of a plan one after the other by `shardkeep train`, and never one that is done.

OUT/                         with runs by name as jobs (launch/out_folder.py)
  results.csv summary.json   record.py
  report.html plots/         report.py, plots.py
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from shardkeep.base.config.differences import differences
from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import JobError, JobStopped, UserError
from shardkeep.base.machine.versions import commit, versions
from shardkeep.base.plugging.modules import check_found
from shardkeep.config import JobConfig, stored_config
from shardkeep.core_plan import worker_threads
from shardkeep.launch.out_folder import holding, job_arguments
from shardkeep.launch.processes.children import SHARDKEEP, Child, child_environment, wait_all
from shardkeep.launch.stopping.interrupts import Interrupts
from shardkeep.records.lines import Tail
from shardkeep.records.training import Progress
from shardkeep.run.origin.code import PACKAGE, code_of
from shardkeep.run.reader import RunReader
from shardkeep.sweep.plan import PlannedRun, SweepPlan
from shardkeep.sweep.record import write_results
from shardkeep.sweep.report import write_report
from shardkeep.sweep.results import Results, collect, read_summary
from shardkeep.view.screen import Screen

TRAIN = (*SHARDKEEP, "train")
POLL_S = 0.1
ORDERLY_S = 5.0
"""Seconds a run gets after Ctrl-C to stop; then a second request ends it at once."""
AT_ONCE_S = 20.0
HOPELESS = 3
"""When none of the first so many runs has completed, the others are not tried."""


class Failure(NamedTuple):
    """A run that was tried and did not complete: its name, the exit code of `shardkeep train`, and why."""

    name: str
    code: int
    text: str


def sweep(plan: SweepPlan, *, out: Path, console: Console, train: Sequence[str] = TRAIN) -> Results:
    """Runs what is not done of `plan` and writes the results; blocks until all has been tried.

    Args:
        plan: What to run.
        out: Folder of the sweep; made if missing, continued with if it is there.
        console: Where progress is shown.
        train: The command that runs a job; it gets the job's file and --run-dir.

    Returns the results of all runs that are done, when that is every run.

    Raises:
        UserError: The folder cannot be used, or holds runs of another base; or the first runs all failed by the
            user's input.
        JobStopped: Somebody stopped it; results so far are written.
        JobError: Some runs failed; results of the others are written.
    """
    folder = SweepFolder(out)
    for run in plan.runs:
        check_found(run.config.own_modules, (plan.code_folder, run.config.data.root))
    with holding(out, what="sweep") as lock:
        done = [run for run in plan.runs if folder.is_done(run, plan.code_folder)]
        left = [run for run in plan.runs if run not in done]
        say = partial(console.print, soft_wrap=True, markup=False)
        names, seeds = ", ".join(variant.name for variant in plan.variants), ", ".join(map(str, plan.seeds))
        say(f"{len(plan.runs)} runs into {out}: {names}; seeds {seeds}")
        if done:
            say(f"{len(done)} of {len(plan.runs)} runs are done already")
        try:
            failures = _run_all(plan, left, folder, console, train, lock)
        finally:
            say("writing results and plots")
            results = collect(plan, folder.runs, shlex.join(["shardkeep", "sweep", str(plan.path), "--out", str(out)]))
            write_results(results, out)
        say(f"written: {', '.join(str(path) for path in write_report(results, out, say=say))}")
    if failures:
        raise _verdict(failures, plan, completed=len(results.completed))
    return results


def _run_all(
    plan: SweepPlan, left: Sequence[PlannedRun], folder: SweepFolder, console: Console, train: Sequence[str], lock: int
) -> list[Failure]:
    failures: list[Failure] = []
    completed, screen = len(plan.runs) - len(left), Screen(console)
    with Interrupts() as interrupts, contextlib.ExitStack() as stack:
        stack.callback(screen.end_bar)
        interrupts.tolerated = 1_000_000
        interrupts.notice = "stopping the run; what is done is kept"
        for run in left:
            number = plan.runs.index(run) + 1
            head = f"run {number}/{len(plan.runs)} {run.name}:"
            child = folder.start(run, number, train, plan.code_folder, lock)
            if not console.is_terminal:
                screen.phase(head, "started")
            show = partial(_show, screen, head, number - 1, len(plan.runs))
            _follow(child, Tail(folder.runs / run.name / "metrics.jsonl"), show, interrupts)
            if interrupts.count:
                raise JobStopped(f"stopped with {completed} of {len(plan.runs)} runs done; the same command continues")
            if folder.is_done(run, plan.code_folder):
                completed += 1
                screen.phase(head, _outcome(folder, run))
                continue
            failures.append(folder.failure(run, child))
            screen.phase(head, f"failed: {failures[-1].text}")
            if not completed and len(failures) >= HOPELESS:
                console.print(f"none of the first {HOPELESS} runs has completed; the others are not tried")
                break
    return failures


def _show(screen: Screen, head: str, before: int, total: int, text: str, share: float) -> None:
    """Of a run after so many others of `total`: what it does, and the share that is done."""
    screen.working("sweep", f"{head} {text}", (before + share) / total)


def _follow(child: Child, tail: Tail, show: Callable[[str, float], None], interrupts: Interrupts) -> None:
    """Shows a run until it has ended. After Ctrl-C it gets its time to stop, and then less to stop at once."""
    show("starting", 0.0)
    try:
        while child.running and not interrupts.count:
            time.sleep(POLL_S)
            for record in tail:
                if isinstance(record, Progress):
                    step, total = record.step or 0, record.total_steps or 0
                    show(f"step {step:,}/{total:,}  {record.samples_per_s or 0:,.0f} samples/s", step / max(1, total))
        for patience_s in (ORDERLY_S, AT_ONCE_S):
            if child.running:
                os.kill(child.pid, signal.SIGINT)
            wait_all([child], Deadline(patience_s))
    finally:
        child.kill()


class SweepFolder:
    """The folder of one sweep: what is done there, and what is to be done."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.runs = self.path / "runs"

    def is_done(self, run: PlannedRun, code_folder: Path) -> bool:
        """Whether it completed with this very config and code. Raises UserError when it did with another."""
        folder = self.runs / run.name
        summary = read_summary(folder)
        if summary is None or summary.get("status") != "completed":
            return False
        done, planned = (_compared(each).model_dump(mode="json") for each in (stored_config(folder), run.config))
        differs = next(differences(done, planned), None)
        before, now = RunReader(folder).code, code_of(run.config, code_folder)
        file = next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)
        if differs is None and file is None:
            if (scores := summary.get("eval") or {}).get(run.key("auc")) is None:
                why = scores.get(run.key("note"), "the job has no evaluation data")
                raise UserError(f"--out {self.path}: {run.name} has no AUC, by which a sweep compares: {why}")
            return True
        setting = "" if differs is None else f"{differs.key}={differs.before!r}, but now the sweep says {differs.now!r}"
        other = setting or _other_code(str(file), summary)
        raise UserError(
            f"--out {self.path}: {run.name} is done with {other}; give --out a new folder, or "
            f"delete {folder} to run it again"
        )

    def start(self, run: PlannedRun, number: int, train: Sequence[str], code_folder: Path, lock: int) -> Child:
        """Starts a run in a new folder; what an earlier attempt left is deleted. Raises UserError."""
        try:
            if (target := self.runs / run.name).exists():
                shutil.rmtree(target)
            words = job_arguments(self.path, run.name, run.config, code_folder)
            with (log := self.path / "logs" / f"{run.name}.log").open("wb") as output:
                process = subprocess.Popen(
                    [*train, *words, "--parent-pipe"],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=child_environment(os.environ, threads=worker_threads(run.config)),
                    start_new_session=True,  # Ctrl-C reaches the sweep alone
                    pass_fds=(lock,),
                )
            return Child("train", number, process, log=log)
        except OSError as error:
            raise UserError(f"--out {self.path}: cannot be written ({error.strerror or error})") from error

    def failure(self, run: PlannedRun, child: Child) -> Failure:
        """Of a run that has ended: why it did not complete, as it said itself."""
        summary, death = read_summary(self.runs / run.name) or {}, child.death()
        code, words = (0, "") if death is None else (death.code, death.last_words)
        return Failure(run.name, code, str(summary.get("message") or words or f"exit code {code}"))


def _compared(config: JobConfig) -> JobConfig:
    """The job, less the folder of a sweep that reads nothing from there: its file may move."""
    if config.data.source != "synthetic" or ":" in config.model.name:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"root": "."})})


def _other_code(file: str, summary: Mapping[str, Any]) -> str:
    """`another net.py than there is now`, or the commits of shardkeep."""
    if file != PACKAGE:
        return f"another {file} than there is now"
    before = summary.get("commit") or (summary.get("versions") or {}).get(PACKAGE, "")
    return f"another code of shardkeep: {before}, now {commit() or versions()[PACKAGE]}"


def _outcome(folder: SweepFolder, run: PlannedRun) -> str:
    summary = read_summary(folder.runs / run.name) or {}
    auc, per_sample = (summary.get("eval") or {}).get(run.key("auc")), (summary.get("bytes") or {}).get("per_sample")
    parts = [
        "" if auc is None else f"AUC {auc:.4f}",
        "" if per_sample is None else f"{per_sample:,.1f} bytes per sample",
        f"{summary.get('wall_s', 0.0):.1f} s",
    ]
    return ", ".join(part for part in parts if part)


def _verdict(failures: Sequence[Failure], plan: SweepPlan, *, completed: int) -> JobError | UserError:
    names = "; ".join(f"{failure.name}: {failure.text}" for failure in failures[:3])
    more = f"; and {len(failures) - 3} more" if len(failures) > 3 else ""
    if not completed and all(failure.code == 2 for failure in failures):
        return UserError(f"no run could start: {failures[0].name}: {failures[0].text}")
    return JobError(
        f"{len(failures)} of {len(plan.runs)} runs failed ({names}{more}); the same command tries them again"
    )
