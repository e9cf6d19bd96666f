"""What a person sees of a job, where there is a terminal and where there is none; what a log collector gets of it."""

from __future__ import annotations

import io
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardkeep.base.logs.log import LogFormat, configure
from shardkeep.records.lines import record_of
from shardkeep.run.folder import NO_SUMMARY
from shardkeep.view.run_view import RunView, clock_text
from shardkeep.view.screen import Screen, closing_rows, console, metric_name, peak_memory, quality, step_parts
from shardkeep.view.screen_log import LAUNCHER, ScreenLog
from shardkeep.view.text_tables import table_of
from tests.support.cases import every

SUMMARY: dict[str, Any] = {
    "steps": 490,
    "samples": 1000,
    "wall_s": 42.0,
    "samples_per_s": 24310.4,
    "eval": {"auc": 0.78, "best_auc": 0.79, "logloss": 0.44, "normalized_entropy": 0.8, "calibration": 1.01},
    "bytes": {"pull": {"ids": 1000, "values": 3000}, "push": {"ids": 500}, "tower": {"total": 9000, "values": 9000}},
    "staleness": {"1": 1, "0": 3},
    "step_ms": {"total": 9.2, "data": 0.1, "backward": 2.0, "dense_reduce": 4.2, "forward": 1.8, "other": 1.1},
    "processes": [{"role": "server", "index": i, "peak_rss_bytes": 1e6 * i} for i in range(3)],
    "tables": [{"name": "a", "rows": 10, "bytes": 640}, {"name": "b", "rows": 5, "bytes": 360}],
}


def screen(*, terminal: bool) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    return Screen(Console(file=out, force_terminal=terminal, width=110, color_system=None)), out


def progress(step: int, *, total: int = 10, **figures: Any) -> Any:
    figures = {"loss": 0.5, "samples_per_s": 1234.5, **figures}
    return record_of({"kind": "progress", "step": step, "total_steps": total, **figures})


def test_without_a_terminal_progress_is_plain_lines() -> None:
    view, out = screen(terminal=False)
    view.phase("kernels", "ready in 0.1 s")
    view.record(record_of({"kind": "phase", "phase": "tower", "text": "the choice of compiling is for logs"}))
    view.record(progress(1))
    view.record(progress(2))
    for step, auc in ((3, 0.75), (6, None), (10, 0.7531)):
        view.record(record_of({"kind": "eval", "step": step, "auc": auc, "logloss": 0.4}))
    scored = {"step": 9, "samples": 1234, "auc": 0.75, "normalized_entropy": 0.4}
    view.record(record_of({"kind": "phase", "phase": "progressive", "text": "to step 9  auc 0.7500", **scored}))
    view.record(progress(10, loss=None, samples_per_s=None))
    assert out.getvalue().splitlines() == [
        "kernels   ready in 0.1 s",
        "train     step 1/10  loss 0.5000  1,234 samples/s",
        "evaluate  step 3  AUC 0.7500  logloss 0.4000",
        "evaluate  step 6  AUC -  logloss 0.4000",
        "evaluate  step 10  AUC 0.7531  logloss 0.4000",
        "progressive to step 9  AUC 0.7500  normalized entropy 0.4000  on 1,234 samples before training on them",
        "train     step 10/10  loss -  - samples/s  AUC 0.7531 (+0.0031)",
    ]


def test_the_closing_table_has_every_figure_that_was_promised(tmp_path: Path) -> None:
    rows = dict(closing_rows(SUMMARY, tmp_path))
    assert rows["speed"] == "24,310 samples/s"
    assert rows["AUC"] == "0.7800 (best possible 0.7900)"
    assert rows["logloss"] == "0.4400"
    assert rows["bytes per sample"] == "pulled 4.0  pushed 0.5  tower 9.0"
    assert rows["staleness"] == "0 steps 75 %, 1 step 25 %"
    assert rows["mean step"] == "9.2 ms: tower reduce 4.2, backward 2.0, forward 1.8, the rest 1.2"
    assert rows["tables"] == "2 with 15 rows, 1.0 kB on the servers"
    assert rows["peak memory"] == "3 servers up to 2 MB"
    assert rows["run folder"] == str(tmp_path) and "profile" not in rows
    (tmp_path / "profile").mkdir()
    assert dict(closing_rows(SUMMARY, tmp_path))["profile"] == f"{tmp_path}/profile"
    alone = {**SUMMARY, "processes": [{"role": "worker", "index": 0, "peak_rss_bytes": 1e6}], "staleness": {"0": 9}}
    rows = dict(closing_rows(alone, tmp_path))
    assert rows["tables"] == "2 with 15 rows, 1.0 kB" and not {"bytes per sample", "staleness"} & rows.keys()
    assert step_parts({"total": 1.0, "data": 0.0, "other": 1.0}) == "1.0 ms: the rest 1.0"
    processes = [{"role": r, "peak_rss_bytes": b} for r, b in (("coordinator", 2e6), ("worker", 3e6), ("worker", 5e9))]
    assert peak_memory(processes) == "coordinator 2 MB, 2 workers up to 5,000 MB"


def test_the_closing_table_of_a_job_without_evaluation_shows_what_there_is() -> None:
    rows = dict(closing_rows({**NO_SUMMARY, "steps": 7, "recoveries": [{}, {"lost_steps": 7}]}, Path("runs/a")))
    assert rows["recoveries"] == "2, 7 steps lost: summary.json reports each"
    assert rows.keys() == {"steps", "recoveries", "run folder"}, "nothing that was not measured"
    view, out = screen(terminal=False)
    view.closing({"status": "completed", **NO_SUMMARY}, Path("runs/a"))
    assert "runs/a" in out.getvalue()


NOTE = "all 9 labels are 0; AUC needs both classes"


@every(
    ("scores", "text"),
    [
        ({"auc": None, "logloss": 0.1, "note": NOTE}, f"AUC -  logloss 0.1000  ({NOTE})"),
        ({"accuracy": 1.0, "note": NOTE}, "accuracy 1.0000"),
        (
            {"auc/a": None, "logloss/a": 0.1, "note/a": NOTE, "auc/b": 0.75, "logloss/b": 0.5},
            f"a: AUC -  logloss 0.1000  ({NOTE})  b: AUC 0.7500  logloss 0.5000",
        ),
        (
            {"mse": 4.0, "rmse": 2.0, "r2": 0.5, "baseline_mse": 9.0, "baseline_rmse": 3.0},
            "MSE 4.0000 (constant mean 9.0000)  RMSE 2.0000 (constant mean 3.0000)",
        ),
    ],
)
def test_quality_has_each_label_by_its_name_what_is_undefined_with_its_note_and_the_constant_mean(
    scores: dict[str, Any], text: str
) -> None:
    assert quality(scores) == text
    rows = closing_rows({"steps": 1, "samples": 9, "eval": scores}, Path("runs/a"))
    assert ("note", NOTE) in rows or "auc" not in scores
    assert ("quality", text) in rows or "auc/a" not in scores


def test_the_best_possible_value_stands_behind_its_metric() -> None:
    scores = {"recall@10": 0.5, "recall@50": 0.75, "best_recall@50": 0.875, "mrr": 0.25}
    rows = dict(closing_rows({**SUMMARY, "eval": scores}, Path("runs/a")))
    assert (rows["recall@10"], rows["recall@50"], rows["mrr"]) == ("0.5000", "0.7500 (best possible 0.8750)", "0.2500")
    assert metric_name("baseline_mse/a") == "MSE/a of the constant mean"


def test_the_table_of_a_resumed_job_says_which_figures_are_the_jobs_and_which_the_last_starts() -> None:
    job = {"starts": 2, "steps": 5000, "samples": 640_000, "wall_s": 90.0, "samples_per_s": 20_000.0}
    summary = {**SUMMARY, "resumed_at": {"samples": 100_000}, "job": job, "starts": [{}, {"from_step": 800}]}
    rows = dict(closing_rows(summary, Path("runs/x")))
    assert rows["steps"] == "5,000 (640,000 samples in 90.0 s over 2 starts, start-up and evaluations included)"
    assert rows["last start"].startswith("steps 800 to ") and rows["last start"].endswith(" samples in 42.0 s)")
    assert rows["speed, last start"] == "24,310 samples/s (20,000 over all starts)"
    assert "mean step, last start" in rows and "speed" not in rows


@every(
    ("records", "text"),
    [
        ([], ""),
        ([{"kind": "eval", "logloss": 0.5, "auc": 0.8}], "AUC 0.8000"),
        ([{"kind": "eval", "rmse": 0.5}, {"kind": "eval", "rmse": 0.25}], "RMSE 0.2500 (-0.2500)"),
        ([{"kind": "eval", "auc/buy": 0.5}, {"kind": "eval", "auc/buy": 0.625}], "AUC/buy 0.6250 (+0.1250)"),
        ([{"kind": "phase", "phase": "progressive", "auc": 0.5}] * 2, "AUC 0.5000 (+0.0000)"),
        ([{"kind": "phase", "phase": "progressive", "auc": 0.5}, {"kind": "eval", "auc": 0.75}], "AUC 0.7500"),
    ],
)
def test_the_trend_is_that_of_the_first_metric(records: list[dict[str, Any]], text: str) -> None:
    view = RunView()
    view.hear(*map(record_of, records))
    assert view.trend == text


def test_the_time_left_is_that_of_the_mean_step_and_counts_anew_when_a_job_goes_back() -> None:
    view, found = RunView(), []
    for seconds, step in ((0, 5), (10, 10), (100, 2), (101, 3), (102, 100)):
        time = datetime.fromtimestamp(1_800_000_000 + seconds).isoformat()
        view.hear(record_of({"kind": "progress", "time": time, "step": step, "total_steps": 100}))
        found.append(view.left_s)
    assert found == [None, 90 * 10 / 5, None, 97.0, 0.0]
    assert clock_text(3661.4) == "1:01:01"


@every("width", [80, 200])
def test_a_bar_with_large_numbers_fits_the_terminal_and_lines_stand_above_it(width: int) -> None:
    out = io.StringIO()
    view = Screen(Console(file=out, force_terminal=True, width=width, color_system=None))
    view.record(record_of({"kind": "phase", "phase": "data", "text": "eager [too short]"}))
    for auc in (0.7781, 0.7812):
        view.record(record_of({"kind": "eval", "step": 100_000, "auc": auc}))
    view.record(progress(123_456, total=585_937, samples_per_s=1e6))
    view.end_bar()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    bars = [line for line in re.split(r"[\r\n]+", shown) if "loss" in line]
    assert "data      eager [too short]" in shown and bars and all(len(line) <= width for line in bars)
    assert all("AUC 0.7812 (+0.0031)" in line and " left" in line for line in bars)
    assert all(("samples/s" in line) == (" elapsed" in line) == (width == 200) for line in bars)


def test_the_closing_table_has_the_warnings_of_the_page() -> None:
    found = [
        {"level": "bad", "text": "the loss rises", "advice": "Lower lr."},
        {"level": "warn", "text": "the loss is 0.65", "advice": "Set train.early_stopping."},
        {"level": "note", "text": "a note", "advice": ""},
    ]
    texts = ["the loss rises. Lower lr.", "the loss is 0.65. Set train.early_stopping.", "a note.", "runs/a"]
    rows = closing_rows(SUMMARY, Path("runs/a"), found)[-4:]
    assert rows == list(zip(("problem", "warning", "note", "run folder"), texts, strict=True))


def test_brackets_of_names_and_values_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(table_of(("setting", "first"), [("data.train", "[/data/clicks.csv]"), ("[red]", "[link]x")]))
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("[/data/clicks.csv]", "[red]", "[link]x"))


# ---- its log ----


@pytest.fixture
def out() -> io.StringIO:
    stream = io.StringIO()
    configure(*LAUNCHER, stream=stream, form=LogFormat.JSON)
    return stream


def test_phases_and_records_are_events_with_their_values(out: io.StringIO) -> None:
    heard: list[Any] = []
    view = ScreenLog(listener=heard.append)
    records = [
        {"time": "now", "kind": "progress", "role": "worker", "index": 0, "step": 5, "loss": 0.5},
        {"kind": "phase", "phase": "checkpoint", "step": 5, "text": "step 5 is kept"},
        {"kind": "event", "text": "worker 1 registered"},
    ]
    view.phase("start", "one process")
    view.working("data", "converting", 0.5)
    for record in records:
        view.record(record_of(record))
    view.end_bar()
    view.closing({"status": "completed", "steps": 5, "eval": {"auc": 0.75}, "bytes": {}}, Path("runs/a"))
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(each["event"], each["step"], each["fields"]) for each in found] == [
        ("start", None, {"text": "one process"}),
        ("progress", 5, {"role": "worker", "index": 0, "loss": 0.5}),
        ("checkpoint", 5, {"text": "step 5 is kept"}),
        ("closing", None, {"run": "runs/a", "status": "completed", "steps": 5, "eval": {"auc": 0.75}}),
    ]
    assert [record.to_dict() for record in heard] == records
