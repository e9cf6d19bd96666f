"""What a sweep tells: paired losses, bytes, the page and its plots, from run folders made by hand."""

from __future__ import annotations

import csv
import html
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.compression.ledger import PARTS
from shardkeep.sweep.compare import NO_LOSS, against_fp32, all_pairs
from shardkeep.sweep.parts import COLOURS, by_kind
from shardkeep.sweep.plan import SweepPlan, load_sweep
from shardkeep.sweep.plots import PLOTS, mean_curve, off_scale, pareto_front, side_by_side
from shardkeep.sweep.record import write_results
from shardkeep.sweep.report import page, power_text, write_report
from shardkeep.sweep.results import CurvePoint, Results, collect
from shardkeep.sweep.student import estimate, holm, p_value
from tests.support.cases import every
from tests.support.sweep_runs import write_run, write_sweep

AUCS = {
    "fp32": [0.800, 0.802, 0.804, 0.806, 0.808],
    "fp16": [0.799, 0.800, 0.801, 0.802, 0.803],  # losses 0.001 .. 0.005
    "few": [0.790, 0.792, 0.794, 0.796, 0.798],  # losses of 0.010, all of them
}
VALUES = {"fp32": 100_000, "fp16": 50_000, "few": 1_000}


def planned(folder: Path, **changes: Any) -> SweepPlan:
    own = {"name": "few", "settings": {"compression.push": {"keep": 0.5, "pool_rows": 10}}}
    return load_sweep(write_sweep(folder, **{"recipes": ["fp16", own], "seeds": [1, 2, 3, 4, 5]} | changes))


def made(plan: SweepPlan, folder: Path, auc: Callable[[str, int], float] = lambda *_: 0.8, **facts: Any) -> Results:
    """The results of runs by hand, all of them. `auc`: by recipe and seed."""
    for run in plan.runs:
        write_run(folder / run.name, run.config.to_yaml(), auc=auc(run.variant.name, run.seed), **facts)
    return collect(plan, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    for run in planned(folder).runs:
        name = run.variant.name
        facts: dict[str, Any] = {"auc": AUCS[name][run.seed - 1], "value_bytes": VALUES[name]}
        write_run(folder / run.name, run.config.to_yaml(), **facts)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return collect(load_sweep(folder / "sweep.yaml"), folder, "shardkeep sweep sweep.yaml --out out")


def test_losses_are_paired_by_seed_and_bytes_are_those_of_training(
    results: Results,
) -> None:
    loss = results.recipe("fp16").auc_loss
    assert loss is not None and loss.mean == pytest.approx(0.003)
    same = results.recipe("few").auc_loss
    assert same is not None and same.deviation == pytest.approx(0.0, abs=1e-12)
    assert same.mean == pytest.approx(0.010)
    assert results.seed_noise is not None and results.seed_noise.deviation == pytest.approx(0.0031623, abs=1e-7)
    few = results.recipe("few")
    assert results.recipe("fp32").bytes_per_sample == pytest.approx((2 * 108_500 + 20_000 + 1_000) / 1000)
    assert few.bytes_per_sample == pytest.approx((2 * 9_500 + 20_000 + 1_000) / 1000)
    assert few.times_fewer == pytest.approx(238 / 40)
    assert few.embedding_times_fewer == pytest.approx(108.5 / 9.5)


def test_a_seed_that_fp32_has_not_done_is_in_no_pair(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "runs", ignore=shutil.ignore_patterns("fp32-seed5"))
    found = collect(load_sweep(folder / "sweep.yaml"), tmp_path / "runs").recipe("fp16")
    assert found.auc is not None and found.auc_loss is not None
    assert (found.auc.count, found.auc_loss.count) == (5, 4)
    assert found.auc_loss.mean == pytest.approx(0.0025)


def test_the_table_has_a_line_per_run_with_every_part_of_the_ledger(results: Results, tmp_path: Path) -> None:
    write_results(results, tmp_path)
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
    assert (row["recipe"], row["seed"], row["settings"]) == (
        "few",
        "1",
        "{compression.push.keep: 0.5, compression.push.pool_rows: 10}",
    )
    assert (row["total_bytes"], row["push_values_bytes"], row["evaluation_bytes"]) == ("40000", "1000", "7000")
    assert float(row["auc_loss"]) == pytest.approx(0.010)
    assert float(row["cpu_s_per_sample"]) == pytest.approx((2 * 0.020 + 0.005) / 100)


def test_what_the_comparison_could_show_comes_first_and_any_two_recipes_stand_in_both_files(
    results: Results, tmp_path: Path
) -> None:
    write_results(results, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert next(iter(summary)) == "comparison"
    smallest = summary["comparison"]["smallest_auc_loss_it_could_show"]
    assert smallest["to"] == pytest.approx((2.77645 + 0.94096) * 0.0015811 / 5**0.5, rel=1e-4)
    assert [recipe["recipe"] for recipe in summary["recipes"]] == ["fp32", "fp16", "few"]
    text = power_text(results)
    assert "over 5 seeds is 0.8040 with a standard deviation of 0.00316" in text and "to 0.00263" in text
    body = page(results, {})
    assert body.index("four times out of five") < body.index("<table")
    pairs = {(pair.first, pair.second): pair for pair in all_pairs(results)}
    assert list(pairs) == [("fp32", "fp16"), ("fp32", "few"), ("fp16", "few")]
    assert pairs["fp16", "few"].difference.mean == pytest.approx(0.007)
    assert pairs["fp32", "fp16"].p_holm == pairs["fp32", "fp16"].p
    assert summary["comparison"]["correction"] == "Holm"
    assert [(pair["recipe"], pair["against"]) for pair in summary["pairs"]] == list(pairs)
    assert summary["pairs"][2]["auc_difference"] == pytest.approx(0.007)
    fp16 = summary["recipes"][1]
    assert (fp16["verdict"], fp16["logloss"]["count"]) == ("lower AUC", 5)
    assert fp16["auc"]["deviation"] == pytest.approx(0.0015811, abs=1e-7)
    assert "<td>fp16</td><td>-0.00300 \N{PLUS-MINUS SIGN} 0.00196*</td><td></td>" in body  # row less column
    assert "<td>0.80100 \N{PLUS-MINUS SIGN} 0.00158</td>" in body
    found = against_fp32(results)
    assert list(found) == ["fp16", "few"]
    assert found["fp16"].difference.mean == pytest.approx(-0.003)
    assert (found["fp16"].p, found["few"].p) == (pytest.approx(0.013236, abs=1e-5), pytest.approx(0.0, abs=1e-9))
    assert found["fp16"].p_holm == found["fp16"].p  # the larger of two
    assert [comparison.verdict for comparison in found.values()] == ["lower AUC", "lower AUC"]


def test_one_seed_says_that_nothing_is_known_of_the_noise_nor_of_any_pair(tmp_path: Path) -> None:
    plan = planned(tmp_path, recipes=["fp16"], seeds=[1])
    results = made(plan, tmp_path)
    assert "no difference below can be distinguished from chance" in power_text(results)
    (pair,) = all_pairs(results)
    assert (pair.p, pair.p_holm, pair.told, pair.verdict) == (None, None, False, "one seed: no conclusion")
    assert "nothing can be compared" in power_text(collect(plan, tmp_path / "empty"))


def test_a_report_of_nothing_done_is_still_a_report_in_which_names_of_the_users_are_text(tmp_path: Path) -> None:
    empty = collect(planned(tmp_path), tmp_path / "none")
    write_results(empty, tmp_path)
    write_report(empty, tmp_path, say=lambda _: None)
    assert (tmp_path / "report.html").read_text().count("<li>") == 15
    own = {"name": "few", "settings": {"model.name": "a.module:tower", "model.options": {"label": "<b>&"}}}
    text = page(collect(planned(tmp_path, recipes=[own]), tmp_path), {})
    assert "<b>" not in text and "&lt;b&gt;&amp;" in text


def test_the_page_needs_no_network_and_holds_every_plot(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("shardkeep.sweep.plots.FORMATS", ("png", "svg"))  # each takes its time
    written = write_report(results, tmp_path, say=pytest.fail)
    assert written[-1] == tmp_path / "plots"
    for plot in PLOTS:
        for form, head in (("png", b"\x89PNG"), ("svg", b"<?xml")):
            picture = (tmp_path / "plots" / f"{plot.name}.{form}").read_bytes()
            assert picture.startswith(head) and len(picture) > 5000
    text = (tmp_path / "report.html").read_text()
    captions = (tmp_path / "plots" / "captions.txt").read_text()
    for number, plot in enumerate(PLOTS, 1):
        words = f"Figure {number}. {plot.title} (tiny, 2 workers, 1 server, bounded, 5 seeds). {plot.says}"
        assert words in captions and html.escape(words) in text
    assert text.count('src="data:image/png;base64,') == len(PLOTS)
    assert not re.search(r"https?://|<script|<link|@import|url\(", text)
    assert set(re.findall(r'(?:src|href)="(.{5})', text)) == {"data:"}


def test_without_the_extra_there_are_tables_and_a_line_that_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("matplotlib", "scipy"):
        monkeypatch.setitem(sys.modules, module, None)
    said: list[str] = []
    write_report(collect(load_sweep(folder / "sweep.yaml"), folder), tmp_path, say=said.append)
    assert said == [
        "the report has no plots, no intervals and p values: it needs matplotlib, scipy: "
        "pip install 'shardkeep[report]'; the same command adds them"
    ]
    text = (tmp_path / "report.html").read_text()
    assert "<img" not in text and text.count("<tr><td>few</td>") == 3  # recipes, pairs, settings
    assert html.escape(said[0]) in text and "Tests need scipy." in text
    assert text.count("<td>not tested without scipy</td>") == 2 and "<td>-0.00300</td>" in text
    assert not (tmp_path / "plots").exists()


def test_a_recipe_that_loses_nothing_that_shows_cannot_be_told_from_one_that_loses_nothing(tmp_path: Path) -> None:
    noise = {"fp32": 0.0, "fp16": 0.001, "few": 0.0003}
    results = made(planned(tmp_path), tmp_path, lambda name, seed: 0.8 + noise[name] * (-1) ** seed)
    assert {comparison.verdict for comparison in against_fp32(results).values()} == {NO_LOSS}
    text = page(results, {})
    assert text.count("<td>cannot be distinguished from no loss</td>") == 2
    assert "shown no loss" not in text and "shown no loss" not in " ".join(plot.says for plot in PLOTS)


def test_the_report_states_what_a_paper_needs(results: Results, folder: Path, tmp_path: Path) -> None:
    write_results(results, tmp_path)
    origin = json.loads((tmp_path / "summary.json").read_text())["origin"]
    assert origin["command"] == "shardkeep sweep sweep.yaml --out out"
    assert origin["made"] == {
        "date": "2026-11-22",
        "runs": "15 of 15 completed, seeds 1, 2, 3, 4, 5",
        "machine": "A CPU, family 25 model 17; 2 cores, 25.3 GB; Linux 6.18",
        "commit": "0123456789abcdef",
        "versions": "python 3.11.7, torch 2.13.0",
    }
    assert origin["job"].items() >= {
        ("rows", "dim 16; name: rowwise_adagrad, lr: 0.05"),
        ("batch", "50 samples a worker and step, 100 in all"),
        ("processes", "2 workers with 1 thread each, 1 server"),
        ("samples", "1,000 trained, 100 for evaluation"),
    }
    assert {"data", "model", "tower", "consistency", "steps", "tables"} < origin["job"].keys()
    assert origin["sweep_file"] == (folder / "sweep.yaml").read_text()
    text = page(results, {})
    for value in (*origin["job"].values(), *origin["made"].values(), origin["command"]):
        assert html.escape(value) in text


def test_every_part_of_the_ledger_has_one_of_ten_kinds_with_a_colour_of_its_own() -> None:
    parts = [part for part in PARTS if part not in ("calls", "questions", "agreements", "metrics")]  # control, read
    kinds = by_kind({(way, part): 1.0 for way in ("pull", "push", "tower") for part in parts} | {("control", ""): 1.0})
    assert list(kinds) == list(COLOURS)
    assert len(set(COLOURS.values())) == len(COLOURS) == 10
    assert sum(kinds.values()) == 3 * len(parts) + 1
    assert by_kind({("tower", "values"): 5.0, ("push", "ids"): 0.0}) == {"tower: values": 5.0}


def test_points_have_a_front_a_scale_and_a_side_and_curves_are_averaged_at_the_steps_that_all_have() -> None:
    front = [(1.0, 5.0), (2.0, 2.0), (3.0, 1.0)]
    assert pareto_front([(3.0, 1.0), (1.0, 5.0), (2.0, 6.0), (2.0, 2.0), (4.0, 1.0)]) == front
    assert off_scale({"fp32": 0.0, "a": 0.001, "b": 0.004, "wild": 0.05}) == {"wild"}
    assert off_scale({"fp32": 0.0, "a": 0.001, "b": 0.004}) == set()
    assert off_scale({"fp32": 0.0, "a": 0.5}) == set()
    assert side_by_side([1.0, 1.0, 100.0]) == {1.0: [-0.5, 0.5], 100.0: [0.0]}
    beside = {100.0: [-1.0], 101.0: [0.0], 102.0: [1.0], 1000.0: [0.0]}
    assert side_by_side([100.0, 101.0, 102.0, 1000.0]) == beside and side_by_side([]) == {}
    curves = [[CurvePoint(5, 50, 100, 0.6), CurvePoint(10, 100, 200, 0.8)], [CurvePoint(10, 100, 400, 0.7)]]
    assert mean_curve(curves) == [(300.0, pytest.approx(0.75))]


# ---- intervals and p values ----


def test_the_interval_is_that_worked_out_by_hand() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])  # deviation sqrt(2.5), error sqrt(0.5), t of 4 is 2.7764
    assert found is not None
    assert (found.count, found.mean) == (5, 3.0)
    assert found.deviation == pytest.approx(1.5811, abs=1e-4)
    assert (found.low, found.high) == (pytest.approx(1.0368, abs=1e-4), pytest.approx(4.9632, abs=1e-4))
    assert found.shows == pytest.approx((2.7764 + 0.9410) * math.sqrt(0.5), abs=1e-4)


def test_one_value_has_no_interval_none_no_mean_and_equal_values_a_certain_p_value() -> None:
    one = estimate([0.25])
    assert one is not None
    assert (one.mean, one.deviation, one.low, one.high, one.shows) == (0.25, None, None, None, None)
    assert estimate([]) is None
    for values, expected in (([0.01, 0.01], 0.0), ([0.0, 0.0], 1.0), ([0.5], None)):
        found = estimate(values)
        assert found is not None and p_value(found) == expected


@every(
    ("probability", "freedom", "quantile"),
    [(0.975, 1, 12.7062), (0.975, 4, 2.7764), (0.95, 5, 2.0150), (0.995, 3, 5.8409)],  # of any textbook
)
def test_the_p_value_at_a_quantile_of_the_table_is_both_tails(
    probability: float, freedom: int, quantile: float
) -> None:
    rng = np.random.default_rng(freedom)
    spread = rng.normal(size=freedom + 1)
    spread = (spread - spread.mean()) / spread.std(ddof=1)
    mean = quantile / math.sqrt(freedom + 1)
    for sign in (1, -1):
        found = estimate((spread + sign * mean).tolist())
        assert found is not None
        assert p_value(found) == pytest.approx(2 * (1 - probability), rel=1e-3)


def test_several_comparisons_are_corrected_as_holm_says() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.4, 0.6, 0.01]) == pytest.approx([0.8, 0.8, 0.03])
    assert holm([0.7, 0.9]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []
