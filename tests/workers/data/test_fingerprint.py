"""The data's fingerprint: it follows the content and nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.data_files import opened

LINES = [f"{i}.5,{i % 7},{i % 3}|{i % 5},{i % 2}" for i in range(40)]


def _mark(folder: Path, lines: list[str] = LINES, *, held: list[str] | None = None, seed: int = 0, **more: Any) -> str:
    files = {"a.csv": "\n".join(["x,c,m,y", *lines])}
    if held is not None:
        files["b.csv"] = "\n".join(["x,c,m,y", *held])
        more = {"eval": "b.csv"} | more
    columns = {"dense": ["x"], "sparse": ["c", {"column": "m", "separator": "|"}], "scale": None}
    return opened(folder, files, seed=seed, **columns | more).fingerprint


def test_equal_content_has_one_fingerprint_at_any_path_and_time_and_in_several_files(tmp_path: Path) -> None:
    mark = _mark(tmp_path / "one")
    assert mark and mark == _mark(tmp_path / "two", seed=5)
    os.utime(tmp_path / "one" / "a.csv", ns=(1, 1))
    assert mark == _mark(tmp_path / "one")
    tables = [{"column": "c", "table": "t"}, {"column": "m", "separator": "|", "pooling": "mean"}]
    assert mark == _mark(tmp_path / "one", sparse=tables), "tables and pooling do not count"
    mark = _mark(tmp_path / "one", scale="none")
    parts = {"held": LINES[10:], "eval": [], "train": ["a.csv", "b.csv"]}
    assert mark == _mark(tmp_path / "one", LINES[:10], scale="none", **parts)


def test_any_other_value_order_or_scaling_has_another_fingerprint(tmp_path: Path) -> None:
    last = {
        "dense": "39.25,4,0|4,1",
        "category": "39.5,5,0|4,1",
        "list entry": "39.5,4,0|3,1",
        "list length": "39.5,4,4,1",
        "label": "39.5,4,0|4,0",
        "missing": ",4,0|4,1",
    }
    marks = {name: _mark(tmp_path / name, [*LINES[:-1], line], scale="none") for name, line in last.items()}
    marks |= {
        "none": _mark(tmp_path / "none", scale="none"),
        "as it is": _mark(tmp_path / "as it is"),
        "backwards": _mark(tmp_path / "backwards", LINES[::-1]),
        "log": _mark(tmp_path / "log", scale="log"),
        "fill": _mark(tmp_path / "fill", dense=[{"column": "x", "fill": 3.0}]),
        "split": _mark(tmp_path / "split", eval_fraction=0.5),
        "seed": _mark(tmp_path / "seed", eval_fraction=0.5, seed=1),
        "an entry of the first list": _mark(tmp_path / "first", ["1,1,3|4,0", "1,1,5,1"]),
        "an entry of the next list": _mark(tmp_path / "next", ["1,1,3,0", "1,1,4|5,1"]),
    }
    assert len(set(marks.values())) == len(marks), marks


def test_training_and_evaluation_samples_have_a_part_each(tmp_path: Path) -> None:
    train, held = _mark(tmp_path / "one", held=LINES[:20]).split("-")
    other_train, other_held = _mark(tmp_path / "two", held=LINES[:19]).split("-")
    assert train == other_train == _mark(tmp_path / "three") and held != other_held


def test_the_synthetic_stream_is_known_by_its_settings_and_seed() -> None:
    def mark(seed: int = 0, **settings: Any) -> str:
        return open_data(DataConfig.model_validate({"synthetic": settings}), seed=seed).fingerprint

    assert mark() == mark()
    marks = [mark(), mark(1), mark(zipf=1.1), mark(num_dense=3), mark(train_samples=9), mark(ids="numbered")]
    assert len({m.split("-")[0] for m in marks}) == len(marks)
    assert mark().split("-")[0] == mark(eval_samples=9).split("-")[0]
