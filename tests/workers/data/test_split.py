"""`data.split`: rows of the training files held out for evaluation and test, by time, by a column or by chance."""

from __future__ import annotations

import datetime as dt
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings, strategies as st

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.conversion import Split
from shardkeep.workers.data.conversion.layout import layout_of
from shardkeep.workers.data.samples import Data, Dataset
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every

START = dt.datetime(2026, 1, 1)
COLUMNS: dict[str, Any] = {
    "label": "y",
    "dense": ["x", "price"],
    "sparse": ["item", {"column": "tags", "separator": "|"}],
    "scale": "none",
}
RULES = ("time", "user", "random")
CODE = """
import pyarrow.parquet as pq

def columns(split):
    if split == "eval":
        return None
    table = pq.read_table(FILE)
    names = {"dense": ("x", "price"), "sparse": ("item", "tags", "user", "ts")}
    parts = {key: {name: table[name] for name in own} for key, own in names.items()}
    return {"label": table["y"], **parts}
"""


def table_of(count: int = 300) -> pa.Table:
    """Rows with five users, three rows of each time, gaps and lists; x numbers the rows."""
    rng = np.random.default_rng(4)
    return pa.table(
        {
            "y": pa.array(np.arange(count) % 2),
            "x": pa.array(np.arange(count, dtype=np.float32)),
            "price": pa.array([None if i % 11 == 0 else i / 7 for i in range(count)], pa.float32()),
            "item": pa.array(rng.integers(0, 20, count)),
            "tags": pa.array([[f"t{t}" for t in rng.integers(0, 9, i % 4)] for i in range(count)]),
            "user": pa.array(rng.integers(0, 40, count)),
            "ts": pa.array([START + dt.timedelta(hours=i // 3) for i in rng.permutation(count).tolist()]),
        }
    )


def texts_of(table: pa.Table) -> dict[str, list[str]]:
    """The same table as a CSV has it."""
    columns = {name: table[name].to_pylist() for name in table.column_names}
    columns["tags"] = ["|".join(tags) for tags in columns["tags"]]
    columns["ts"] = [time.isoformat(" ") for time in columns["ts"]]
    return {name: ["" if v is None else str(v) for v in values] for name, values in columns.items()}


def write_csv(path: Path, table: pa.Table) -> None:
    columns = texts_of(table)
    path.write_text("\n".join([",".join(columns), *map(",".join, zip(*columns.values(), strict=True))]) + "\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("my_frames", None)


def opened(folder: Path, train: Sequence[str], by: str, *, seed: int = 0, **changes: Any) -> Data:
    """`train`: files, or module:function."""
    own = ":" in train[0]
    config = COLUMNS | {"root": str(folder)} | ({"source": train[0]} if own else {"train": list(train)})
    if own:
        config["sparse"] = ["item", "tags"]
        config["label"] = "label"
    elif train[0].endswith("parquet"):
        config["sparse"] = ["item", "tags"]
    config |= {"split": {"by": by}} | ({"time": "ts"} if by == "time" else {}) | changes
    return open_data(DataConfig.model_validate(config), seed=seed)


def rows_of(dataset: Dataset | None) -> list[int]:
    assert dataset is not None
    numbers: list[float] = dataset.gather(np.arange(len(dataset))).dense_BI[:, 0].tolist()
    return sorted(map(int, numbers))


def sides(data: Data) -> list[list[int]]:
    return [rows_of(part) for part in (data.train, data.eval, data.test)]


@every("by", RULES)
def test_the_same_rows_in_any_form_and_order_of_files_are_on_the_same_sides(folder: Path, by: str) -> None:
    table = table_of()
    mixed = table.take(np.random.default_rng(1).permutation(len(table)))
    write_csv(folder / "all.csv", table)
    write_csv(folder / "b.csv", mixed.slice(0, 120))
    write_csv(folder / "a.csv", mixed.slice(120))
    pq.write_table(mixed, folder / "mixed.parquet", row_group_size=50)
    (folder / "my_frames.py").write_text(f"FILE = {str(folder / 'mixed.parquet')!r}\n{CODE}")
    expected = sides(opened(folder, ["all.csv"], by))
    assert sorted(itertools.chain(*expected)) == list(range(300)) and min(map(len, expected)) > 10
    for train in (["b.csv", "a.csv"], ["a.csv", "b.csv"], ["mixed.parquet"], ["my_frames:columns"]):
        assert sides(opened(folder, train, by)) == expected
    other = sides(opened(folder, ["all.csv"], by, seed=1))
    assert (other == expected) == (by == "time")


def test_equal_times_or_values_are_on_one_side_and_the_newest_rows_are_the_test(tmp_path: Path) -> None:
    table = table_of()
    pq.write_table(table, tmp_path / "a.parquet")
    hours = np.array([(time - START) // dt.timedelta(hours=1) for time in table["ts"].to_pylist()])
    data = opened(tmp_path, ["a.parquet"], "time", split={"by": "time", "eval": 0.2, "test": 0.1})
    train, held, test = (hours[rows] for rows in sides(data))
    assert [train.max(), held.min(), held.max(), test.min()] == [69, 70, 89, 90]
    order = [hours[int(x)] for x in data.train.gather(np.arange(len(data.train))).dense_BI[:, 0]]
    assert order == sorted(order)
    users = np.array(table["user"])
    parts = [set(users[rows].tolist()) for rows in sides(opened(tmp_path, ["a.parquet"], "user"))]
    assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])


TIMES = st.lists(st.integers(0, 6), min_size=1, max_size=40)


@settings(max_examples=25, deadline=None)
@given(TIMES, st.randoms(use_true_random=False), st.floats(0.05, 0.45), st.floats(0.05, 0.45))
def test_borders_of_time_cut_no_time_and_give_the_newer_side_its_share(
    hours: list[int], random: Any, held: float, tested: float
) -> None:
    split = split_of("time", eval=held, test=tested)
    chunk = chunk_of(hours=hours)
    split.fit(lambda _: [chunk])
    side_N = split.sides_of(chunk, np.zeros(len(hours), np.uint8))
    by_hour = {hour: {int(side_N[i]) for i, h in enumerate(hours) if h == hour} for hour in hours}
    assert all(len(found) == 1 for found in by_hour.values())
    ordered = [by_hour[hour].pop() for hour in sorted(by_hour)]
    assert ordered == sorted(ordered)
    tests = sum(side == 2 for side in side_N)
    least = min(hour for hour, side in zip(sorted(by_hour), ordered, strict=True) if side == 2)
    assert tests >= tested * len(hours) - 1e-6
    assert tests - hours.count(least) < tested * len(hours)  # no time more than needed
    mixed = list(range(len(hours)))
    random.shuffle(mixed)
    other, parts = split_of("time", eval=held, test=tested), chunk_of(hours=[hours[i] for i in mixed])
    other.fit(lambda _: [parts.slice(0, len(hours) // 2), parts.slice(len(hours) // 2, len(hours))])
    assert (other.sides_of(parts, np.zeros(len(hours), np.uint8)) == side_N[mixed]).all()


ROW = st.tuples(
    st.integers(0, 1),
    st.one_of(st.none(), st.floats(-1e6, 1e6, width=32)),
    st.integers(-5, 5),
    st.lists(st.sampled_from(["a", "b", "7"]), max_size=3),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=20), st.sampled_from(["random", "item"]))
def test_sides_follow_from_values_alone(rows: list[Any], by: str) -> None:
    y, x, item, tags = zip(*rows, strict=True)
    typed = {"y": pa.array(y), "x": pa.array(x, pa.float32()), "item": pa.array(item), "tags": pa.array(tags)}
    typed["tags"] = typed["tags"].cast(pa.list_(pa.string()))
    texts = {"y": y, "x": x, "item": item, "tags": ["|".join(each) for each in tags]}
    written = {name: pa.array(["" if v is None else str(v) for v in values]) for name, values in texts.items()}
    label_N = np.array(y, np.uint8)
    found = split_of(by).sides_of(chunk_with(typed), label_N).tolist()
    assert found == split_of(by, separator="|").sides_of(chunk_with(written), label_N).tolist()
    backwards = {name: values.take(pa.array(range(len(y))[::-1])) for name, values in typed.items()}
    assert found[::-1] == split_of(by).sides_of(chunk_with(backwards), label_N[::-1].copy()).tolist()
    equal = dict(zip(map(repr, rows), found, strict=True))
    assert found == [equal[repr(row)] for row in rows]


def split_of(by: str, *, separator: str | None = None, **shares: float) -> Split:
    tags: dict[str, Any] = {"column": "tags"} | ({} if separator is None else {"separator": separator})
    columns = {"dense": ["x"], "sparse": ["item", tags]} if by != "time" else {"dense": ["x"], "time": "ts"}
    config = DataConfig.model_validate({"train": "a.csv", "label": "y", "split": {"by": by, **shares}} | columns)
    record = config.held_out(seed=3)
    assert record is not None
    return Split(record, layout_of(config))


def chunk_with(columns: dict[str, pa.Array]) -> Chunk:
    return Chunk("a", np.arange(1, 1 + len(columns["y"]), dtype=np.int64), columns)


def chunk_of(hours: list[int]) -> Chunk:
    times = pa.array([START + dt.timedelta(hours=hour) for hour in hours])
    return chunk_with({"ts": times, "y": pa.array([0] * len(hours))})


def test_shares_are_about_those_of_the_rows_or_told_in_a_line(tmp_path: Path) -> None:
    config = {"root": str(tmp_path), "train": "a.csv", "label": "y", "dense": ["x"]}

    def written(users: list[int], by: str, **shares: float) -> tuple[Data, str]:
        (tmp_path / "a.csv").write_text("y,x,user\n" + "".join(f"{i % 2},{i},{u}\n" for i, u in enumerate(users)))
        settings = DataConfig.model_validate(config | {"split": {"by": by, **shares}})
        assert settings.split is not None
        data = open_data(settings, seed=9)
        return data, data.uneven(settings.split)

    for by in ("random", "user"):
        data, told = written([i // 2 for i in range(10_000)], by, eval=0.2, test=0.05)
        assert data.eval is not None and data.test is not None and told == ""
        assert abs(len(data.eval) - 2000) < 180 and abs(len(data.test) - 500) < 90
        assert "for evaluation + " in data.describe() and "for the test" in data.describe()
    users = [0] * 4_000 + list(range(1, 1001))  # one of them has most rows
    assert written(users, "random", eval=0.1, test=0.0)[1] == ""
    told = written(users, "user", eval=0.1, test=0.0)[1]
    held = re.fullmatch(r"data.split by user: evaluation has (.*)% of the rows, not 10%; equal values .*", told)
    assert held is not None and float(held[1]) < 4


def test_scaling_is_that_of_the_training_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("y,x,ts\n" + "".join(f"{i % 2},{i},{i}\n" for i in range(100)))
    data = opened(tmp_path, ["a.csv"], "time", dense=["x"], sparse=[], scale="standard")
    train = data.train.gather(np.arange(80)).dense_BI[:, 0]
    assert abs(train.mean()) < 1e-6 and train.std() == pytest.approx(1.0)


def test_of_eval_fraction_no_bit_changes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        lines = [f"{i * 0.25},{(i * 7) % 13},{(i // 3) % 2}" for i in range(100)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,u,y", *lines]) + "\n")
    config = {"root": str(tmp_path), "train": ["a.csv", "b.csv"], "label": "y", "dense": ["x"], "sparse": ["u"]}
    marks = [open_data(DataConfig.model_validate(config | {"eval_fraction": 0.3}), seed=s).fingerprint for s in (0, 5)]
    assert marks == ["027049a0bbafbefe-19f59854596d8891", "2607a55f0b2c48df-0b2f64e29542681c"]  # before `data.split`


def test_a_split_is_in_the_cache_the_fingerprint_and_the_record_of_inputs(tmp_path: Path) -> None:
    pq.write_table(table_of(), tmp_path / "a.parquet")
    found = {}
    for name, changes in {
        "user": {},
        "seed": {"seed": 1},
        "share": {"split": {"by": "user", "eval": 0.1, "test": 0.2}},
        "random": {"split": "random"},
    }.items():
        data = opened(tmp_path, ["a.parquet"], "user", **changes)
        assert data.inputs is not None
        found[name] = data.fingerprint, str(data.inputs["split"])
    assert len({mark for mark, _ in found.values()}) == len({record for _, record in found.values()}) == 4
    entries = [path for path in (tmp_path / ".shardkeep-cache").iterdir() if path.is_dir()]
    assert len(entries) == 4
    again = opened(tmp_path, ["a.parquet"], "user")
    assert again.fingerprint == found["user"][0] and "split" not in (_plain(tmp_path).inputs or {})
    by_time = {opened(tmp_path, ["a.parquet"], "time", seed=seed).fingerprint for seed in (0, 1)}
    assert len(by_time) == 1 and len([p for p in (tmp_path / ".shardkeep-cache").iterdir() if p.is_dir()]) == 6


def _plain(folder: Path) -> Data:
    config = COLUMNS | {"root": str(folder), "train": "a.parquet", "sparse": ["item", "tags"]}
    return open_data(DataConfig.model_validate(config), seed=0)


@every(
    ("changes", "lines", "text"),
    [
        ({"split": {"by": "usr"}}, None, "has no column usr; did you mean user?"),
        ({"split": {"by": "y"}}, None, "data.split.by: names y, which is the label"),
        ({"split": {"by": "user"}}, ["0,1,7,1", "1,2,7,2"], "all rows have one value, so that none can be held out"),
        ({"split": {"by": "random"}}, ["1,1,7,1", "1,1,7,1"], "all rows have one value, so"),
        (
            {"split": {"by": "time"}},
            ["0,1,7,4", "1,2,8,4"],
            "training data has no rows .*all rows have one",
        ),
        ({"split": {"by": "time"}}, ["0,1,7,4", "1,2,8,", "1,2,8,"], "row 2, column ts: the time is missing"),
        (
            {"split": {"by": "time", "eval": 0.4, "test": 0.5}},
            ["0,1,7,1", "1,2,8,2"],
            r"the training data has no rows \(data.split: \{by: time, eval: 0.4, test: 0.5\}\)",
        ),
        ({"split": {"by": "user"}}, ["0,1,7,1", "1,2,8,2"], "data has no rows .data.split: .by: user"),
        ({"split": {"by": "x"}}, ["0,1.5,7,1", "1,2,8,2"], "data has no rows"),
    ],
    ids=["unknown", "label", "one value", "one row", "one time", "no time", "no training", "few users", "number"],
)
def test_what_cannot_be_split_is_one_line(
    tmp_path: Path, changes: dict[str, Any], lines: list[str] | None, text: str
) -> None:
    (tmp_path / "a.csv").write_text("\n".join(["y,x,user,ts", *(lines or ["0,1,7,1", "1,2,8,2"])]) + "\n")
    label = {"column": "y", "kind": "number"}
    with pytest.raises((ConfigError, DataError), match=text) as error:
        opened(tmp_path, ["a.csv"], str(changes["split"]["by"]), label=label, dense=["x"], sparse=[], **changes)
    assert "\n" not in str(error.value)


def test_own_code_with_evaluation_data_of_its_own_refuses_it(folder: Path) -> None:
    code = "def arrays(split):\n    return {'label': [0, 1], 'dense': {'x': [1.0, 2.0]}}\n"
    (folder / "my_frames.py").write_text(code)
    with pytest.raises(ConfigError, match=r"data.split: has no effect, my_frames:arrays returns evaluation data"):
        open_data(DataConfig(source="my_frames:arrays", root=str(folder), split={"by": "random"}), seed=0)  # type: ignore[arg-type]
