"""Criteo's click logs, as published."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every


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


def test_a_line_with_a_missing_field_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(TEXT + TEXT.splitlines()[0].rpartition("\t")[0] + "\n")
    with pytest.raises(DataError, match=r"train.txt, row 7: has 39 fields, expected 40"):
        _open(tmp_path)


@every(
    ("settings", "expected"),
    [({"label": "x"}, "data.label: has no effect"), ({"sparse": ["C27"]}, "criteo has no column C27")],
)
def test_settings_it_could_only_ignore_are_refused(tmp_path: Path, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        _open(tmp_path, **settings)
