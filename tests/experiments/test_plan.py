"""What a sweep file becomes: its runs, and one clear line for each mistake in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.base.yaml_text import write_yaml
from shardkeep.config import parse_config
from shardkeep.config.overrides import flat
from shardkeep.experiments.plan import load_sweep
from tests.support.cases import every
from tests.support.trial_runs import BASE, write_sweep


def test_recipes_times_seeds_run_seed_by_seed_with_the_baselines_first(tmp_path: Path) -> None:
    own = {"name": "few", "settings": {"compression.push": {"keep": 0.5, "pool_rows": 10}}}
    names = [run.name for run in load_sweep(write_sweep(tmp_path, recipes=[own])).trials]
    assert names == [f"{name}-seed{seed}" for seed in (1, 2) for name in ("fp32", "fp16", "few")]


def test_a_run_is_the_base_with_its_recipe_and_seed_and_nothing_else(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, settings={"train.batch_size": 25}, seeds=[9])
    fp32, fp16 = (flat(run.config.model_dump(mode="json")) for run in load_sweep(path).trials)
    assert (fp32["seed"], fp32["train.batch_size"], fp32["data.root"]) == (9, 25, str(tmp_path.resolve()))
    changed = {"compression.push.values", "compression.pull.values", "compression.tower.name"}
    assert {key for key in fp32 if fp32[key] != fp16[key]} == changed


def test_the_base_can_be_a_file_beside_the_sweep_or_the_built_in_demo_and_the_example_is_a_sweep(
    tmp_path: Path,
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "base.yaml").write_text(write_yaml(BASE))
    plan = load_sweep(write_sweep(tmp_path, base="jobs/base.yaml"))
    assert plan.trials[0].config.data.root == str((tmp_path / "jobs").resolve()) == str(plan.code_folder)
    plan = load_sweep(write_sweep(tmp_path, base="demo"))
    assert (plan.trials[0].config.name, plan.code_folder) == ("demo", tmp_path.resolve())
    example = load_sweep(Path(__file__).resolve().parents[2] / "examples" / "sweep.yaml")
    assert [variant.name for variant in example.variants] == ["fp32", "fp16", "few-rows"]


def test_an_own_recipe_may_change_a_shipped_one_and_an_optimizer_of_another_name_replaces_the_base_s(
    tmp_path: Path,
) -> None:
    base = {**BASE, "tables": {"default": {"dim": 8, "optimizer": {"name": "adagrad", "initial_accumulator": 0.1}}}}
    settings = {"compression": {"pull": {"values": "int8"}}, "tables.default.optimizer": {"name": "sgd", "lr": 1.0}}
    own = {"name": "mine", "like": "fp16", "settings": settings}
    config = load_sweep(write_sweep(tmp_path, base=base, recipes=[own], seeds=[1])).trials[-1].config
    assert (config.compression.push.values, config.compression.pull.values) == ("fp16", "int8")
    default = config.tables["default"]
    assert default.dim == 8 and default.optimizer is not None
    assert (default.optimizer.name, default.optimizer.lr) == ("sgd", 1.0)


def test_a_run_is_a_job_that_train_takes_where_its_recipe_leaves_settings_of_the_base_without_effect(
    tmp_path: Path,
) -> None:
    own = {"name": "off", "settings": {"checkpoint.every_steps": "off"}}
    path = write_sweep(tmp_path, base={**BASE, "checkpoint": {"every_steps": 5, "keep": 7}}, recipes=[own])
    runs = load_sweep(path).trials
    assert [parse_config(run.config.to_yaml()).checkpoint.keep for run in runs[:3]] == [7, 7, 3]


@every(
    ("changes", "said"),
    [
        ({"seeds": []}, "seeds: [] runs nothing; allowed: a list of one or more seeds"),
        ({"seeds": [1, 2, 1]}, "fp32-seed1 is there twice"),
        ({"recipes": None}, "nothing is compared with fp32; allowed: recipes, or over with KEY=A,B,C"),
        ({"over": ["train.epochs=1..3"]}, "--over train.epochs=1..3: has no end of values for a sweep"),
        ({"over": ["tables.default.optimiser.lr=1,2"], "recipes": None},
         "lr=1: tables.default.optimiser: unknown key; did you mean optimizer?"),
        ({"over": ["data.root=a/b,a-b"], "recipes": None}, "root=a-b-seed1 is there twice; allowed: each recipe"),
        ({"seeds": None}, "seeds: is missing; allowed: a list"),
        ({"recipe": ["safe"]}, "recipe: unknown key; did you mean recipes?"),
        ({"recipes": ["fp23"]}, "recipes.0: 'fp23' is no recipe; did you mean fp32?"),
        ({"recipes": ["zzz"]}, "recipes.0: 'zzz' is no recipe; there are fp32, fp16, safe"),
        ({"recipes": ["lossless"]}, "tower: shardkeep.examples.compression.lossless:Lossless}"),
        ({"recipes": [{"name": "fp32", "settings": {"train.batch_size": 9}}]}, "fp32 is a shipped recipe; give"),
        ({"recipes": [{"name": "a/b"}]}, "recipes.0.name: 'a/b' is not allowed"),
        ({"recipes": [{"name": "x", "like": "half"}]}, "recipes.0.like: 'half' is no recipe"),
        ({"recipes": [{"name": "x", "settings": {"seed": 3}}]}, "seed is no setting of a recipe"),
        ({"settings": {"train..x": 1}}, "settings: 'train..x' is not of the form a.b"),
        ({"settings": {"trian.x": 1}}, "settings: trian: unknown key; did you mean train?"),
        ({"base": 5}, "base: 5 is not allowed"),
        ({"base": "no-such.yaml"}, "no-such.yaml: cannot be read"),
        ({"base": {"workerz": 1}}, "base: workerz: unknown key; did you mean workers?"),
        ({"base": {**BASE, "compression": {"push": {"values": "fp16"}}}},
         "base: sets compression, so that fp32 would not be plain"),
        ({"base": {**BASE, "tables": {"user": {"compression": "fp16"}}}},
         "base: sets tables.user.compression, so that fp32 would not be plain"),
        ({"base": {**BASE, "checkpoint": {"dir": "kept"}}}, "checkpoint.dir: all runs would share it"),
        ({"recipes": [{"name": "few", "settings": {"eval.metrics": ["logloss"]}}]}, "few: does not evaluate auc"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_clear_line(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = write_sweep(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        load_sweep(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and said in text and "\n" not in text


@every(("content", "said"), [("- 1\n", r"holds \[1\]"), ("a: [", "is not YAML"), (None, "cannot be read")])
def test_a_file_that_is_no_sweep_is_one_clear_line(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=said) as caught:
        load_sweep(path)
    assert "\n" not in str(caught.value)


def test_over_runs_every_recipe_or_else_the_job_with_every_combination_of_values(tmp_path: Path) -> None:
    over = ["tables.default.optimizer.lr=0.1,0.2", "model.hidden=[64],[64, 32]", "tower.optimizer.lr=1e-3"]
    plan = load_sweep(write_sweep(tmp_path, recipes=["safe"], over=over, seeds=[1]))
    names = [variant.name for variant in plan.variants]
    ends = [f"tables.default.optimizer.lr={lr}+hidden={hidden}+tower.optimizer.lr=0.001"
            for lr in ("0.1", "0.2") for hidden in ("64", "64-32")]  # fmt: skip
    ends = [end.replace("tables.default.optimizer.lr", "default.optimizer.lr") for end in ends]
    assert names == ["fp32", "fp16", *(f"safe+{end}" for end in ends)]
    last, values = plan.trials[-1], {"tables.default.optimizer.lr": "0.2", "model.hidden": "[64, 32]"}
    assert last.settings == values | {"tower.optimizer.lr": "0.001"}
    assert last.config.compression.push.values == "int4" and last.config.table("default").optimizer.lr == 0.2
    assert plan.trials[0].config.table("default").optimizer.lr != 0.2
    one = load_sweep(write_sweep(tmp_path, recipes=None, over=over[:1]))
    assert [variant.name for variant in one.variants] == ["fp32", "lr=0.1", "lr=0.2"]


def test_a_job_s_file_is_a_sweep_by_what_the_command_names(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(write_yaml({**BASE, "seed": 5}))
    plan = load_sweep(path, ["train.batch_size=10"], recipes="safe, balanced", seeds=None)
    assert [trial.name for trial in plan.trials] == ["fp32-seed5", "fp16-seed5", "safe-seed5", "balanced-seed5"]
    assert plan.job.train.batch_size == 10
    plan = load_sweep(path, over=["train.batch_size=10,20"], seeds="1,2")
    assert [trial.config.train.batch_size for trial in plan.trials] == [50, 10, 20] * 2
    sweep = write_sweep(tmp_path, settings={"train.batch_size": 25})
    plan = load_sweep(sweep, ["train.batch_size=10"], recipes="safe", seeds="7")
    assert [trial.name for trial in plan.trials] == ["fp32-seed7", "fp16-seed7", "safe-seed7"]
    assert plan.job.train.batch_size == 10, "the command wins over the file"


def test_a_sweep_over_several_labels_names_the_one_that_counts(tmp_path: Path) -> None:
    labels = ["clicked", {"column": "bought", "after": "clicked"}, {"column": "seconds", "loss": "mse"}]
    base = {"data": {"train": "a.csv", "labels": labels, "sparse": ["user"]}, "model": {"name": "dnn"}}
    path = write_sweep(tmp_path, base=base, settings={}, recipes=["topk-naive"])
    with pytest.raises(ConfigError, match=r"does not evaluate auc, .*allowed: --metric auc/clicked, auc/bought$"):
        load_sweep(path)
    with pytest.raises(ConfigError, match="does not evaluate auc/seconds, "):
        load_sweep(path, metric="auc/seconds")
    plan = load_sweep(path, metric="auc/bought")
    assert (plan.key("auc"), plan.key("logloss")) == ("auc/bought", "logloss/bought")
