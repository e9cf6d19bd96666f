"""Callbacks of jobs in one process. Of jobs with processes: tests/launch/test_supervised_jobs.py."""

from __future__ import annotations

import math
import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardkeep
from shardkeep import UserError
from shardkeep.errors import JobError, JobStopped
from shardkeep.launch.callback_calls import CallbackCalls
from shardkeep.launch.stopping.interrupts import Interrupts
from shardkeep.records.lines import record_of
from shardkeep.run.folder import RunFolder
from tests.support.callbacks import Notes, fails
from tests.support.cases import every
from tests.support.configs import ALONE
from tests.support.records import records_in

TINY: dict[str, Any] = {
    **ALONE,
    "model": {**ALONE["model"], "dropout": 0.2},
    "eval": {"every_steps": 10},
    "checkpoint": {"every_steps": 20},
    "train": {**ALONE["train"], "report_every_s": 0.001},
}
STEPS = 40


def train(run: Path, *callbacks: Any, **changes: Any) -> shardkeep.callbacks.Summary:
    return shardkeep.train({**TINY, **changes}, run_dir=run, quiet=True, callbacks=callbacks)


def test_each_event_comes_once_in_order_with_the_figures_of_the_run_folder_and_changes_no_bit(tmp_path: Path) -> None:
    def draw(_: Any) -> None:
        torch.manual_seed(1), torch.rand(3), np.random.rand(3), random.random()

    notes = Notes(on_progress=draw, on_checkpoint=draw)
    summary = train(tmp_path / "run", notes)
    assert summary.state_digest == train(tmp_path / "alone").state_digest
    notes.check_order()
    (start,), records = notes.of("on_start"), records_in(tmp_path / "run" / "metrics.jsonl")
    assert (start.step, start.samples, start.run_dir) == (0, 0, (tmp_path / "run").absolute())
    assert start.config.train.batch_size == 25
    progress = [record for record in records if record["kind"] == "progress"]
    assert [event.loss for event in notes.of("on_progress")] == [record["loss"] for record in progress]
    last = notes.of("on_progress")[-1]
    assert (last.step, last.total_steps, last.samples, last.epoch) == (STEPS, STEPS, 1000, 0)
    assert notes.steps("on_evaluation") == [10, 20, 30, 40]
    (*_, evaluation), evaluated = notes.of("on_evaluation"), summary.eval
    assert evaluated is not None and summary.best is None
    assert (evaluation.metrics["auc"], evaluation.metrics["logloss"]) == (evaluated.auc, evaluated.logloss)
    assert (evaluation.samples, evaluation.trained_samples) == (200, 1000) and evaluation.bytes_per_sample > 0
    assert not {"samples", "step", "train_samples"} & set(evaluation.metrics)
    assert notes.steps("on_checkpoint") == [20, 40]
    assert all(event.path.is_dir() and event.size_bytes > 0 for event in notes.of("on_checkpoint"))
    assert notes.of("on_end") == [summary]
    assert notes.methods.index("on_evaluation") < notes.methods.index("on_checkpoint")


def test_a_resume_reports_its_own_steps(tmp_path: Path) -> None:
    train(tmp_path / "run")
    notes = Notes()
    summary = shardkeep.resume(tmp_path / "run", overrides=["train.epochs=2"], quiet=True, callbacks=[notes])
    notes.check_order()
    (start,) = notes.of("on_start")
    assert (start.step, start.samples, start.config.train.epochs) == (STEPS, 1000, 2)
    assert notes.steps("on_evaluation") == [50, 60, 70, 80] and min(notes.steps("on_progress")) > STEPS
    assert notes.of("on_evaluation")[0].trained_samples == 250
    assert notes.of("on_end") == [summary] and summary.steps == 2 * STEPS


@every("method", ["on_progress", "on_evaluation", "on_checkpoint"])
def test_an_error_of_a_callback_stops_the_job_with_a_checkpoint_and_train_raises_it(
    tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = OSError("no\nspace")
    failing, other = Notes(**{method: fails(error, at=20)}), Notes()
    config = {**TINY, "train": {**TINY["train"], "epochs": 2}}
    with pytest.raises(OSError) as caught:
        shardkeep.train(config, run_dir=tmp_path / "run", callbacks=[failing, other])
    assert caught.value is error and caught.value.__cause__ is None
    for notes in (failing, other):
        notes.check_order()
    assert failing.methods[-2:] == [method, "on_end"]
    summary = RunFolder(tmp_path / "run").summary() or {}
    # The next checkpoint, of step 40, waits for the one of step 20, whose event is reported then at the latest.
    assert summary["status"] == "stopped" and 20 <= summary["steps"] < 2 * STEPS
    assert summary["message"] == f"stopped at step {summary['steps']}: Notes.{method} raised OSError: no space"
    assert f"callback  Notes.{method} raised OSError: no space; the job stops\n" in capsys.readouterr().out
    assert other.steps("on_checkpoint")[-1] == summary["steps"]
    assert other.of("on_end")[0].message == summary["message"]
    if method == "on_progress":
        whole = shardkeep.train(config, run_dir=tmp_path / "whole", quiet=True)
        resumed = shardkeep.resume(tmp_path / "run", quiet=True)
        assert resumed.steps == 2 * STEPS and resumed.state_digest == whole.state_digest


def test_errors_at_the_last_step_and_of_on_end_leave_a_completed_job_and_other_callbacks(tmp_path: Path) -> None:
    after = Notes()
    last = Notes(on_evaluation=fails(ZeroDivisionError(), at=STEPS), on_end=fails(ValueError("late")))
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "run", last, after)
    after.check_order()
    assert after.of("on_end")[0].status == "completed"
    assert (RunFolder(tmp_path / "run").summary() or {})["status"] == "completed"


def test_an_error_of_on_start_trains_nothing(tmp_path: Path) -> None:
    before, failing, after = Notes(), Notes(on_start=fails(ValueError("no"))), Notes()
    with pytest.raises(ValueError, match=r"^no$"):
        train(tmp_path / "run", before, failing, after)
    assert (before.methods, failing.methods, after.methods) == (["on_start", "on_end"], ["on_start"], [])
    summary = RunFolder(tmp_path / "run").summary() or {}
    assert (summary["status"], summary["steps"]) == ("stopped", 0)
    assert summary["message"] == "stopped before the first step: Notes.on_start raised ValueError: no"
    assert before.of("on_end")[0].status == "stopped"


def test_the_error_of_the_job_comes_before_one_of_on_end_and_a_mistake_in_the_config_calls_nothing(
    tmp_path: Path,
) -> None:
    notes, uncalled = Notes(on_end=fails(ValueError("late"))), Notes()
    with pytest.raises(UserError, match="no_such_tower"):
        train(tmp_path / "run", notes, model={"name": "json:no_such_tower"})
    assert notes.methods == ["on_start", "on_end"]
    assert notes.of("on_end")[0].status == "failed" and "no_such_tower" in notes.of("on_end")[0].message
    with pytest.raises(UserError, match="no_such"):
        train(
            tmp_path / "none",
            uncalled,
            data={"train": ["no_such.csv"], "label": "a", "dense": ["b"], "split": "random"},
        )
    assert uncalled.calls == []


def test_a_second_ctrl_c_ends_a_callback_that_hangs(tmp_path: Path) -> None:
    def hang(_: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        threading.Event().wait(100)

    notes = Notes(on_progress=hang)
    with pytest.raises(JobStopped, match=r"^stopped at step "):
        train(tmp_path / "run", notes)
    assert notes.methods == ["on_start", "on_progress", "on_end"] and notes.of("on_end")[0].status == "stopped"


class Misspelt(shardkeep.Callback):
    def on_evaluaton(self, event: Any) -> None: ...


class Foreign:
    def on_fit_end(self) -> None: ...


@every(
    ("callbacks", "message"),
    [
        (Notes(), "callbacks: Notes is no list"),
        ("Notes", "callbacks: str is no list"),
        ([Notes], r"callbacks: Notes is a class; write Notes\(\)"),
        ([Notes(), object()], "callbacks: object has no method on_start; allowed: a list of objects of subclasses"),
        (
            [Misspelt()],
            r"callbacks: Misspelt.on_evaluaton is never called; did you mean on_evaluation\? allowed: "
            "on_start, on_progress, on_evaluation, on_checkpoint, on_end$",
        ),
        ([Foreign()], r"callbacks: Foreign.on_fit_end is never called; allowed: on_start,"),
    ],
)
def test_what_is_no_callback_is_refused_in_one_line(tmp_path: Path, callbacks: Any, message: str) -> None:
    run = tmp_path / "run"
    with pytest.raises(UserError, match=f"^{message}"):
        shardkeep.train(TINY, run_dir=run, callbacks=callbacks)
    with pytest.raises(UserError, match=f"^{message}"):
        shardkeep.resume(run, callbacks=callbacks)
    assert not run.exists()


def started(tmp_path: Path, *callbacks: Any, interrupts: Interrupts | None = None) -> CallbackCalls:
    calls = CallbackCalls(callbacks, interrupts or Interrupts(), lambda _: None)
    calls.start(shardkeep.callbacks.StartEvent(shardkeep.JobConfig.model_validate(TINY), tmp_path, 0, 0))
    return calls


OTHERS: list[dict[str, Any]] = [
    {"kind": "progress", "index": 1, "step": 9},
    {"kind": "phase", "phase": "checkpoint", "step": 9, "text": "no checkpoint at step 9: disk full"},
    {"kind": "phase", "phase": "checkpoint", "step": 9, "every_steps": 5, "text": "one every 5 steps"},
    {"kind": "event", "text": "formed"},
    {},
]
"""Records of another worker, of a failed checkpoint, of its interval, of an event, and of nothing."""


def test_steps_that_a_recovery_repeats_and_another_start_are_reported_once_and_other_records_not(
    tmp_path: Path,
) -> None:
    notes = Notes()
    calls = started(tmp_path, notes)
    for record in OTHERS:
        calls.record(record_of(record))
    calls.start(shardkeep.callbacks.StartEvent(shardkeep.JobConfig(), tmp_path, 2, 20))  # as `shardkeep scale` does
    for step in (1, 2, 3, 2, 3, 4):
        for record in (
            {"kind": "progress"},
            {"kind": "eval", "auc": None, "logloss": step},
            {"kind": "phase", "phase": "checkpoint", "bytes": 1},
        ):
            calls.record(record_of({"role": "worker", "index": 0, "step": step, **record}))
    assert notes.methods.count("on_start") == 1 and len(notes.calls) == 1 + 3 * 4
    for method in ("on_progress", "on_evaluation", "on_checkpoint"):
        assert notes.steps(method) == [1, 2, 3, 4]
    assert [dict(event.metrics) for event in notes.of("on_evaluation")] == [{"logloss": n} for n in (1, 2, 3, 4)]


def test_a_record_without_figures_is_reported_as_unknown(tmp_path: Path) -> None:
    notes = Notes()
    calls = started(tmp_path, notes)
    calls.record(record_of({"kind": "progress", "step": 3, "loss": None, "epoch": math.nan}))
    calls.record(record_of({"kind": "eval", "step": 3}))
    (progress,), (evaluation,) = notes.of("on_progress"), notes.of("on_evaluation")
    assert math.isnan(progress.loss) and (progress.epoch, progress.total_steps) == (0, 0)
    assert math.isnan(evaluation.bytes_per_sample) and evaluation.metrics == {}


@every(
    ("deeds", "ends_with", "raised"),
    [
        ({"on_progress": KeyboardInterrupt()}, JobStopped("stopped at step 3"), KeyboardInterrupt),
        ({"on_end": ValueError("late")}, JobStopped("stopped at step 3"), JobStopped),
        ({"on_progress": ValueError("mine")}, JobError("worker 0 ended"), JobError),
        ({"on_end": ValueError("late")}, None, ValueError),
    ],
    ids=["Ctrl-C in a callback", "a stop by the user", "a failure of the job", "a job that is completed"],
)
def test_of_several_errors_at_the_end_the_first_cause_is_raised(
    tmp_path: Path, deeds: dict[str, BaseException], ends_with: JobError | None, raised: type[BaseException]
) -> None:
    interrupts, notes = Interrupts(), Notes(**{method: fails(error) for method, error in deeds.items()})
    interrupts.tolerated = 1
    calls = started(tmp_path, notes, interrupts=interrupts)
    calls.record(record_of({"kind": "progress", "step": 3}))
    assert interrupts.count == ("on_progress" in deeds)
    with pytest.raises(raised), calls.ending(RunFolder(tmp_path)):
        if ends_with is not None:
            raise ends_with
    (summary,) = notes.of("on_end")
    assert (summary.status, summary.message) == ("failed", str(ends_with))
