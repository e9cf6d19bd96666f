"""The state of a run folder for the page: read step by step, bounded, and in agreement with summary.json."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.yaml_text import read_text, read_yaml, write_yaml
from shardkeep.config import load_config
from shardkeep.loop.joining import loop_config
from shardkeep.page.comparison import DASH, compared
from shardkeep.page.records import RunRecords
from shardkeep.page.series import Series, interpolate
from shardkeep.page.state import RunState
from tests.support.cases import every
from tests.support.seen_runs import NOON, Record, append, at, event, progress, state_of, telemetry
from tests.support.simulated_runs import RECORDED, STATES, Scene, State, write_simulated_run

SECTIONS = {
    "overview", "warnings", "curves", "steps", "tables", "bytes", "staleness", "members", "timeline", "checkpoints",
    "config", "dense",
}  # fmt: skip


def sections(run: Path) -> dict[str, Any]:
    return RunState(run).sections()


def test_a_finished_run_agrees_with_its_summary(tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", Scene(restarted_server=1, compression=True))
    seen, summary = sections(run), json.loads((run / "summary.json").read_text())
    overview = seen["overview"]
    assert overview["state"] == "completed"
    assert (overview["step"], overview["samples"]) == (summary["steps"], summary["samples"])
    assert overview["samples_per_s"] == summary["samples_per_s"]
    assert {m["key"]: m["value"] for m in overview["evaluation"]}["auc"] == summary["eval"]["auc"]
    sent = {name: sum(summary["bytes"][name].values()) for name in ("push", "pull", "tower", "read")}
    shown = {direction["name"]: direction["bytes"] for direction in seen["bytes"]["directions"]}
    assert shown == sent | {"control": summary["bytes"]["control"]}
    tables = {table["name"]: table["rows"] for table in summary["tables"]}
    assert {row["name"]: row["rows"] for row in seen["tables"]["rows"]} == tables
    assert overview["recoveries"] == len(summary["recoveries"]) == 1
    assert seen["dense"]["choices"].startswith("amp ")
    assert seen["dense"]["flops_per_s"] == summary["tower"]["flops_per_s"]
    changed = dict(seen["config"]["changed"])
    assert "compression.push.values" in changed and "liveness.lease_s" not in changed and "data.root" not in changed


def test_a_running_job_has_the_rates_of_its_newest_record_and_its_slow_worker_first(tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", Scene(now=datetime.now(), state="running", workers=4, slow_worker=2))
    state = RunState(run)
    steps = state.sections()["steps"]
    assert steps[0]["index"] == 2 and steps[0]["ratio"] > 1.4 > steps[1]["ratio"]
    assert sorted(row["index"] for row in steps) == [0, 1, 2, 3]
    assert state.sections()["dense"]["flops_per_s"] == RECORDED["worker"]["flops_per_s"]
    compiled = {"flops_per_s": 7e9, "compile_s": 13.5, "compile_rss_bytes": 300_000_000}
    append(run / "telemetry.jsonl", telemetry(0, "worker", 0, **compiled), telemetry(0, "worker", 1, flops_per_s=9e9))
    found = state.sections()["dense"]
    assert (found["flops_per_s"], found["compile_s"], found["compile_bytes"]) == (7e9, 13.5, 300_000_000)


@every(
    ("state", "servers", "workers"),
    [*((state, 2, 2) for state in STATES), ("running", 0, 1), ("finished", 0, 1), ("running", 8, 64)],
)
def test_every_state_gives_every_section_as_json(tmp_path: Path, state: State, servers: int, workers: int) -> None:
    scene = Scene(state=state, servers=servers, workers=workers, steps=600)
    run = write_simulated_run(tmp_path / "run", scene)
    assert load_config(run / "config.yaml").workers == workers
    assert (run / "summary.json").exists() == (state in ("finished", "failed", "stopped"))
    seen = sections(run)
    assert seen.keys() == SECTIONS
    json.dumps(seen, allow_nan=False)


def test_times_of_a_step_are_means_over_30_seconds_of_one_process(tmp_path: Path) -> None:
    def record(seconds: float, *, steps: int, ms: float, pid: int = 1) -> Any:
        return telemetry(seconds, "worker", 0, steps=steps, step_ms={"total": ms, "backward": ms}, pid=pid,
                         wait_ms={"server 0": ms / 10})  # fmt: skip

    old, *two = record(0, steps=1000, ms=900.0), record(40, steps=30, ms=100.0), record(45, steps=10, ms=200.0)
    state = state_of(tmp_path, old, *two)
    (row,) = state.sections()["steps"]
    assert (row["total"], row["waits"]) == (pytest.approx(125.0), {"server 0": pytest.approx(12.5)})
    append(tmp_path / "telemetry.jsonl", record(50, steps=5, ms=60.0, pid=2))
    assert [row["total"] for row in state.sections()["steps"]] == [pytest.approx(60.0)]


def test_a_record_without_a_step_does_not_hide_where_steps_went(tmp_path: Path) -> None:
    times = {"step_ms": {"total": 8.0, "pull_wait": 2.0}, "wait_ms": {"server 0": 2.0}}
    none = {"step_ms": {"total": 0.0, "pull_wait": 0.0}, "wait_ms": {}}
    records = telemetry(1, "worker", 0, step=10, steps=10, **times), telemetry(6, "worker", 0, step=10, steps=0, **none)
    (row,) = state_of(tmp_path, *records).sections()["steps"]
    assert (row["total"], row["parts"], row["waits"]) == (8.0, {"pull_wait": 2.0}, {"server 0": 2.0})


def test_the_death_of_a_coordinator_is_counted(tmp_path: Path) -> None:
    died = [{"role": "coordinator", "index": 0, "cause": "the coordinator was restarted"}]
    recovery = event(5, "it resumed", kind="phase", phase="recovery", died=died)
    state = state_of(tmp_path, recovery, telemetry(9, "coordinator", 0), telemetry(9, "server", 0))
    assert {m["role"]: m["deaths"] for m in state.sections()["members"]} == {"coordinator": 1, "server": 0}


def test_records_are_read_as_they_come_and_half_a_line_waits(tmp_path: Path) -> None:
    state, path = state_of(tmp_path), tmp_path / "metrics.jsonl"
    assert state.sections()["overview"]["step"] is None
    append(path, progress(0, 10))
    append(path, progress(1, 20), end="")
    assert state.sections()["overview"]["step"] == 10
    append(path)
    assert state.sections()["overview"]["step"] == 20


def test_damaged_lines_and_files_do_not_take_the_page_away(tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", Scene(steps=600))
    for name in ("summary.json", "summary.1.json", "coordinator.1.json"):
        (run / name).write_text("{")
    (run / "members.json").write_text("[1]")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n{"kind": \n[1, 2]\n"text"\n{"kind": "progress", "step": null}\n')
    (run / "telemetry.jsonl").write_bytes(
        b'{"kind": "telemetry", "role": "worker"}\n{"kind": "telemetry", "role": 7}\n{}\n'
    )
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.write_text("damaged")
    seen = RunState(run, clock=lambda: 2 * time.time()).sections()
    json.dumps(seen, allow_nan=False)
    assert seen["overview"]["state"] == "gone" and seen["checkpoints"] == []


def test_the_time_left_follows_the_last_minutes(tmp_path: Path) -> None:
    state = state_of(tmp_path, *[progress(10 * i, 100 * i) for i in range(41)], now=400)
    assert state.sections()["overview"]["left_s"] == pytest.approx(600)  # 6,000 of 10,000 steps, 10 per second


def sent(index: int, pid: int, samples: int | None, seconds: float = 0.0, **ways: dict[str, int]) -> Record:
    """The telemetry record of a worker with what it has sent. `samples`: None = it counts none."""
    totals = {"push": {}, "pull": {}, "tower": {}, "read": {}, "control": 0, **ways}
    trained = {} if samples is None else {"samples": samples}
    return {**telemetry(seconds, "worker", index, bytes=totals, **trained), "pid": pid}


def test_bytes_of_a_worker_that_died_are_still_counted(tmp_path: Path) -> None:
    def counted(seconds: float, pid: int, num_bytes: int) -> Record:
        return {**sent(0, pid, 100, seconds, push={"values": num_bytes}), "fp32_bytes": {"push": 2 * num_bytes}}

    append(tmp_path / "telemetry.jsonl", counted(0, 1, 100), counted(5, 1, 300), counted(10, 2, 50))
    records = RunRecords(tmp_path)
    records.refresh()
    assert records.counts.bytes_by_part == {"push": {"values": 350}, "control": {"": 0}, "fp32": {"push": 700}}


def test_bytes_of_training_points_lie_between_the_counts(tmp_path: Path) -> None:
    counted = {"kind": "eval", "step": 40, "auc": 0.7, "train_samples": 4000, "train_bytes": {"total": 8000}}
    records = [progress(0, 10), progress(1, 20), progress(2, 40), {**progress(3, 40), **counted}]
    curves = state_of(tmp_path, *records).sections()["curves"]
    assert [row[3] for row in curves["training"]["rows"]] == [2000, 4000, 8000]
    assert curves["evaluation"]["rows"][0][3] == 8000


def test_bytes_between_evaluations_come_from_all_workers_and_from_those_that_died(tmp_path: Path) -> None:
    counts = [(1, 2, 1000, 30), (0, 1, 1000, 20), (1, 3, 2000, 10), (0, 1, 2000, 50)]
    records = [
        sent(index, pid, samples, push={"values": size}, pull={"ids": size}, read={"values": 9})
        for index, pid, samples, size in counts
    ]
    curves = state_of(tmp_path, *records, progress(0, 10), progress(1, 20)).sections()["curves"]
    assert [row[3] for row in curves["training"]["rows"]] == [100, 180]


def test_a_loop_of_one_s_own_that_reports_no_samples_and_no_loss_has_curves_over_steps(tmp_path: Path) -> None:
    records: list[Record] = []
    for n in range(1, 5):
        step = {"time": at(n), "kind": "progress", "step": 10 * n, "loop": True, "step_ms": {"total": 20.0}}
        worker = sent(0, 1, None, n, pull={"values": 6000 * n}, push={"values": 4000 * n})
        records += [step, {**worker, "step": 10 * n, "steps": 10}]
    scored = {"time": at(4), "kind": "eval", "step": 40, "hits": 0.5}
    state = state_of(tmp_path, *records, scored, config=loop_config(2, 0, "bounded", None).to_yaml())
    seen = state.sections()
    overview, curves = seen["overview"], seen["curves"]
    assert overview["loop"] and (overview["step"], overview["steps_per_s"]) == (40, 50.0)
    assert [overview[key] for key in ("samples", "samples_per_s", "loss", "total_steps", "left_s")] == [None] * 5
    columns = curves["training"]["columns"]
    rows = [dict(zip(columns, row, strict=True)) for row in curves["training"]["rows"]]
    assert [(row["step"], row["bytes"], row["steps_per_s"]) for row in rows] == [
        (10 * n, 10_000 * n, 50.0) for n in range(1, 5)
    ]
    assert {(row["samples"], row["loss"], row["samples_per_s"]) for row in rows} == {(None, None, None)}
    (evaluation,) = curves["evaluation"]["rows"]
    assert evaluation[1:] == [40, None, 40_000, 0.5] and not state.records.losses


def test_a_long_run_has_a_bounded_number_of_points_that_stay_and_its_newest_one() -> None:
    series, before = Series(most=100), list[Any]()
    for step in range(12_345):
        before = series.rows if step == 140 else before
        series.add((step, 0.5))
        assert step != 140 or series.rows[: len(before) - 1] == before[:-1], "earlier points stay when one is added"
    rows = series.rows
    assert 50 <= len(rows) <= 101
    assert (rows[0], rows[-1]) == ((0, 0.5), (12_344, 0.5))
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


@every(("x", "y"), [(0, 0), (5, 50), (10, 100), (15, 200), (11, 120), (20, 300), (21, None), (-1, None)])
def test_interpolation(x: float, y: float | None) -> None:
    assert interpolate(x, [(0, 0), (10, 100), (20, 300)]) == y


def test_the_time_line_has_lives_deaths_and_recoveries(tmp_path: Path) -> None:
    member = {"role": "server", "index": 0}
    state = state_of(
        tmp_path,
        event(0, "server 0 (pid 5 on 127.0.0.1) registered", phase="registered", member=member),
        event(1, "generation 1 formed", tables=[]),
        event(10, "server 0 (pid 5 on 127.0.0.1) ended: killed", lost="server", lost_index=0),
        event(10, "recovering", phase="recovering", reason="server 0 (pid 5 on 127.0.0.1) ended: killed"),
        event(12, "server 0 (pid 6 on 127.0.0.1) registered", phase="registered", member=member),
        event(13, "training resumes", kind="phase", phase="recovery", seconds=3.0),
        event(30, "server 0 (pid 6 on 127.0.0.1) left with code 0", phase="left", member=member, code=0),
    )
    line, noon = state.sections()["timeline"], NOON.timestamp()
    assert [(s["from"] - noon, s["to"] - noon, s["end"]) for s in line["spans"]] == [(0, 10, "died"), (12, 30, "left")]
    assert [mark["kind"] for mark in line["marks"]] == ["generation", "death", "recovery"]


def test_events_without_a_phase_are_shown_as_they_are(tmp_path: Path) -> None:
    texts = ["server 0 (pid 5 on 127.0.0.1) registered", "recovering: nobody knows", "warning: slow"]
    lost = event(4, "server 0 died", lost="server", lost_index=0)
    state = state_of(tmp_path, *(event(at, text) for at, text in enumerate(texts)), lost, serving=True).sections()
    assert [mark["text"] for mark in state["timeline"]["marks"]] == [*texts, "server 0 died"]
    assert state["timeline"]["spans"] == [] and state["overview"]["state"] == "recovering"


def test_a_log_is_its_end_and_only_of_a_process_of_the_run(tmp_path: Path) -> None:
    state = state_of(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "server-0.log").write_text("".join(f"line {i}\n" for i in range(20_000)))
    text = state.log("server", 0)
    assert text is not None and text.endswith("line 19999\n") and len(text) <= 64 << 10
    assert text.startswith("line ")
    assert state.log("server", 1) is None and state.log("../config", 0) is None


# ---- runs side by side ----


Rows = dict[str, list[str]]


def results_of(*runs: Path) -> tuple[Rows, Rows]:
    states = [RunState(run) for run in runs]
    found = compared(states, [state.sections() for state in states])
    results, settings = ({name: texts for name, *texts in found[key]} for key in ("results", "settings"))
    return results, settings


def test_settings_have_defaults_where_a_run_leaves_them_out_and_long_values_from_where_they_differ(
    tmp_path: Path,
) -> None:
    runs = [write_simulated_run(tmp_path / name, Scene(compression=name == "b", steps=300)) for name in "ab"]
    for run, width in zip(runs, (8, 16), strict=True):
        config = read_yaml(read_text(run / "config.yaml"))
        config["model"]["hidden"] = [64] * 40 + [width] + [4] * 40
        (run / "config.yaml").write_text(write_yaml(config))
    _, settings = results_of(*runs)
    assert all(text.startswith("...") and text.endswith("...") and len(text) <= 66 for text in settings["model.hidden"])
    assert [f" {width}, 4" in text for text, width in zip(settings["model.hidden"], (8, 16), strict=True)] == [True] * 2
    assert settings["compression.push.values"] == ["fp32", "int8"] and "default" not in str(settings)
    assert "name" not in settings and "data.root" not in settings and "seed" not in settings


def test_metrics_of_test_data_and_of_the_best_model_stand_beside_the_last_ones(tmp_path: Path) -> None:
    runs = [write_simulated_run(tmp_path / name, Scene(seed=seed, steps=300)) for seed, name in enumerate("ab")]
    summary = json.loads((runs[1] / "summary.json").read_text())
    summary["test"] = {"step": 9, "auc": 0.71234, "logloss": 0.5, "samples": 10}
    summary["best"] = {"step": 9, "auc": 0.81234, "samples": 10}
    for name in ("summary.json", "summary.1.json"):
        (runs[1] / name).write_text(json.dumps(summary))
    results, _ = results_of(*runs)
    assert results["best AUC"] == [DASH, "0.8123"] and DASH not in results["AUC"]
    assert results["test AUC"] == [DASH, "0.7123"] and results["AUC"][1] == f"{summary['eval']['auc']:.4f}"
    assert results["samples"][1] == f"{summary['samples']:,}" and results["state"] == ["completed"] * 2


def test_workers_are_compared_with_one_alone_whose_steps_do_the_same(tmp_path: Path) -> None:
    scenes = {
        "one": Scene(workers=1, step_ms=20.0, steps=300),
        "two": Scene(workers=2, step_ms=25.0, steps=300),
        "x": Scene(compression=True, steps=300),
        "alone": Scene(servers=0, workers=1, steps=300),
        "begun": Scene(state="begun", steps=300),
    }
    runs = {name: write_simulated_run(tmp_path / name, scene) for name, scene in scenes.items()}
    results, _ = results_of(runs["one"], runs["two"], runs["x"])
    assert results["a worker's speed, beside one alone"] == ["100 %", "80 %", DASH]
    results, _ = results_of(runs["two"], runs["x"])
    assert "a worker's speed, beside one alone" not in results
    results, _ = results_of(runs["alone"], runs["two"])
    for name in ("sent for training", "bytes a sample"):
        assert results[name][0] == DASH and results[name][1].split()[1] in ("B", "kB", "MB", "GB")
    results, _ = results_of(runs["begun"], runs["begun"])
    assert results["longest own work of a step, ms"] == [DASH, DASH] and results["recoveries"] == ["0", "0"]
