"""`shardkeep init` and `shardkeep train FILE`: what they write and say, and that the job trains as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

import shardkeep
from shardkeep.automl.init import plan_of
from shardkeep.automl.job_file import yaml_with_notes
from shardkeep.automl.rules import RULES, Size
from shardkeep.base.errors import UserError
from shardkeep.base.yaml_text import read_yaml
from shardkeep.config import load_config
from shardkeep.run.reader import RunReader
from tests.support.cases import every
from tests.support.click_files import click_rows, write_csv
from tests.support.invoked import invoke

SHORT = ("train.max_steps=3", "eval.every_steps=2", "train.batch_size=16")
BRIEF = tuple(word for setting in (*SHORT, "tower.compile=off") for word in ("--set", setting))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_csv(Path("clicks.csv"), click_rows(400))


def histories(path: Path, count: int = 600) -> Path:
    random = np.random.default_rng(3)
    lengths = random.integers(0, 6, count)
    columns = {
        "user_id": [f"u{n}" for n in random.integers(0, 40, count)],
        "item_id": random.integers(0, 60, count),
        "price": random.normal(9, 2, count),
        "event_time": 1_700_000_000 + np.cumsum(random.integers(1, 60, count)),
        "tags": [[f"t{n}" for n in random.integers(0, 9, 1 + n % 3)] for n in range(count)],
        "hist_item_ids": [list(random.integers(0, 60, n)) for n in lengths],
        "hist_price": [list(random.normal(9, 2, n)) for n in lengths],
        "picture": [list(random.normal(size=4)) for _ in range(count)],
        "clicked": random.integers(0, 2, count),
    }
    pq.write_table(pa.table(columns), path)
    return path


def test_a_file_of_clicks_becomes_a_job_with_its_reasons() -> None:
    code, out, error = invoke("init", "clicks.csv")
    assert (code, error) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "400 rows, 6 columns" in out and lines["job"] == "job       job.yaml; next: shardkeep train job.yaml"
    assert lines["clicked"].split()[-8:] == ["label", "two", "values", "and", "a", "name", "of", "labels"]
    assert " dense " in lines["price"] and " out " not in out
    text = Path("job.yaml").read_text(encoding="utf-8")
    assert "split: {by: user, eval: 0.1, test: 0.1}        # users that training never sees; or by: random" in text
    config = load_config("job.yaml")
    assert config.data.label is not None and config.data.label.column == "clicked"
    assert [each.column for each in config.data.sparse] == ["user", "item", "tags", "age"]
    assert config.data.sparse[2].separator == "|"


def test_columns_of_latin_1_are_named_with_what_to_do() -> None:
    lines = [
        f"K{n % 7};{['Köln', 'Bonn'][n % 3 % 2]};{n % 40},50 €;{'ja' if n * n % 7 % 2 else 'nein'}" for n in range(90)
    ]
    Path("a.csv").write_bytes("\r\n".join(["Kunde;Stadt;Betrag;Klick", *lines]).encode("cp1252"))
    code, out, error = invoke("init", "a.csv")
    told = "note      Stadt, Betrag: some texts are Windows-1252 or Latin-1, not UTF-8; score such files"
    assert (code, error) == (0, "") and told in " ".join(out.split("\n")) and "Köln" in out
    assert [each.column for each in load_config("job.yaml").data.dense] == ["Betrag"]
    Path("a.csv").write_text(Path("a.csv").read_text(encoding="cp1252"), encoding="utf-8")
    assert "note" not in invoke("init", "a.csv", "--force")[1]


def test_a_job_of_lists_and_histories_sorted_by_time() -> None:
    plan = plan_of([str(histories(Path("clicks.parquet")))], label=None, overrides=[])
    text = plan.yaml(Path())
    Path("job.yaml").write_text(text, encoding="utf-8")
    data = load_config("job.yaml").data
    assert (data.split and data.split.by, data.time) == ("time", "event_time") and "order: stored" in text
    assert data.sequences["history_1"].ids == {"hist_item_ids": "item_id"}
    assert [number.column for number in data.sequences["history_1"].numbers] == ["hist_price"]
    assert [(each.column, each.width) for each in data.dense] == [("price", None), ("picture", 4)]


@pytest.mark.slow
@every("name", ["clicks.csv", "clicks.parquet"])
def test_the_job_trains_as_it_stands(name: str) -> None:
    if name.endswith("parquet"):
        histories(Path(name), 400)
    assert invoke("init", name, "--force")[0] == 0
    code, out, error = invoke("train", "job.yaml", "--run-dir", f"run-{name}", *BRIEF[:-2])
    assert code == 0, error + out
    assert "\nAUC " in out and "\ntest " in out


def test_python_gives_the_config_of_the_file() -> None:
    config = shardkeep.init("clicks.csv", label="clicked", overrides=["train.epochs=2"])
    assert isinstance(config, shardkeep.JobConfig)
    assert (config.train.epochs, config.servers, config.data.root) == (2, 0, str(Path.cwd()))
    with pytest.raises(UserError, match=r"train\.epochs"):
        shardkeep.init("clicks.csv", overrides=["train.epochs=-1"])
    assert not Path("job.yaml").exists()


def test_a_label_that_is_a_number_is_judged_by_its_error_and_a_time_without_effect_is_left_out() -> None:
    config = shardkeep.init("clicks.csv", label="age", overrides=["train.loss=mse"])
    assert config.data.label is not None and (config.data.label.kind, config.data.label.positive) == ("number", None)
    assert config.train.early_stopping is not None and config.train.early_stopping.metric == "mse"
    by_user, rows = "data.split.by=user_id", histories(Path("clicks.parquet"))
    assert shardkeep.init(rows, overrides=[by_user]).data.time == "event_time"  # by which `order: stored` reads
    config = shardkeep.init(rows, overrides=[by_user, "train.order=shuffled"])
    assert config.data.time is None and config.data.split is not None and config.data.split.by == "user_id"


@every("part", ["eval", "test"])
def test_rows_that_are_in_a_file_of_their_own_are_not_held_out_again(part: str) -> None:
    for number, name in enumerate(("train", part)):
        write_csv(Path(f"{name}.csv"), click_rows(150, seed=number))
    given = ["--set", f"data.{part}=[{part}.csv]"]
    assert invoke("init", "train.csv", *given, "--force")[0] == 0
    assert f"{part}: [{part}.csv]" in Path("job.yaml").read_text(encoding="utf-8")
    code, out, error = invoke("train", "train.csv", "--label", "clicked", "--run-dir", part, *given, *BRIEF)
    assert code == 0, error + out
    data = load_config(f"{part}/job.yaml").data
    assert (data.split is None) == bool(data.eval) == (part == "eval") and (data.split is None or not data.split.test)
    assert bool((RunReader(part).summary() or {}).get("test")) == (part == "test")
    late = ["--set", f"data.{part}=[late.csv]", "--out", f"{part}.yaml"]
    code, _, error = invoke("init", "train.csv", "--label", "clicked", *late)
    assert (code, Path(f"{part}.yaml").exists()) == (2, False) and f"late.csv: no such file (data.{part})" in error


def test_an_epoch_has_five_evaluations() -> None:
    write_csv(Path("rows.csv"), click_rows(9600))
    for given, steps in (([], 12), (["data.test=[rows.csv]"], 14), (["data.eval=[rows.csv]"], 15)):
        assert shardkeep.init("rows.csv", overrides=given).eval.every_steps == steps


def test_files_with_names_of_held_out_rows_are_not_silently_trained_on() -> None:
    files = ["train.csv", "my_test.csv", "val.csv", "latest.csv"]
    for number, name in enumerate(files):
        write_csv(Path(name), click_rows(100, seed=number))
    told = (
        "note      the job also trains on my_test.csv, val.csv; "
        "instead: init train.csv latest.csv --set 'data.test=[my_test.csv]' --set 'data.eval=[val.csv]'"
    )
    _, out, _ = invoke("init", *files, "--label", "clicked")
    assert told in " ".join(out.split("\n"))
    for alone in (["my_test.csv"], ["train.csv", "latest.csv"]):
        assert "note" not in invoke("init", *alone, "--label", "clicked", "--force")[1]


@every(
    ("arguments", "told"),
    [
        (("init", "clicks.csv"), "error: job.yaml: exists; --force replaces it, --out FILE names another\n"),
        (("init", "clicks.csv", "--force", "--out", "clicks.csv"), "--out clicks.csv: is called like data; name a fi"),
        (("init", "clicks.csv", "--force", "--out", "."), "error: --out .: is a folder; name a file of YAML\n"),
        (("init", "click.csv", "--out", "b.yaml"), "click.csv: no such file (FILE); did you mean clicks.csv?\n"),
        (("train", "job.yaml", "--label", "a"), "--label a: has no effect without a file of data"),
        (("init", "text.csv"), "error: job.yaml: exists"),
    ],
)
def test_bad_input_gets_one_line(arguments: tuple[str, ...], told: str) -> None:
    Path("job.yaml").write_text("name: mine\n", encoding="utf-8")
    code, _, error = invoke(*arguments)
    assert code == 2 and told in error and len(error.splitlines()) == 1
    assert Path("job.yaml").read_text(encoding="utf-8") == "name: mine\n"


def size(rows: int, **changes: object) -> Size:
    plain = {"table_rows": 1000, "cores": 2, "memory_bytes": 8 << 30, "ordered": False}
    return Size(rows, **plain | changes)  # type: ignore[arg-type]


@every(
    ("key", "size", "value"),
    [
        ("servers", size(1000), 0),
        ("servers", size(10**9, table_rows=10**9, cores=16), 4),
        ("workers", size(10**9, table_rows=10**9, cores=16), 16),
        ("train.batch_size", size(1000), 128),
        ("train.batch_size", size(200_000), 1024),
        ("train.batch_size", size(10**9), 2048),
        ("train.epochs", size(200_000), 20),
        ("train.epochs", size(10**9), 2),
        ("train.order", size(1000), None),
        ("train.order", size(1000, ordered=True), "stored"),
    ],
)
def test_a_rule_follows_from_the_size(key: str, size: Size, value: object) -> None:
    assert {rule: choose(size) for rule, choose, _ in RULES}[key] == value


DECAY = "tables.default.optimizer"
SPLIT = ("data.split=random", "data.split=null", "data.split.by=user")
MODELS = ("model=lr", "model.name=fm", "model.name=autoint", "model.name=mine:Model")


@every("override", [f"{DECAY}.weight_decay=0", f"{DECAY}.name=ftrl", f"{DECAY}.lr=0.01", *MODELS, *SPLIT])
def test_a_setting_that_a_rule_has_another_opinion_of_may_be_given_in_any_of_its_forms(override: str) -> None:
    """A model goes without the settings that it lacks."""
    code, _, error = invoke("init", "clicks.csv", "--set", override, "--force")
    assert (code, error) == (0, "")
    config, (key, _, value) = load_config("job.yaml"), override.partition("=")
    assert config == load_config("job.yaml", [override])
    assert key != "model.name" or config.model.name == value


@every(
    "settings",
    [
        {"name": "a: b", "data": {"sparse": [f"column {n}" for n in range(30)], "missing": ["", "?", "NaN", "0x1"]}},
        {"data": {"dense": [{"column": "yes", "width": 3}, "#x", "a: b"] * 20,
                  "label": {"column": "y", "positive": ["1"]}}},
        {"tables": {"default": {}, "a" * 90: {"dim": 4}}, "train": {}},
    ],
)  # fmt: skip
def test_the_text_of_a_job_reads_back_as_the_settings_with_comments_behind_their_keys(settings: dict[str, Any]) -> None:
    assert read_yaml(yaml_with_notes(settings, {})) == settings
    settings = {"data": {"dense": ["a", "b"], "time": "t"}}
    text = yaml_with_notes(settings, {("data", "dense", "b"): "why", ("data",): "all"})
    assert [line.split("# ")[-1] for line in text.splitlines() if "#" in line] == ["all", "why"]
    assert read_yaml(text) == settings
