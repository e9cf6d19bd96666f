"""The state of a run folder for the page: read step by step, bounded, and in agreement with summary.json."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.errors import UserError
from shardkeep.page.records import RunRecords
from shardkeep.page.series import Series, interpolate
from shardkeep.page.state import RunState
from shardkeep.records.lines import Tail
from shardkeep.records.telemetry_file import TelemetryFile
from tests.support.cases import every
from tests.support.seen_runs import NOON, event, progress, telemetry
from tests.support.simulated_runs import STATES, Scene, State, write_simulated_run
from tests.support.simulated_telemetry import FLOPS_PER_S

SECTIONS = {
    "overview", "warnings", "curves", "steps", "tables", "bytes", "staleness", "members", "timeline", "checkpoints",
    "config", "dense",
}  # fmt: skip


def live(**changes: Any) -> Scene:
    """A scene whose last record is a moment old."""
    return Scene(now=datetime.now(), coordinator_pid=os.getpid(), **{"state": "running", **changes})


def sections(run: Path) -> dict[str, Any]:
    return RunState(run).sections()


def append(path: Path, *records: Any, end: str = "\n") -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join(json.dumps(record) for record in records) + end)


def test_a_finished_run_agrees_with_its_summary(tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", Scene(restarted_server=1))
    seen, summary = sections(run), json.loads((run / "summary.json").read_text())
    overview = seen["overview"]
    assert overview["state"] == "completed"
    assert (overview["step"], overview["samples"]) == (summary["steps"], summary["samples"])
    assert overview["samples_per_s"] == summary["samples_per_s"]
    assert {m["key"]: m["value"] for m in overview["evaluation"]}["auc"] == summary["eval"]["auc"]
    assert {d["name"]: d["bytes"] for d in seen["bytes"]["directions"]} == {
        name: sum(parts.values()) if isinstance(parts, dict) else parts
        for name, parts in summary["bytes"].items()
        if name in ("push", "pull", "tower", "read", "control")
    }
    assert {row["name"]: row["rows"] for row in seen["tables"]["rows"]} == {
        t["name"]: t["rows"] for t in summary["tables"]
    }
    assert overview["recoveries"] == len(summary["recoveries"]) == 1
    assert seen["dense"]["choices"].startswith("amp ")
    rates = ("flops_per_s", "flops_per_s_alone")
    assert [seen["dense"][key] for key in rates] == [summary["tower"][key] for key in rates]


def test_the_dense_model_of_a_job_that_runs_has_the_rate_of_its_newest_record(tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", live())
    state = RunState(run)
    assert state.sections()["dense"]["flops_per_s"] == FLOPS_PER_S
    compiled = {"flops_per_s": 7e9, "compile_s": 13.5, "compile_rss_bytes": 300_000_000}
    append(run / "telemetry.jsonl", telemetry(0, "worker", 0, **compiled), telemetry(0, "worker", 1, flops_per_s=9e9))
    found = state.sections()["dense"]
    assert (found["flops_per_s"], found["compile_s"], found["compile_bytes"]) == (7e9, 13.5, 300_000_000)
    assert found["flops_per_s_alone"] is None, "the products are made alone at the end"


@every(
    ("state", "servers", "workers"),
    [*((state, 2, 2) for state in STATES), ("running", 0, 1), ("finished", 0, 1), ("running", 8, 64)],
)
def test_every_state_gives_every_section_as_json(tmp_path: Path, state: State, servers: int, workers: int) -> None:
    seen = sections(write_simulated_run(tmp_path / "run", Scene(state=state, servers=servers, workers=workers)))
    assert seen.keys() == SECTIONS
    json.dumps(seen, allow_nan=False)


def test_a_job_in_trouble_has_the_slow_worker_first(tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", live(workers=4, slow_worker=2))
    steps = sections(run)["steps"]
    assert steps[0]["index"] == 2 and steps[0]["ratio"] > 1.4 > steps[1]["ratio"]
    assert sorted(row["index"] for row in steps) == [0, 1, 2, 3]


def test_times_of_a_step_are_means_over_30_seconds_of_one_process(tmp_path: Path) -> None:
    def record(seconds: float, *, steps: int, ms: float, pid: int = 1) -> Any:
        return telemetry(seconds, "worker", 0, steps=steps, step_ms={"total": ms, "backward": ms}, pid=pid,
                         wait_ms={"server 0": ms / 10})  # fmt: skip

    (tmp_path / "config.yaml").write_text("name: job\n")
    state = RunState(tmp_path, clock=lambda: NOON.timestamp())
    path = tmp_path / "telemetry.jsonl"
    append(path, record(0, steps=1000, ms=900.0), record(40, steps=30, ms=100.0), record(45, steps=10, ms=200.0))
    (row,) = state.sections()["steps"]
    assert (row["total"], row["waits"]) == (pytest.approx(125.0), {"server 0": pytest.approx(12.5)})
    append(path, record(50, steps=5, ms=60.0, pid=2))
    assert [row["total"] for row in state.sections()["steps"]] == [pytest.approx(60.0)]


def test_the_death_of_a_coordinator_is_counted(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: job\n")
    died = [{"role": "coordinator", "index": 0, "cause": "the coordinator was restarted"}]
    append(tmp_path / "metrics.jsonl", event(5, "it resumed", kind="phase", phase="recovery", died=died))
    append(tmp_path / "telemetry.jsonl", telemetry(9, "coordinator", 0), telemetry(9, "server", 0))
    members = RunState(tmp_path, clock=lambda: NOON.timestamp()).sections()["members"]
    assert {m["role"]: m["deaths"] for m in members} == {"coordinator": 1, "server": 0}


def test_records_are_read_as_they_come_and_half_a_line_waits(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: job\n")
    state = RunState(tmp_path, clock=lambda: NOON.timestamp())
    assert state.sections()["overview"]["step"] is None
    append(tmp_path / "metrics.jsonl", progress(0, 10))
    append(tmp_path / "metrics.jsonl", progress(1, 20), end="")
    assert state.sections()["overview"]["step"] == 10
    append(tmp_path / "metrics.jsonl")
    assert state.sections()["overview"]["step"] == 20


def test_damaged_lines_and_files_do_not_take_the_page_away(tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", Scene())
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
    (tmp_path / "config.yaml").write_text("name: job\n")
    append(tmp_path / "metrics.jsonl", *[progress(10 * i, 100 * i) for i in range(41)])
    left = RunState(tmp_path, clock=lambda: NOON.timestamp() + 400).sections()["overview"]["left_s"]
    assert left == pytest.approx(600)  # 6,000 of 10,000 steps, 10 a second


def test_bytes_of_a_worker_that_died_are_still_counted(tmp_path: Path) -> None:
    def counted(seconds: float, pid: int, num_bytes: int) -> Any:
        totals = {"push": {"values": num_bytes}, "pull": {}, "tower": {}, "read": {}, "control": 0}
        return {
            **telemetry(seconds, "worker", 0, samples=100, bytes=totals, fp32_bytes={"push": 2 * num_bytes}),
            "pid": pid,
        }

    append(tmp_path / "telemetry.jsonl", counted(0, 1, 100), counted(5, 1, 300), counted(10, 2, 50))
    records = RunRecords(tmp_path)
    records.refresh()
    assert records.counts.bytes_by_part == {"push": {"values": 350}, "control": {"": 0}, "fp32": {"push": 700}}


def test_bytes_of_training_points_lie_between_the_counts(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: job\n")
    counted = {"kind": "eval", "step": 40, "auc": 0.7, "train_samples": 4000, "train_bytes": {"total": 8000}}
    append(
        tmp_path / "metrics.jsonl", progress(0, 10), progress(1, 20), progress(2, 40), {**progress(3, 40), **counted}
    )
    curves = RunState(tmp_path).sections()["curves"]
    assert [row[3] for row in curves["training"]["rows"]] == [2000, 4000, 8000]
    assert curves["evaluation"]["rows"][0][3] == 8000


def test_bytes_between_evaluations_come_from_all_workers_and_from_those_that_died(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: job\n")

    def counted(index: int, pid: int, samples: int, num_bytes: int) -> Any:
        totals = {"push": {"values": num_bytes}, "pull": {"ids": num_bytes}, "tower": {}, "read": {"values": 9}}
        return {**telemetry(0, "worker", index, samples=samples, bytes=totals), "pid": pid}

    append(
        tmp_path / "telemetry.jsonl",
        counted(1, 2, 1000, 30),
        counted(0, 1, 1000, 20),
        counted(1, 3, 2000, 10),
        counted(0, 1, 2000, 50),
    )
    append(tmp_path / "metrics.jsonl", progress(0, 10), progress(1, 20))
    curves = RunState(tmp_path).sections()["curves"]
    assert [row[3] for row in curves["training"]["rows"]] == [100, 180]


def test_a_long_run_has_a_bounded_number_of_points_and_its_newest_one() -> None:
    series = Series(most=100)
    for step in range(12_345):
        series.add((step, 0.5))
    rows = series.rows
    assert 50 <= len(rows) <= 101
    assert (rows[0], rows[-1]) == ((0, 0.5), (12_344, 0.5))
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


def test_earlier_points_stay_when_one_is_added() -> None:
    series = Series(most=100)
    for step in range(140):
        series.add((step,))
    before = series.rows
    series.add((140,))
    assert series.rows[: len(before) - 1] == before[:-1]


@every(("x", "y"), [(0, 0), (5, 50), (10, 100), (15, 100), (11, 100), (21, None), (-1, None)])
def test_interpolation(x: float, y: float | None) -> None:
    assert interpolate(x, [(0, 0), (10, 100), (20, 100)]) == y


def test_the_time_line_has_lives_deaths_and_recoveries(tmp_path: Path) -> None:
    member = {"role": "server", "index": 0}
    (tmp_path / "config.yaml").write_text("name: job\n")
    append(
        tmp_path / "metrics.jsonl",
        event(0, "server 0 (pid 5 on 127.0.0.1) registered", phase="registered", member=member),
        event(1, "generation 1 formed", tables=[]),
        event(10, "server 0 (pid 5 on 127.0.0.1) ended: killed", lost="server", lost_index=0),
        event(10, "recovering", phase="recovering", reason="server 0 (pid 5 on 127.0.0.1) ended: killed"),
        event(12, "server 0 (pid 6 on 127.0.0.1) registered", phase="registered", member=member),
        event(13, "training resumes", kind="phase", phase="recovery", seconds=3.0),
        event(30, "server 0 (pid 6 on 127.0.0.1) left with code 0", phase="left", member=member, code=0),
    )
    line = RunState(tmp_path).sections()["timeline"]
    noon = NOON.timestamp()
    assert [(s["from"] - noon, s["to"] - noon, s["end"]) for s in line["spans"]] == [(0, 10, "died"), (12, 30, "left")]
    assert [mark["kind"] for mark in line["marks"]] == ["generation", "death", "recovery"]


def test_events_of_an_earlier_version_are_shown_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: job\n")
    texts = ["server 0 (pid 5 on 127.0.0.1) registered", "recovering: nobody knows", "warning: slow"]
    lost = event(4, "server 0 died", lost="server", lost_index=0)
    append(tmp_path / "metrics.jsonl", *(event(at, text) for at, text in enumerate(texts)), lost)
    state = RunState(tmp_path, serving=True).sections()
    assert [mark["text"] for mark in state["timeline"]["marks"]] == [*texts, "server 0 died"]
    assert state["timeline"]["spans"] == [] and state["overview"]["state"] == "recovering"


def test_settings_that_differ_from_the_defaults_are_listed(tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", Scene(compression=True))
    changed = dict(sections(run)["config"]["changed"])
    assert "compression.push.values" in changed and "liveness.lease_s" not in changed and "data.root" not in changed


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        RunState(tmp_path)
    with pytest.raises(UserError, match="there is no such folder"):
        RunState(tmp_path / "nothing")


def test_a_log_is_its_end_and_only_of_a_process_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: job\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "server-0.log").write_text("".join(f"line {i}\n" for i in range(20_000)))
    state = RunState(tmp_path)
    text = state.log("server", 0)
    assert text is not None and text.endswith("line 19999\n") and len(text) <= 64 << 10
    assert text.startswith("line ")
    assert state.log("server", 1) is None and state.log("../config", 0) is None


def test_a_page_follows_telemetry_over_generations(tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", Scene(state="running", restarted_server=1, compression=True))
    path = run / "telemetry.jsonl"
    size, inode = path.stat().st_size, path.stat().st_ino
    followed = RunState(run)
    before = followed.sections()
    (*_, newest) = (
        r for r in map(json.loads, path.read_text().splitlines()) if (r["role"], r["index"]) == ("worker", 0)
    )
    file = TelemetryFile(path, most_bytes=size + 5000)
    for more in (1, 2):
        push = {part: count + more * 1000 for part, count in newest["bytes"]["push"].items()}
        file.append({**newest, "bytes": {**newest["bytes"], "push": push}})
    assert path.stat().st_ino != inode and path.stat().st_size < 0.6 * size
    after, fresh = followed.sections(), RunState(run).sections()
    for name in ("overview", "bytes", "members", "steps", "staleness"):
        assert after[name] == fresh[name], name
    pushed = [next(d["bytes"] for d in seen["bytes"]["directions"] if d["name"] == "push") for seen in (before, after)]
    assert pushed[1] == pushed[0] + 2000 * len(newest["bytes"]["push"])
    assert [row["rows"] for row in after["tables"]["rows"]] == [row["rows"] for row in before["tables"]["rows"]]


def test_of_a_long_telemetry_file_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    append(path, *[{"number": i} for i in range(1000)])
    tail = Tail(path, most_bytes=100)
    assert [record.others["number"] for record in tail][-1] == 999
    append(path, {"number": 1000})
    assert [record.others["number"] for record in tail] == [1000]
