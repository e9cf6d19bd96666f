"""The comparison of several runs: results, test metrics, resolved settings, and what one process does not send."""

from __future__ import annotations

import json
from pathlib import Path

from shardkeep.base.yaml_text import read_text, read_yaml, write_yaml
from shardkeep.page.comparison import DASH, compared
from shardkeep.page.state import RunState
from tests.support.simulated_runs import Scene, write_simulated_run

Rows = dict[str, list[str]]


def results_of(*runs: Path) -> tuple[Rows, Rows]:
    """Results, and settings that differ, by name."""
    states = [RunState(run) for run in runs]
    found = compared(states, [state.sections() for state in states])
    results, settings = ({name: texts for name, *texts in found[key]} for key in ("results", "settings"))
    return results, settings


def test_a_setting_that_one_run_leaves_out_has_the_value_of_its_default(tmp_path: Path) -> None:
    runs = [write_simulated_run(tmp_path / name, Scene(compression=name == "b", steps=300)) for name in "ab"]
    _, settings = results_of(*runs)
    assert settings["compression.push.values"] == ["fp32", "int8"] and "default" not in str(settings)
    assert "name" not in settings and "data.root" not in settings and "seed" not in settings


def test_long_values_are_shown_from_where_they_differ(tmp_path: Path) -> None:
    runs = [write_simulated_run(tmp_path / name, Scene(steps=300)) for name in "ab"]
    for run, width in zip(runs, (8, 16), strict=True):
        config = read_yaml(read_text(run / "config.yaml"))
        config["model"]["hidden"] = [64] * 40 + [width] + [4] * 40
        (run / "config.yaml").write_text(write_yaml(config))
    _, settings = results_of(*runs)
    assert all(text.startswith("...") and text.endswith("...") and len(text) <= 66 for text in settings["model.hidden"])
    assert [f" {width}, 4" in text for text, width in zip(settings["model.hidden"], (8, 16), strict=True)] == [True] * 2


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


def test_one_process_sends_no_bytes(tmp_path: Path) -> None:
    alone = write_simulated_run(tmp_path / "alone", Scene(servers=0, workers=1, steps=300))
    other = write_simulated_run(tmp_path / "other", Scene(steps=300))
    results, _ = results_of(alone, other)
    for name in ("sent for training", "bytes a sample"):
        assert results[name][0] == DASH and results[name][1].split()[1] in ("B", "kB", "MB", "GB")


def test_workers_are_compared_with_one_alone_whose_steps_do_the_same(tmp_path: Path) -> None:
    alone = Scene(workers=1, step_ms=20.0)
    scenes = {"one": alone, "two": Scene(workers=2, step_ms=25.0), "x": Scene(compression=True)}
    results, _ = results_of(*[write_simulated_run(tmp_path / name, scene) for name, scene in scenes.items()])
    assert results["a worker's speed, beside one alone"] == ["100 %", "80 %", DASH]
    results, _ = results_of(tmp_path / "two", tmp_path / "x")
    assert "a worker's speed, beside one alone" not in results


def test_a_run_without_a_step_has_dashes(tmp_path: Path) -> None:
    results, _ = results_of(*[write_simulated_run(tmp_path / name, Scene(state="begun")) for name in "ab"])
    assert results["longest own work of a step, ms"] == [DASH, DASH] and results["recoveries"] == ["0", "0"]
