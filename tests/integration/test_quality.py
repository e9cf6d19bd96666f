"""Golden AUCs: what models, settings and modes learn, on a planted csv and, if present, on UCI's data."""

# N = samples

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep import train
from shardkeep.config import JobConfig, load_config, parse_config
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.metrics.quality import auc
from tests.support.cases import every
from tests.support.local_job import LocalJob

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "data"
SIZES = {"shop": 12, "colour": 8, "city": 60}
YAML = """
name: planted
seed: 3
servers: 0
workers: 1
data:
  source: csv
  train: [train.csv]
  eval: [eval.csv]
  label: {column: bought, positive: ["yes"]}
  dense: [age, {column: price, scale: log_standard}]
  sparse: [shop, colour, city]
model: {name: dlrm, bottom: [16], hidden: [32]}
tables:
  default: {dim: 8, optimizer: {name: rowwise_adagrad, lr: 0.1}}
tower: {optimizer: {name: adam, lr: 0.01}, compile: "off"}
train: {batch_size: 128, epochs: 6}
consistency: {mode: sync}
"""
DCN = "model={name: dcn_v2, hidden: [64, 32]}"


class Planted:
    """A csv whose labels a planted teacher drew, and the teacher's own AUC on the evaluation file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rng = np.random.default_rng(11)
        self._effects = {name: self._rng.normal(0.0, 0.6, size) for name, size in SIZES.items()}
        self._pairs = self._rng.normal(0.0, 1.4, (SIZES["shop"], SIZES["colour"]))  # more than a linear model can say
        self._write(folder / "train.csv", 12_000)
        self.best_auc = self._write(folder / "eval.csv", 6_000)
        self._summaries: dict[tuple[str, ...], dict[str, Any]] = {}

    def _write(self, path: Path, count: int) -> float:
        rng = self._rng
        ids = {name: rng.integers(0, size, count) for name, size in SIZES.items()}
        age, price = rng.integers(18, 80, count), np.exp(rng.normal(3.0, 1.0, count)).round(2)
        logit_N = 0.03 * (age - 49) - 0.6 * (np.log(price) - 3.0) - 0.5 + self._pairs[ids["shop"], ids["colour"]]
        logit_N += sum(self._effects[name][ids[name]] for name in SIZES)
        label_N = rng.random(count) < 1.0 / (1.0 + np.exp(-logit_N))
        with path.open("w", encoding="utf-8") as file:
            file.write("age,price,shop,colour,city,bought\n")
            for row in range(count):
                names = ",".join(f"{name}-{ids[name][row]}" for name in SIZES)
                file.write(f"{age[row]},{price[row]:.2f},{names},{'yes' if label_N[row] else 'no'}\n")
        return auc(logit_N, label_N.astype(np.float64))

    def train(self, *settings: str) -> dict[str, Any]:
        """The summary of a job, which is run once for all tests.

        With a tower in float32 on every machine: what is held against golden numbers must not depend on it."""
        if settings not in self._summaries:
            config = parse_config(YAML, ["tower.amp=off", *settings], folder=self.folder)
            self._summaries[settings] = summary_of(config, self.folder / f"run-{len(self._summaries)}")
        return self._summaries[settings]

    def auc(self, *settings: str) -> float:
        return float(self.train(*settings)["eval"]["auc"])


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return Planted(tmp_path_factory.mktemp("planted"))


def summary_of(config: JobConfig, run: Path) -> dict[str, Any]:
    return train(config, run_dir=run, quiet=True).to_dict()


@every(
    ("golden_auc", "settings"),
    [
        (0.782, [DCN]),
        (0.812, ["tables.default.optimizer={name: adagrad, lr: 0.1}"]),
        (0.660, ["tables.default.optimizer={name: sgd, lr: 1.0e-9}"]),
        (0.748, ["compression.pull.values=int8", "compression.push={values: int4}"]),
    ],
    ids=["dcn_v2", "adagrad", "frozen rows", "int8 and int4"],
)
def test_one_pass_over_the_planted_csv_reaches_its_golden_auc(
    planted: Planted, golden_auc: float, settings: list[str]
) -> None:
    """A broken model, optimizer or format lies far off, as the rows that do not move."""
    assert planted.auc("train.epochs=1", *settings) == pytest.approx(golden_auc, abs=0.01)


@every("amp", ["bf16", "fp16"])
def test_a_forced_precision_trains_and_says_when_the_machine_emulates_it(planted: Planted, amp: str) -> None:
    plain, mixed = (planted.train("train.max_steps=15", *more) for more in ([], [f"tower.amp={amp}"]))
    assert mixed["eval"]["logloss"] == pytest.approx(plain["eval"]["logloss"], abs=0.01)
    assert mixed["eval"]["logloss"] != plain["eval"]["logloss"]
    assert mixed["tower"]["chosen"]["amp"].startswith(f"{amp}: as configured")
    assert mixed["skipped_steps"] <= 3


# ---- trained to the end ----


@pytest.mark.slow
def test_models_and_modes_come_near_the_teacher_of_a_planted_csv(planted: Planted) -> None:
    plain = planted.train()
    assert 0.0 < planted.best_auc - plain["eval"]["auc"] < 0.02
    assert 0.9 < plain["eval"]["calibration"] < 1.1
    assert planted.best_auc - planted.auc(DCN) < 0.035
    assert planted.best_auc - planted.auc("tables.default.optimizer={name: adam, lr: 0.01}") < 0.025


@pytest.mark.slow
def test_bounded_and_async_learn_what_sync_learns(planted: Planted) -> None:
    found = {}
    for mode in ("sync", "bounded", "async"):
        settings = ["tower.amp=off", f"consistency.mode={mode}", "servers=2", "workers=2", "train.batch_size=128"]
        config = parse_config(YAML, settings, folder=planted.folder)
        found[mode] = LocalJob(config, open_data(config.data, seed=config.seed)).run()["eval"]["auc"]
    assert planted.best_auc - found["sync"] < 0.02
    assert found["bounded"] == pytest.approx(found["sync"], abs=0.006), found
    assert found["async"] == pytest.approx(found["sync"], abs=0.006), found


def real(folder: str, file: str) -> Path:
    if not (REAL / folder / file).exists():
        where = "docs/guide/data.md says where it is from"
        pytest.skip(f"{folder}/{file} is not in ../shared/data beside the checkout; {where}")
    return REAL / folder


ALONE = ["servers=0", "workers=1", "train.epochs=1", "tower.amp=off"]
# One pass in one process with seed 7; seeds 8 and 9 lie up to 0.003 away.
ADULT_AUC = {
    "{name: dlrm, bottom: [32], hidden: [64, 32]}": 0.9257, "fm": 0.9234,
    **{f"{{name: {name}, hidden: [64, 32]}}": found for name, found in {
        "dcn_v2": 0.9299, "deepfm": 0.9274, "wide_deep": 0.9270, "dnn": 0.9278, "xdeepfm": 0.9290, "autoint": 0.9273,
        "fibinet": 0.9284, "masknet": 0.9277, "finalmlp": 0.9293,
    }.items()},
}  # fmt: skip
OFTEN = [model for model in ADULT_AUC if "dlrm" in model or "finalmlp" in model]


@pytest.mark.parametrize(
    "model",
    [pytest.param(model, marks=pytest.mark.slow if model in OFTEN else pytest.mark.chaos) for model in ADULT_AUC],
)
def test_every_model_reaches_its_golden_auc_on_adult(tmp_path: Path, model: str) -> None:
    settings = [f"data.root={real('adult', 'adult.data')}", f"data.cache={tmp_path / 'cache'}", f"model={model}"]
    config = load_config(ROOT / "examples" / "adult.yaml", [*settings, *ALONE, "consistency.mode=sync"])
    summary = summary_of(config, tmp_path / "run")
    assert summary["eval"]["samples"] == 16_281
    assert summary["eval"]["auc"] == pytest.approx(ADULT_AUC[model], abs=0.003)


@pytest.mark.chaos
def test_census_reaches_its_target_in_one_pass(tmp_path: Path) -> None:
    settings = [f"data.root={real('census_income_kdd', 'census-income.test.gz')}", f"data.cache={tmp_path / 'cache'}"]
    summary = summary_of(load_config(ROOT / "examples" / "census.yaml", [*settings, *ALONE]), tmp_path / "run")
    assert summary["samples"] + summary["eval"]["samples"] == 99_762
    assert summary["eval"]["auc"] >= 0.945
