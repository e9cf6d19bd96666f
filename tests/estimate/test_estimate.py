"""The estimate: it agrees with what jobs report, it draws enough of the data, and it says what it could not look at."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from shardkeep.base.errors import ConfigError
from shardkeep.config import JobConfig
from shardkeep.estimate.dry_run import DRAWN_SAMPLES, PLAYED_STEPS, Played, TableRows, drawn_steps
from shardkeep.estimate.estimate import estimate, links_of, memory_of, table_bytes
from shardkeep.estimate.view import show_estimate
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.table.optimizers.adam import AdamConfig
from shardkeep.ps.server.table.policies.config import EvictConfig
from shardkeep.workers.data.sampling import StepSlices
from shardkeep.workers.data.sources.registry import open_data
from tests.support.cases import every
from tests.support.configs import TINY
from tests.support.invoked import invoke
from tests.support.local_job import LocalJob
from tests.support.one_table import OneTable

DATA = {"synthetic": {"train_samples": 4100, "eval_samples": 100, "num_dense": 3, "table_sizes": [50, 900, 90_000]}}
TABLES = {"default": {"dim": 8}, "C2": {"dim": 12, "optimizer": {"name": "adam"}}}
JOB = TINY | {"data": DATA, "tables": TABLES, "train": {"batch_size": 64}}


def job(**more: Any) -> JobConfig:
    return JobConfig.model_validate({**JOB, **more})


def estimated(**more: Any) -> dict[str, Any]:
    return estimate(job(**more), gbit_per_s=10.0)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return estimated()


def shown(found: dict[str, Any], width: int = 100) -> str:
    text = io.StringIO()
    show_estimate(found, Console(file=text, width=width, color_system=None))
    return text.getvalue()


SYNC = {"consistency": {"mode": "sync"}}


@every(
    "more",
    [
        {},
        {**SYNC, "servers": 3, "train": {"batch_size": 32, "accumulate": 3}},
        {"compression": {"push": {"values": "fp16"}, "pull": {"values": "int8"}}},
        {"servers": 0, "workers": 1, "train": {"batch_size": 64, "max_steps": 7}},
    ],
)
def test_the_estimate_agrees_with_what_the_job_reports(more: dict[str, Any]) -> None:
    check_estimate(more)


@pytest.mark.slow
@every("more", [{"workers": 6, **SYNC}, {"train": {"batch_size": 16, "accumulate": 5, "epochs": 2}}])
def test_the_estimate_agrees_with_a_job_of_more_workers_than_are_played_and_with_one_of_two_epochs(
    more: dict[str, Any],
) -> None:
    check_estimate(more)


def check_estimate(more: dict[str, Any]) -> None:
    config = job(**more)
    found = estimate(config, gbit_per_s=10.0)
    summary = LocalJob(config, open_data(config.data, seed=config.seed)).run()
    assert found["job"]["steps"] == summary["steps"]
    # Ranks that are threads ask each other in every step which parameters were used, processes only in the first.
    rel = 0.1 if config.workers > 3 else 0.05
    moved = sum(sum(summary["bytes"][direction].values()) for direction in ("pull", "push", "tower"))
    assert found["bytes_per_sample"] == pytest.approx(moved / summary["samples"], rel=rel)
    by_class = {row["class"]: row["bytes"] for row in found["step"]["traffic"]}
    per_sample = {d: sum(summary["bytes"][d].values()) / summary["samples"] for d in ("pull", "push")}
    for name, counted in per_sample.items():
        estimated = (by_class[name] + by_class[f"{name} answer"]) / found["job"]["step_samples"]
        assert estimated == pytest.approx(counted, rel=0.05)
    for estimated, table in zip(found["tables"], summary["tables"], strict=True):
        kept = config.compression.push.keep
        assert kept * table["rows"] <= estimated["rows"] * 1.1 and estimated["rows"] >= table["rows"] * 0.99
        if kept == 1.0:
            assert estimated["bytes"] == pytest.approx(table["bytes"], rel=0.3, abs=config.servers * 16384)


def test_each_tables_part_of_a_step_is_told() -> None:
    """By hand: 8 bytes for an id and 4 for a value, but C1 is frozen, and C2 has 12 values of 4 and 8 bits."""
    settings = {
        "default": {"dim": 8},
        "C1": {"freeze": True},
        "C2": {"dim": 12, "compression": "safe"},
    }
    found = estimated(tables=settings)
    c1, c2, c3 = found["step"]["tables"]
    unique = [c1["pull_bytes"] / (8 + 8 * 4), c2["push_bytes"] / (8 + 6 + 1), c3["push_bytes"] / (8 + 8 * 4)]
    assert c1["push_bytes"] == 0.0 and c3["pull_bytes"] == pytest.approx(c3["push_bytes"])
    assert c2["pull_bytes"] == pytest.approx(unique[1] * (8 + 12 + 1))
    assert sum(unique) == pytest.approx(2 * found["step"]["distinct_per_worker"], rel=0.05)
    assert [table["rows"] == 0 for table in found["tables"]] == [True, False, False]
    text = shown(found)
    assert "of a table" in text and "0 B" in text.split("of a table")[1]


def test_a_push_takes_the_next_pull_along_where_the_mode_allows_it(plain: dict[str, Any]) -> None:
    for mode, calls in (("bounded", 6), ("sync", 12)):
        step = estimated(servers=3, consistency={"mode": mode})["step"]
        assert step["calls"] == pytest.approx(calls, rel=0.05)
    assert step["ids_per_worker"] == pytest.approx(64 * 3) and 64 < step["distinct_per_worker"] < 64 * 3


def test_the_rows_of_sequences_are_told_and_the_ids_of_each_rank(plain: dict[str, Any]) -> None:
    options = {"categories": 100, "rows": 512, "eval_rows": 50}
    data = {"source": "shardkeep.examples.synthetic.sequences:samples", "options": options}
    train = {"batch_size": 32, "accumulate": 2}
    config = job(data=data, model={"name": "din", "hidden": [4]}, tables={"default": {"dim": 8}}, train=train)
    found = estimate(config, gbit_per_s=10.0)
    assert found["step"]["unpooled"] == {"ids": 32 * 30, "bytes": 32 * 30 * 8 * 4}
    assert "960 ids a micro-batch, whose rows take 30.7 kB, and their gradients as much" in shown(found, 120)
    summary = LocalJob(config, open_data(config.data, seed=config.seed)).run()
    assert summary["ids_per_step"] == {"by_rank": [64 * 31.0] * 2, "largest_over_mean": 1.0}
    assert "unpooled" not in plain["step"]


@every(
    ("spec", "rows"),
    [*((TableSpec(name="t", dim=10, optimizer=AdamConfig()), rows) for rows in (1000, 70_000)),
     (TableSpec(name="t", dim=5, evict=EvictConfig(ttl_steps=9)), 70_000)],
)  # fmt: skip
def test_a_tables_bytes_are_those_of_a_table(spec: TableSpec, rows: int) -> None:
    table = OneTable(spec, seed=1)
    for ids in np.array_split(np.arange(rows, dtype=np.int64), rows // 1000):
        table.apply(ids, np.ones((ids.size, spec.dim), np.float32), step=0)
    sizes = table_bytes(spec, rows)
    assert sizes["bytes"] == pytest.approx(table.size_bytes, rel=0.15)
    assert sizes["weights"] + sizes["slots"] + sizes["ids"] + sizes["index"] <= sizes["bytes"]
    assert (sizes["weights"], sizes["ids"]) == (rows * 4 * spec.dim, rows * 8)
    if spec.dim == 10:
        assert sizes["slots"] == rows * 80
    plain_bytes = table_bytes(spec.model_copy(update={"evict": None}), rows)
    assert "counters" not in plain_bytes and sizes.get("counters", 0) == (rows * 8 if spec.evict else 0)
    assert sizes["bytes"] - plain_bytes["bytes"] == pytest.approx(sizes.get("counters", 0), abs=5000)


def test_a_server_holds_its_share_of_every_table() -> None:
    tables = [TableSpec(name="a", dim=4), TableSpec(name="b", dim=8)]
    rows = {"a": TableRows(1000.0, np.array([0.25, 0.75])), "b": TableRows(400.0, np.array([0.5, 0.5]))}
    found = memory_of(tables, rows)
    assert [server["rows"] for server in found["servers"]] == [450, 950]
    assert [table["rows"] for table in found["tables"]] == [1000, 400]
    assert sum(s["bytes"] for s in found["servers"]) == sum(t["bytes"] for t in found["tables"])


def test_all_steps_of_a_small_data_set_are_drawn_and_a_spread_of_a_large_one() -> None:
    assert drawn_steps(StepSlices(1000, batch_size=100), steps=10) == list(range(10))
    assert drawn_steps(StepSlices(1000, batch_size=100, epochs=3), steps=30) == list(range(10))
    assert drawn_steps(StepSlices(1000, batch_size=100), steps=3) == [0, 1, 2]
    large = drawn_steps(StepSlices(10 * DRAWN_SAMPLES, batch_size=1024), steps=2560)
    assert len(large) == DRAWN_SAMPLES // 1024 > PLAYED_STEPS
    assert large[0] == 0 and 2500 < large[-1] < 2560 and len(set(large)) == len(large)
    assert drawn_steps(StepSlices(100 * DRAWN_SAMPLES, batch_size=2 * DRAWN_SAMPLES), steps=50) == [0]


def test_rows_are_those_of_the_drawn_samples_and_the_text_says_so(
    monkeypatch: pytest.MonkeyPatch, plain: dict[str, Any]
) -> None:
    monkeypatch.setattr("shardkeep.estimate.dry_run.DRAWN_SAMPLES", 1000)
    part = estimated()
    assert (plain["drawn"]["rows_counted"], part["drawn"]["rows_counted"]) == (True, False)
    for some, all_ in zip(part["tables"], plain["tables"], strict=True):
        assert 0 < some["rows"] <= all_["rows"]
    text = shown(part)
    assert "the tables have at least the rows of these" in text
    assert "each server: at least " in text
    assert f">={part['tables'][2]['rows']:,}" in text


def test_the_slower_way_of_a_link_sets_the_pace() -> None:
    bytes_s = {"pull": [1e6, 2e6], "pull answer": [6e6, 5e6], "push": [1e6, 2e6]}
    played = Played(
        steps=1, samples=1, rows={}, counted=True, ids=1.0, unique=1.0, unpooled={}, calls=4.0,
        bytes_S={name: np.array(sizes) for name, sizes in bytes_s.items()}, table_bytes={},
    )  # fmt: skip
    server, worker = links_of(played, {"reduce_bytes_per_worker": 500_000}, job(), 8.0)
    assert (server["in_bytes"], server["out_bytes"], server["bound_ms"]) == (4e6, 6e6, 6.0)
    assert (worker["in_bytes"], worker["out_bytes"], worker["bound_ms"]) == (6e6, 3.5e6, 6.0)


@every("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bandwidth_that_is_none_is_refused(speed: float) -> None:
    with pytest.raises(ConfigError, match=r"--gbit-per-s .*: allowed: a number above 0"):
        estimate(job(), gbit_per_s=speed)


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    return str(tmp_path / "job.yaml")


def test_the_command_prints_tables_or_json_and_starts_no_process(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    code, out, error = invoke("estimate", path)
    assert (code, error) == (0, "")
    assert "tiny: 2 servers, 2 workers, batches of 64 a worker" in out
    assert {"C1", "C2", "C3", "all"} <= {line.split()[0] for line in out.splitlines() if line}
    assert "a link of 10 Gbit/s each way" in out and "no step is shorter than" in out
    assert max(map(len, out.splitlines())) <= 110
    code, out, error = invoke("estimate", path, "--json", "--gbit-per-s", "20", "--set", "servers=5")
    found = json.loads(out)
    assert (code, error, found["gbit_per_s"], len(found["servers"])) == (0, "", 20.0, 5)


def test_the_journal_of_the_busiest_server_grows_by_what_is_pushed_to_it(plain: dict[str, Any]) -> None:
    pushed = {row["class"]: row["bytes"] for row in plain["step"]["traffic"]}["push"]
    size, rate = plain["journal"]["bytes_per_step"], plain["journal"]["most_bytes_per_s"]
    assert pushed / 2 <= size < pushed and rate == pytest.approx(size * 1e3 / plain["bound_ms"])
    assert "the busiest server's journal grows by" in shown(plain)
    for none in ({"journal": "off"}, {"restarts": 0}):
        assert "journal" not in shown(estimated(recovery=none))
    assert "servers: 0: nothing travels between processes" in shown(estimated(servers=0, workers=1))


def test_a_wrong_setting_is_one_line_and_code_2(path: str) -> None:
    code, out, error = invoke("estimate", path, "--set", "tables.C9.dim=4")
    assert (code, out, error.count("\n")) == (2, "", 1) and "C9" in error


@every("width", [50, 200])
def test_no_figure_is_cut_on_any_terminal(width: int, plain: dict[str, Any]) -> None:
    long = "a_table_with_a_long_name" * 3
    text = shown({**plain, "tables": [{**plain["tables"][0], "name": long}, *plain["tables"][1:]]}, width)
    assert "\u2026" not in text and max(map(len, text.splitlines())) <= width
    assert f"{plain['tables'][0]['rows']:,}" in text and ("slots" in text) == (width == 200)


def test_without_data_there_is_the_memory_of_a_million_rows_of_each_table(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "data: {source: csv, train: [nowhere.csv], label: y, sparse: [a, {column: b, table: t}, {column: c, table: t}]}"
    )
    code, out, error = invoke("estimate", str(tmp_path / "job.yaml"))
    assert (code, error) == (0, "")
    assert "nowhere.csv: no such file" in " ".join(out.split())
    code, out, _ = invoke("estimate", str(tmp_path / "job.yaml"), "--json")
    found = json.loads(out)
    assert [(t["name"], t["rows"]) for t in found["tables"]] == [("a", 1_000_000), ("t", 1_000_000)]
    assert "links" not in found


# Tables with policies: ids that get a row, ids that are only counted, capacities


def test_a_table_has_no_more_rows_than_its_capacity() -> None:
    tables = [
        TableSpec(name="a", dim=4, evict=EvictConfig(max_rows=262_144)),
        TableSpec(name="c", dim=4),
    ]
    rows = dict.fromkeys("ac", TableRows(5e6, np.array([0.5, 0.5])))
    found = {table["name"]: table for table in memory_of(tables, rows)["tables"]}
    assert found["a"]["rows"] == found["a"]["capacity"] == 262_144
    assert found["c"]["rows"] == 5_000_000 and "capacity" not in found["c"]


@every("epochs", [1, 2])
def test_the_rows_and_counted_ids_are_those_of_a_job(epochs: int) -> None:
    tables = {"default": {"dim": 8, "evict": {"ttl_steps": 1000}}, "C3": {"admit": {"min_count": 3}}}
    config = job(workers=1, tables=tables, train={"batch_size": 64, "epochs": epochs}, **SYNC)
    found = {table["name"]: table for table in estimate(config, gbit_per_s=1.0)["tables"]}
    summary = LocalJob(config, open_data(config.data, seed=config.seed)).run()
    for table in summary["tables"]:
        estimated = found[table["name"]]
        rel = 0.03 * (epochs - 1)  # a shuffled epoch has an id twice in other steps than the first
        assert estimated["rows"] == pytest.approx(table["rows"], rel=rel)
        assert estimated.get("candidates", 0) == pytest.approx(table.get("candidates", 0), rel=rel)
    assert found["C3"]["candidates"] > 100
