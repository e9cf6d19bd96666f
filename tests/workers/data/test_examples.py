"""The example configs: they parse, and those on UCI's files fit small files of the same form."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from shardkeep.config import load_config
from shardkeep.workers.data.sources.registry import open_data
from tests.support.cases import every

EXAMPLES = Path(__file__).parents[3] / "examples"

ADULT_HEADER = (
    "age,workclass,fnlwgt,education,education-num,marital-status,occupation,relationship,race,sex,"
    "capital-gain,capital-loss,hours-per-week,native-country,salary\n"
)
ADULT_ROW = "{}, State-gov, 77516, Bachelors, 13, Never-married, ?, Husband, White, Male, 0, 0, 40, Cuba, {}\n"


@every("name", ["demo", "adult", "census"])
def test_every_example_is_a_valid_config(name: str) -> None:
    assert load_config(EXAMPLES / f"{name}.yaml").name == name


def test_the_demo_job_is_synthetic_and_has_criteos_shape() -> None:
    config = load_config(EXAMPLES / "demo.yaml")
    data = open_data(config.data, seed=config.seed)
    assert (data.train.schema.num_dense, len(data.train.schema.features)) == (13, 26)
    assert config.servers == config.workers == 2


def test_adult_reads_files_of_its_form(tmp_path: Path) -> None:
    for name, dot in (("adult.data", ""), ("adult.test", ".")):
        rows = [ADULT_ROW.format(20 + i, (">50K" if i % 3 == 0 else "<=50K") + dot) for i in range(9)]
        (tmp_path / name).write_text(ADULT_HEADER + "".join(rows) + "\n")
    config = load_config(EXAMPLES / "adult.yaml", [f"data.root={tmp_path}"])
    data = open_data(config.data, seed=config.seed)
    assert data.eval is not None and len(data.train) == len(data.eval) == 9
    for part in (data.train, data.eval):
        assert part.gather(np.arange(9)).label_BT[:, 0].tolist() == [1.0, 0.0, 0.0] * 3


def test_census_reads_files_of_its_form(tmp_path: Path) -> None:
    config = load_config(EXAMPLES / "census.yaml", [f"data.root={tmp_path}"])
    assert config.data.columns is not None and len(config.data.columns) == 42
    row = ", ".join(["1"] * 41)
    text = "".join(f"{row}, {' 50000+.' if i % 4 == 0 else '- 50000.'}\n" for i in range(200))
    (tmp_path / "census-income.test.gz").write_bytes(gzip.compress(text.encode()))
    data = open_data(config.data, seed=config.seed)
    assert data.eval is not None and len(data.train) + len(data.eval) == 200
    used = {*data.train.schema.dense, *(f.name for f in data.train.schema.features)}
    assert "instance_weight" not in used and "income" not in used
