"""The sources: their registry, Criteo's click logs, and the files of the example configs."""

from __future__ import annotations

import gzip
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.config import load_config
from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data, source_named
from shardkeep.workers.data_config import SOURCES, DataConfig
from tests.support.cases import every

ROOT = Path(__file__).resolve().parents[3]


@every("name", [*SOURCES, "my_module:my_function"])
def test_every_source_has_its_function(name: str) -> None:
    expected = f"open_{name}" if name in SOURCES else "open_custom"
    assert source_named(name).__name__ == expected  # type: ignore[attr-defined]


def test_a_config_without_data_opens_none() -> None:
    with pytest.raises(ConfigError, match=r"^data: is missing; allowed: files, as in data: \{train: "):
        open_data(DataConfig(), seed=0)


def test_a_source_loads_no_library_of_another_one() -> None:
    code = (
        "import sys; from shardkeep.workers.data_config import DataConfig; "
        "from shardkeep.workers.data.sources.registry import open_data; "
        "open_data(DataConfig(source='synthetic'), seed=0); "
        "print([m for m in ('pyarrow', 'numba', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _line(label: int, seed: int) -> str:
    dense = [str(seed + i) if (seed + i) % 5 else "" for i in range(13)]
    sparse = [f"{seed * 31 + i:08x}" if i % 7 else "" for i in range(26)]
    return "\t".join([str(label), *dense, *sparse]) + "\n"


TEXT = "".join(_line(i % 2, i) for i in range(6))


def _open(folder: Path, **settings: Any) -> Data:
    base: dict[str, Any] = {"source": "criteo", "root": str(folder), "train": ["train.txt"]}
    return open_data(DataConfig.model_validate(base | settings), seed=0)


def test_kaggles_file_needs_no_column_names(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(TEXT)
    train = _open(tmp_path).train
    batch = train.gather(np.array([1, 4]))
    assert train.schema.dense == tuple(f"I{i}" for i in range(1, 14)) and len(batch.ids) == 26
    assert batch.dense_BI[0, :5].tolist() == pytest.approx([math.log1p(x) for x in (1, 2, 3, 4, 0)])
    assert batch.ids["C1"].values_N.tolist() == [MISSING_ID] * 2
    assert batch.ids["C2"].values_N.tolist() == [hash_text(b"00000020"), hash_text(b"0000007d")]
    assert batch.label_BT[:, 0].tolist() == [1.0, 0.0]


def test_a_quote_is_a_character_like_any_other(tmp_path: Path) -> None:
    fields = _line(1, 8).rstrip("\n").split("\t")
    fields[15:17] = ['"a"', '"b']
    (tmp_path / "train.txt").write_text("\t".join(fields) + "\n" + TEXT)
    batch = _open(tmp_path).train.gather(np.array([0]))
    assert [batch.ids[name].values_N.tolist() for name in ("C2", "C3")] == [[hash_text(b'"a"')], [hash_text(b'"b')]]


def test_a_folder_of_compressed_days_is_one_data_set(tmp_path: Path) -> None:
    (tmp_path / "days").mkdir()
    for day in range(2):
        (tmp_path / "days" / f"day_{day}.gz").write_bytes(gzip.compress(TEXT.encode()))
    assert len(_open(tmp_path, train=["days"]).train) == 12


def test_fewer_columns_and_another_scale_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(TEXT)
    data = _open(tmp_path, dense=["I2"], sparse=[{"column": "C3", "table": "t"}], scale="none")
    assert data.train.gather(np.array([1])).dense_BI.tolist() == [[2.0]]
    assert data.train.schema.tables() == ("t",)


@every(
    ("settings", "expected"),
    [({"label": "x"}, "data.label: has no effect"), ({"sparse": ["C27"]}, "criteo has no column C27")],
)
def test_settings_it_could_only_ignore_and_lines_with_a_missing_field_are_refused(
    tmp_path: Path, settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        _open(tmp_path, **settings)
    (tmp_path / "train.txt").write_text(TEXT + TEXT.splitlines()[0].rpartition("\t")[0] + "\n")
    with pytest.raises(DataError, match=r"train.txt, row 7: has 39 fields, expected 40"):
        _open(tmp_path)


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
