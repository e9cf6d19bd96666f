"""The results of a sweep: paired losses, bytes, the tables and pictures, from run folders made by hand."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from shardkeep.analysis.significance import estimate, holm
from shardkeep.experiments.pictures import sweep_pictures
from shardkeep.experiments.plan import SweepPlan, load_sweep
from shardkeep.experiments.results import Figures, Results, collect, curve_of
from tests.support.trial_runs import StandIns, sweep, write_run, write_sweep

NO_LOSS, ONE_SEED = "cannot be distinguished from no loss", "one seed: no conclusion"
UNTESTED = "not tested without scipy"
AUCS = {
    "fp32": [0.800, 0.802, 0.804, 0.806, 0.808],
    "fp16": [0.799, 0.800, 0.801, 0.802, 0.803],  # losses 0.001 .. 0.005
    "few": [0.790, 0.792, 0.794, 0.796, 0.798],  # losses of 0.010, all of them
}
VALUES = {"fp32": 100_000, "fp16": 50_000, "few": 1_000}


def planned(folder: Path, **changes: Any) -> SweepPlan:
    own = {"name": "few", "settings": {"compression.push": {"keep": 0.5, "pool_rows": 10}}}
    return load_sweep(write_sweep(folder, **{"recipes": ["fp16", own], "seeds": [1, 2, 3, 4, 5]} | changes))


def figures(results: Results) -> dict[str, Figures]:
    return {each.recipe: each for each in results.figures}


def write_all(plan: SweepPlan, out: Path, auc: Callable[[str, int], float] = lambda *_: 0.8) -> Results:
    """The results of runs by hand, all of them. `auc`: by recipe and seed."""
    for trial in plan.trials:
        score, size = auc(trial.variant, trial.config.seed), VALUES[trial.variant]
        write_run(out / f"runs/{trial.name}", trial.config.to_yaml(), auc=score, value_bytes=size)
    return collect(plan, out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    write_all(planned(folder), folder, lambda name, seed: AUCS[name][seed - 1])
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return collect(load_sweep(folder / "sweep.yaml"), folder)


def test_losses_are_paired_by_seed_and_bytes_are_those_of_training(results: Results) -> None:
    found = figures(results)
    loss, same, fp32 = (found[name].auc_loss for name in ("fp16", "few", "fp32"))
    assert loss is not None and loss.mean == pytest.approx(0.003)
    assert same is not None and same.deviation == pytest.approx(0.0, abs=1e-12)
    assert same.mean == pytest.approx(0.010) and fp32 is not None and fp32.mean == 0.0
    assert found["fp32"].bytes_per_sample == pytest.approx((2 * 108_500 + 20_000 + 1_000) / 1000)
    few = found["few"]
    assert few.bytes_per_sample == pytest.approx((2 * 9_500 + 20_000 + 1_000) / 1000)
    assert few.times_fewer_bytes == pytest.approx(238 / 40)
    assert few.times_fewer_embedding_bytes == pytest.approx(108.5 / 9.5)
    assert found["fp16"].could_have_shown == pytest.approx((2.77645 + 0.94096) * 0.0015811 / 5**0.5, rel=1e-4)
    assert loss.p == pytest.approx(0.013236, abs=1e-5) and found["fp16"].p_holm == loss.p  # the larger of two
    assert [each.result for each in results.figures] == ["", "lower AUC", "lower AUC"]


def test_a_seed_that_fp32_has_not_done_is_in_no_pair(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "runs", tmp_path / "runs", ignore=shutil.ignore_patterns("fp32-seed5"))
    found = figures(collect(load_sweep(folder / "sweep.yaml"), tmp_path))["fp16"]
    assert found.auc is not None and found.auc_loss is not None
    assert (found.auc.count, found.auc_loss.count) == (5, 4)
    assert found.auc_loss.mean == pytest.approx(0.0025)


def test_the_table_has_a_line_per_trial_with_every_part_of_the_ledger_in_two_formats(
    results: Results, tmp_path: Path
) -> None:
    results.write(tmp_path)
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert list(rows[0]) == [
        "recipe", "seed", "status", "settings", "steps", "samples", "total_bytes", "bytes_per_sample",
        "pull_bytes", "push_bytes", "tower_bytes", "control_bytes",
        "pull_framing_bytes", "pull_ids_bytes", "pull_values_bytes",
        "push_framing_bytes", "push_ids_bytes", "push_values_bytes", "tower_values_bytes",
        "evaluation_bytes", "auc", "logloss", "normalized_entropy", "auc_loss", "samples_per_s",
        "cpu_s_per_sample", "wall_s", "run", "message",
    ]  # fmt: skip
    row = rows[2]
    settings = "{compression.push.keep: 0.5, compression.push.pool_rows: 10}"
    assert (row["recipe"], row["seed"], row["settings"]) == ("few", "1", settings)
    assert (row["total_bytes"], row["push_values_bytes"], row["evaluation_bytes"]) == ("40000", "1000", "7000")
    assert float(row["auc_loss"]) == pytest.approx(0.010)
    assert float(row["cpu_s_per_sample"]) == pytest.approx((2 * 0.020 + 0.005) / 100)
    assert pq.read_table(tmp_path / "results.parquet").to_pylist() == list(results.rows)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [recipe["recipe"] for recipe in summary["recipes"]] == ["fp32", "fp16", "few"]
    fp16 = summary["recipes"][1]
    assert (fp16["result"], fp16["logloss"]["count"], fp16["auc_loss"]["count"]) == ("lower AUC", 5, 5)
    assert summary["origin"]["commit"] == '"0123456789abcdef"' and "torch" in summary["origin"]["versions"]


def test_keys_of_over_are_columns(tmp_path: Path) -> None:
    plan = planned(tmp_path, recipes=None, over=["train.batch_size=10,20"], seeds=[1])
    rows = collect(plan, tmp_path / "none").rows
    assert [(row["recipe"], row["train.batch_size"], row["status"]) for row in rows] == [
        ("fp32", None, "missing"), ("batch_size=10", "10", "missing"), ("batch_size=20", "20", "missing")
    ]  # fmt: skip


def test_one_seed_says_that_nothing_is_known_of_any_difference(tmp_path: Path) -> None:
    results = write_all(planned(tmp_path, recipes=["fp16"], seeds=[1]), tmp_path)
    assert (figures(results)["fp16"].p_holm, figures(results)["fp16"].result) == (None, ONE_SEED)


def test_a_recipe_that_loses_nothing_that_shows_cannot_be_told_from_one_that_loses_nothing(tmp_path: Path) -> None:
    noise = {"fp32": 0.0, "fp16": 0.001, "few": 0.0003}
    results = write_all(planned(tmp_path), tmp_path, lambda name, seed: 0.8 + noise[name] * (-1) ** seed)
    assert [each.result for each in results.figures] == ["", NO_LOSS, NO_LOSS]


def test_without_the_extra_there_are_tables_and_a_line_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of the user are text."""
    for module in ("matplotlib", "scipy"):
        monkeypatch.setitem(sys.modules, module, None)
    printed, own = io.StringIO(), {"name": "few", "settings": {"model.name": "a:b", "model.options": {"label": "<b>&"}}}
    (tmp_path / "a.py").touch()
    plan = planned(tmp_path, recipes=["fp16", own], seeds=[1, 2])
    results = sweep(plan, out=tmp_path / "out", console=Console(file=printed, width=999), jobs=2, starter=StandIns())
    words = (
        "the report has no plots, no intervals and p values: it needs matplotlib, scipy: "
        "pip install 'shardkeep[report]'; the same command adds them"
    )
    assert words in printed.getvalue()
    text = (tmp_path / "out/report.html").read_text()
    assert html.escape(words) in text and "<img" not in text and "<b>" not in text and "&lt;b&gt;&amp;" in text
    assert [each.result for each in results.figures] == ["", UNTESTED, UNTESTED]
    assert text.count(f"<td>{UNTESTED}</td>") == 2 and not (tmp_path / "out/plots").exists()


def test_the_pictures_are_files_for_papers_and_stand_in_the_page(
    results: Results, folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "runs").symlink_to(folder / "runs")
    found = sweep_pictures(results, tmp_path)
    assert len(found) == 3 and all('src="data:image/png;base64,' in each for each in found)
    for name in ("pareto", "ledger", "curves"):
        for form, head in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
            picture = (tmp_path / "plots" / f"{name}.{form}").read_bytes()
            assert picture.startswith(head) and len(picture) > 5000
    assert "fp32" in (tmp_path / "plots/pareto.svg").read_text()


def test_a_curve_has_the_last_of_repeated_evaluations_in_the_order_of_steps(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "runs/fp32-seed1", run)
    again = {"kind": "eval", "step": 5, "auc": 0.75, "train_samples": 500, "train_bytes": {"total": 120_000}}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n")
    assert curve_of(run, "auc") == [(0.12, 0.75), (pytest.approx(0.237), 0.8)]


# ---- intervals and p values ----


def test_the_interval_is_that_worked_out_by_hand() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])  # deviation sqrt(2.5), error sqrt(0.5), t of 4 is 2.7764
    assert found is not None
    assert (found.count, found.mean) == (5, 3.0)
    assert found.deviation == pytest.approx(1.5811, abs=1e-4)
    assert (found.low, found.high) == (pytest.approx(1.0368, abs=1e-4), pytest.approx(4.9632, abs=1e-4))
    assert found.shows == pytest.approx((2.7764 + 0.9410) * math.sqrt(0.5), abs=1e-4)
    mirrored = estimate([-1.0, -2.0, -3.0, -4.0, -5.0])
    assert mirrored is not None and mirrored.p == found.p == pytest.approx(0.013236, abs=1e-5)  # both tails


def test_one_value_has_no_interval_none_no_mean_and_equal_values_a_certain_p_value() -> None:
    one = estimate([0.25])
    assert one is not None
    assert (one.mean, one.deviation, one.low, one.high, one.shows) == (0.25, None, None, None, None)
    assert estimate([]) is None
    for values, expected in (([0.01, 0.01], 0.0), ([0.0, 0.0], 1.0), ([0.5], None)):
        found = estimate(values)
        assert found is not None and found.p == expected


def test_several_comparisons_are_corrected_as_holm_says() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.4, 0.6, 0.01]) == pytest.approx([0.8, 0.8, 0.03])
    assert holm([0.7, 0.9]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []
