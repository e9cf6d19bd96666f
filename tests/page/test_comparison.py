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
