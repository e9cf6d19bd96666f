"""The data's fingerprint: it follows the content and nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every

LINES = [f"{i}.5,{i % 7},{i % 3}|{i % 5},{i % 2}" for i in range(40)]


def _mark(folder: Path, lines: list[str] = LINES, *, held: list[str] | None = None, seed: int = 0, **more: Any) -> str:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "a.csv").write_text("\n".join(["x,c,m,y", *lines]))
    if held is not None:
        (folder / "b.csv").write_text("\n".join(["x,c,m,y", *held]))
        more["eval"] = "b.csv"
    base = {
        "source": "csv",
        "root": str(folder),
        "train": "a.csv",
        "label": "y",
        "dense": ["x"],
        "sparse": ["c", {"column": "m", "separator": "|"}],
    }
    return open_data(DataConfig.model_validate(base | more), seed=seed).fingerprint


def test_equal_content_has_one_fingerprint_at_any_path_and_time(tmp_path: Path) -> None:
    mark = _mark(tmp_path / "one")
    assert mark and mark == _mark(tmp_path / "two", seed=5)
    os.utime(tmp_path / "one" / "a.csv", ns=(1, 1))
    assert mark == _mark(tmp_path / "one")


def test_one_file_or_two_with_the_same_rows_are_the_same_content(tmp_path: Path) -> None:
    mark = _mark(tmp_path, scale="none")
    (tmp_path / "b.csv").write_text("\n".join(["x,c,m,y", *LINES[10:]]))
    assert mark == _mark(tmp_path, LINES[:10], train=["a.csv", "b.csv"], scale="none")


@every(
    ("row", "line"),
    [
        (39, "39.25,4,0|4,1"),
        (39, "39.5,5,0|4,1"),
        (39, "39.5,4,0|3,1"),
        (39, "39.5,4,4,1"),
        (39, "39.5,4,0|4,0"),
        (39, ",4,0|4,1"),
    ],
    ids=["dense", "category", "list entry", "list length", "label", "missing"],
)
def test_one_other_value_changes_the_fingerprint(tmp_path: Path, row: int, line: str) -> None:
    changed = [*LINES[:row], line, *LINES[row + 1 :]]
    assert _mark(tmp_path / "one", scale="none") != _mark(tmp_path / "two", changed, scale="none")


def test_an_entry_moved_from_one_list_to_the_next_changes_the_fingerprint(tmp_path: Path) -> None:
    one = ["1,1,3|4,0", "1,1,5,1"]
    two = ["1,1,3,0", "1,1,4|5,1"]
    assert _mark(tmp_path / "one", one) != _mark(tmp_path / "two", two)


def test_the_order_of_rows_and_the_scaling_count(tmp_path: Path) -> None:
    marks = {
        _mark(tmp_path / "one"),
        _mark(tmp_path / "two", LINES[::-1]),
        _mark(tmp_path / "three", scale="log"),
        _mark(tmp_path / "four", dense=[{"column": "x", "fill": 3.0}]),
        _mark(tmp_path / "five", eval_fraction=0.5),
        _mark(tmp_path / "six", eval_fraction=0.5, seed=1),
    }
    assert len(marks) == 6


def test_training_and_evaluation_samples_have_a_part_each(tmp_path: Path) -> None:
    train, held = _mark(tmp_path / "one", held=LINES[:20]).split("-")
    other_train, other_held = _mark(tmp_path / "two", held=LINES[:19]).split("-")
    assert train == other_train and held != other_held
    assert train == _mark(tmp_path / "three")


def test_tables_and_pooling_do_not_count(tmp_path: Path) -> None:
    columns = [{"column": "c", "table": "t"}, {"column": "m", "separator": "|", "pooling": "mean"}]
    assert _mark(tmp_path) == _mark(tmp_path, sparse=columns)


def test_the_synthetic_stream_is_known_by_its_settings_and_seed() -> None:
    def mark(seed: int = 0, **settings: Any) -> str:
        return open_data(DataConfig.model_validate({"synthetic": settings}), seed=seed).fingerprint

    assert mark() == mark()
    marks = [mark(), mark(1), mark(zipf=1.1), mark(num_dense=3), mark(train_samples=9), mark(ids="numbered")]
    assert len({m.split("-")[0] for m in marks}) == len(marks)
    assert mark().split("-")[0] == mark(eval_samples=9).split("-")[0]


OWN = """
import numpy as np
from shardkeep.workers.data.schema import Schema

def arrays(split, last):
    return {"label": [0, 1, last], "dense": {"x": [1.0, 2.0, 3.0]}} if split == "train" else None

class Own:
    schema = Schema(("x",), ())
    def __init__(self, rows): self.rows = rows
    def __len__(self): return self.rows
    def gather(self, rows_B): raise AssertionError("opening reads no samples")

def own(split, rows, mark=None):
    made = Own(rows)
    if mark is not None:
        made.fingerprint = (lambda: mark["call"]) if isinstance(mark, dict) else mark
    return made if split == "train" else None
"""


def test_a_source_of_ones_own_is_known_by_its_arrays_or_by_what_it_states(
    tmp_path: Path,
) -> None:
    module = f"own_{os.getpid()}_marks"
    (tmp_path / f"{module}.py").write_text(OWN)

    def mark(name: str, **options: Any) -> str:
        config = DataConfig(source=f"{module}:{name}", root=str(tmp_path), options=options)
        return open_data(config, seed=0).fingerprint

    assert mark("arrays", last=0) == mark("arrays", last=0.0) != mark("arrays", last=1)
    assert mark("own", rows=3) != mark("own", rows=4)
    assert mark("own", rows=3, mark="a") == mark("own", rows=4, mark="a") != mark("own", rows=3, mark="b")
    assert mark("own", rows=3, mark={"call": "a"}) == mark("own", rows=3, mark="a")
    with pytest.raises(ConfigError, match="fingerprint is a list; allowed: a text or whole number"):
        mark("own", rows=3, mark=["a"])
