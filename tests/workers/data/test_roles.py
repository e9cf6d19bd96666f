"""A file has one role, and its rows keep theirs: no row trains a model that it evaluates, now or after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import DataError
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every


def _write(path: Path, first: int, count: int = 200) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    rows = range(first, first + count)
    path.write_text("x,c,y\n" + "".join(f"{x},{x},{x % 2}\n" for x in rows))
    return path


def _open(root: Path, **settings: Any) -> Data:
    base = {"root": str(root), "source": "csv", "label": "y", "dense": ["x"], "sparse": ["c"], "scale": "none"}
    return open_data(DataConfig.model_validate(base | settings), seed=0)


def _held(root: Path, **settings: Any) -> set[float]:
    """The numbers of the rows that are held out for evaluation."""
    data = _open(root, eval_fraction=0.3, **settings)
    assert data.eval is not None
    return set(data.eval.gather(np.arange(len(data.eval))).dense_BI[:, 0].tolist())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """days/1.csv, days/2.csv, other/3.csv, and links to the first one: soft.csv and hard.csv."""
    first = _write(tmp_path / "days" / "1.csv", 0)
    _write(tmp_path / "days" / "2.csv", 1000)
    _write(tmp_path / "other" / "3.csv", 2000)
    (tmp_path / "soft.csv").symlink_to(first)
    (tmp_path / "hard.csv").hardlink_to(first)
    return tmp_path


@every(
    ("files", "why"),
    [
        ({"train": ["days"], "eval": ["days/2.csv"]}, "days/2.csv: is in data.train and in data.eval; a file has one"),
        ({"train": ["days"], "test": ["days/../days/1.csv"]}, "the same file as .* is in data.train and in data.test"),
        ({"train": ["other"], "eval": ["days"], "test": ["soft.csv"]}, "soft.csv .* is in data.eval and in data.test"),
        (
            {"train": ["days"], "eval": ["soft.csv"]},
            "soft.csv .the same file as .*days/1.csv.: is in data.train and in",
        ),
        (
            {"train": ["days"], "eval": ["hard.csv"]},
            "hard.csv .the same file as .*days/1.csv.: is in data.train and in",
        ),
        ({"train": ["days", "days/1.csv"]}, "days/1.csv: is in data.train twice; name each file once"),
        ({"train": ["days", "hard.csv"]}, "hard.csv .the same file as .*1.csv.: is in data.train twice"),
        ({"train": ["other"], "eval": ["days/*", "days/2.csv"]}, "days/2.csv: is in data.eval twice"),
        ({"train": ["other"], "test": ["soft.csv", "hard.csv"]}, "hard.csv .* is in data.test twice"),
    ],
    ids=["folder", "dots", "eval and test", "soft", "hard", "twice", "twice by a link", "eval twice", "test twice"],
)
def test_a_file_is_there_once(root: Path, files: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why) as caught:
        _open(root, **files)
    assert "\n" not in str(caught.value)


def test_files_of_their_own_are_read_in_every_role(root: Path) -> None:
    data = _open(root, train=["days/1.csv"], eval=["days/2.csv"], test=["other"])
    assert data.eval is not None and (len(data.train), len(data.eval)) == (200, 200)


def test_a_new_file_moves_no_row_of_another_one_into_evaluation(root: Path) -> None:
    before = _held(root, train=["days"])
    assert 80 < len(before) < 160
    _write(root / "days" / "0.csv", 5000)
    after = _held(root, train=["days"])
    assert before == {x for x in after if x < 5000} < after


def test_rows_keep_their_role_when_the_folder_is_moved(root: Path) -> None:
    before = _held(root, train=["days"])
    (root / "days").rename(root / "moved")
    assert before == _held(root, train=["moved/*.csv"])


def test_rows_keep_their_role_when_rows_are_appended(root: Path) -> None:
    before = _held(root, train=["days"])
    _write(root / "days" / "1.csv", 0, 300)
    after = _held(root, train=["days"])
    assert before == {x for x in after if not 200 <= x < 300} < after


def test_files_hold_out_rows_of_different_numbers(root: Path) -> None:
    held = _held(root, train=["days"])
    assert {x for x in held if x < 1000} != {x - 1000 for x in held if x >= 1000}


def test_files_of_one_name_in_different_partitions_hold_out_different_rows(tmp_path: Path) -> None:
    for day in range(30):
        _write(tmp_path / "log" / f"dt={day}" / "part-0.csv", 1000 * day, 10)
    held = _held(tmp_path, train=["log"])
    assert 60 < len(held) < 120 and len({x % 1000 for x in held}) == 10


def test_a_file_under_another_name_is_split_by_that_name(root: Path) -> None:
    named = _held(root, train=["days/1.csv"])
    linked = _held(root, train=["soft.csv"])
    assert named != linked and _held(root, train=["days/1.csv"]) == named
