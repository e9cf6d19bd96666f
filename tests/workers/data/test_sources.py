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

from shardkeep.base.errors import ConfigError
from shardkeep.config import load_config
from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.sources.registry import open_data, source_named
from shardkeep.workers.data_config import FORMS, SOURCES, DataConfig
from shardkeep.workers.model_config import TwoTowerConfig
from tests.support.cases import every
from tests.support.data_files import batch_of, labels_of, opened, refusal, write_file
from tests.support.import_path import ROOT


def test_every_source_has_its_function_and_a_config_without_data_opens_none() -> None:
    for name in (*SOURCES, "my_module:my_function"):
        expected = "open_files" if name in FORMS else f"open_{name}" if name in SOURCES else "open_custom"
        assert source_named(name).__name__ == expected  # type: ignore[attr-defined]
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
CRITEO: dict[str, Any] = {"source": "criteo", "label": None, "scale": None}


def test_kaggles_file_needs_no_column_names(tmp_path: Path) -> None:
    train = opened(tmp_path, {"train.txt": TEXT}, **CRITEO).train
    batch = train.gather(np.array([1, 4]))
    assert train.schema.dense == tuple(f"I{i}" for i in range(1, 14)) and len(batch.ids) == 26
    assert batch.dense_BI[0, :5].tolist() == pytest.approx([math.log1p(x) for x in (1, 2, 3, 4, 0)])
    assert batch.ids["C1"].values_N.tolist() == [MISSING_ID] * 2
    assert batch.ids["C2"].values_N.tolist() == [hash_text(b"00000020"), hash_text(b"0000007d")]
    assert batch.label_BT[:, 0].tolist() == [1.0, 0.0]
    data = opened(tmp_path, {"train.txt": TEXT}, **CRITEO | {"scale": "none"}, dense=["I2"], sparse=["C3"])
    assert batch_of(data.train).dense_BI[1].tolist() == [2.0] and data.train.schema.tables() == ("C3",)
    items = opened(tmp_path, {"train.txt": TEXT}, **CRITEO, items=TwoTowerConfig(item=["C2"])).catalogue
    assert items is not None and sorted(items.values.to_pylist()) == ["00000020", "0000005e", "0000009c"]
    fields = _line(1, 8).rstrip("\n").split("\t")
    fields[15:17] = ['"a"', '"b']  # a quote is a character like any other
    batch = batch_of(opened(tmp_path, {"train.txt": "\t".join(fields) + "\n" + TEXT}, **CRITEO).train)
    assert [batch.ids[name].values_N[0] for name in ("C2", "C3")] == [hash_text(b'"a"'), hash_text(b'"b')]
    days = {f"days/day_{day}.gz": gzip.compress(TEXT.encode()) for day in range(2)}
    assert len(opened(tmp_path, days, **CRITEO, train=["days"]).train) == 12


@every(
    ("settings", "lines", "expected"),
    [
        ({"label": "x"}, TEXT, "data.label: has no effect"),
        ({"sparse": ["C27"]}, TEXT, "criteo has no column C27"),
        ({}, TEXT + TEXT.splitlines()[0].rpartition("\t")[0] + "\n", "train.txt, row 7: has 39 fields, expected 40"),
    ],
)
def test_settings_it_could_only_ignore_and_lines_with_a_missing_field_are_refused(
    tmp_path: Path, settings: dict[str, Any], lines: str, expected: str
) -> None:
    assert expected in refusal(tmp_path, {"train.txt": lines}, **CRITEO | settings)


EXAMPLES = Path(__file__).parents[3] / "examples"

ADULT_HEADER = (
    "age,workclass,fnlwgt,education,education-num,marital-status,occupation,relationship,race,sex,"
    "capital-gain,capital-loss,hours-per-week,native-country,salary\n"
)
ADULT_ROW = "{}, State-gov, 77516, Bachelors, 13, Never-married, ?, Husband, White, Male, 0, 0, 40, Cuba, {}\n"


def test_every_example_is_a_valid_config_and_the_demo_has_criteos_shape() -> None:
    assert [load_config(EXAMPLES / f"{name}.yaml").name for name in ("adult", "census")] == ["adult", "census"]
    assert load_config(EXAMPLES / "tune.yaml")
    config = load_config(EXAMPLES / "demo.yaml")
    schema = open_data(config.data, seed=config.seed).train.schema
    assert (config.name, schema.num_dense, len(schema.features)) == ("demo", 13, 26)
    assert config.servers == config.workers == 2


def test_adult_and_census_read_files_of_their_form(tmp_path: Path) -> None:
    for name, dot in (("adult.data", ""), ("adult.test", ".")):
        rows = [ADULT_ROW.format(20 + i, (">50K" if i % 3 == 0 else "<=50K") + dot) for i in range(9)]
        write_file(tmp_path / name, ADULT_HEADER + "".join(rows) + "\n")
    config = load_config(EXAMPLES / "adult.yaml", [f"data.root={tmp_path}"])
    data = open_data(config.data, seed=config.seed)
    assert labels_of(data) == batch_of(data.eval).label_BT[:, 0].tolist() == [1.0, 0.0, 0.0] * 3
    config = load_config(EXAMPLES / "census.yaml", [f"data.root={tmp_path}"])
    assert config.data.columns is not None and len(config.data.columns) == 42
    row = ", ".join(["1"] * 40)
    text = "".join(f"{i}, {row}, {' 50000+.' if i % 4 == 0 else '- 50000.'}\n" for i in range(200))
    (tmp_path / "census-income.test.gz").write_bytes(gzip.compress(text.encode()))
    data = open_data(config.data, seed=config.seed)
    assert data.eval is not None and len(data.train) + len(data.eval) == 200
    used = {*data.train.schema.dense, *(f.name for f in data.train.schema.features)}
    assert "instance_weight" not in used and "income" not in used
