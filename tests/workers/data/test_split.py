"""`data.split` and `data.time`: rows held out by time, by a column or by chance, and training samples in an order."""

from __future__ import annotations

import datetime as dt
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings, strategies as st

from shardkeep.workers.data.beginnings import known_targets, shares
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.layout import Fitted, layout_of
from shardkeep.workers.data.conversion.typing import facts_of
from shardkeep.workers.data.fitting.split import Split
from shardkeep.workers.data.samples import Data, Side, label_lines
from shardkeep.workers.data.sides import sides_of
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every
from tests.support.data_files import first_column, opened, refusal, write_file
from tests.support.retrieval import NEXT, Takes

START = dt.datetime(2026, 1, 1)
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


def as_csv(table: pa.Table) -> str:
    columns = {name: table[name].to_pylist() for name in table.column_names}
    columns["tags"] = ["|".join(tags) for tags in columns["tags"]]
    columns["ts"] = [time.isoformat(" ") for time in columns["ts"]]
    rows = (["" if value is None else str(value) for value in row] for row in zip(*columns.values(), strict=True))
    return "\n".join([",".join(columns), *map(",".join, rows)]) + "\n"


def split(folder: Path, train: Sequence[str], by: str, *, seed: int = 0, **changes: Any) -> Data:
    """`train`: files, or module:function."""
    tags: Any = {"column": "tags", "separator": "|"} if train[0].endswith("csv") else "tags"
    config: dict[str, Any] = {"train": list(train), "dense": ["x", "price"], "sparse": ["item", tags]}
    if ":" in train[0]:
        config |= {"source": train[0], "train": [], "label": "label"}
    return opened(
        folder, seed=seed, **config | {"split": {"by": by}} | ({"time": "ts"} if by == "time" else {}) | changes
    )


def sides(data: Data) -> list[list[int]]:
    return [sorted(map(int, first_column(part))) for part in (data.train, data.eval, data.test)]


@every("by", ["time", "user", "random"])
def test_the_same_rows_in_any_form_and_order_of_files_are_on_the_same_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    table = table_of()
    mixed = table.take(np.random.default_rng(1).permutation(len(table)))
    for name, part in (("all", table), ("b", mixed.slice(0, 120)), ("a", mixed.slice(120))):
        write_file(tmp_path / f"{name}.csv", as_csv(part))
    pq.write_table(mixed, tmp_path / "mixed.parquet", row_group_size=50)
    (tmp_path / f"frames_by_{by}.py").write_text(f"FILE = {str(tmp_path / 'mixed.parquet')!r}\n{CODE}")
    expected = sides(split(tmp_path, ["all.csv"], by))
    if by == "time":
        newest = [max(table["ts"].take(pa.array(rows)).to_pylist()) for rows in expected]
        assert newest == sorted(newest)
    assert sorted(itertools.chain(*expected)) == list(range(300)) and min(map(len, expected)) > 10
    for train in (["b.csv", "a.csv"], ["a.csv", "b.csv"], ["mixed.parquet"], [f"frames_by_{by}:columns"]):
        assert sides(split(tmp_path, train, by)) == expected
    assert (sides(split(tmp_path, ["all.csv"], by, seed=1)) == expected) == (by == "time")


TIMES = st.lists(st.integers(0, 6), min_size=1, max_size=40)


@settings(max_examples=25, deadline=None)
@given(TIMES, st.randoms(use_true_random=False), st.floats(0.05, 0.45), st.floats(0.05, 0.45))
def test_borders_of_time_cut_no_time_and_give_the_newer_side_its_share(
    hours: list[int], random: Any, held: float, tested: float
) -> None:
    split = split_of("time", eval=held, test=tested)
    chunk = chunk_of(hours=hours)
    side_N = split.parted([chunk], Fitted())
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
    halves = [parts.slice(0, len(hours) // 2), parts.slice(len(hours) // 2, len(hours))]
    assert (other.parted(halves, Fitted()) == side_N[mixed]).all()


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
    found = parts_of(by, typed)
    assert found == parts_of(by, written, separator="|")
    backwards = {name: values.take(pa.array(range(len(y))[::-1])) for name, values in typed.items()}
    assert found[::-1] == parts_of(by, backwards)
    values = [repr(row if by == "random" else row[2]) for row in rows]
    equal = dict(zip(values, found, strict=True))
    assert found == [equal[value] for value in values]


def split_of(by: str, *, separator: str | None = None, **shares: float) -> Split:
    tags: dict[str, Any] = {"column": "tags"} | ({} if separator is None else {"separator": separator})
    columns = {"dense": ["x"], "sparse": ["item", tags]} if by != "time" else {"dense": ["x"], "time": "ts"}
    config = DataConfig.model_validate({"train": "a.csv", "label": "y", "split": {"by": by, **shares}} | columns)
    record = config.held_out(seed=3)
    assert record is not None
    return Split(record, layout_of(config))


def parts_of(by: str, columns: dict[str, pa.Array], **settings: Any) -> list[int]:
    split, schema = split_of(by, **settings), pa.schema({name: values.type for name, values in columns.items()})
    sides: list[int] = split.parted([chunk_with(columns)], facts_of({"a": schema}, split.layout)).tolist()
    return sides


def chunk_with(columns: dict[str, pa.Array]) -> Chunk:
    return Chunk("a", np.arange(1, 1 + len(columns["y"]), dtype=np.int64), columns)


def chunk_of(hours: list[int]) -> Chunk:
    times = pa.array([START + dt.timedelta(hours=hour) for hour in hours])
    return chunk_with({"ts": times, "y": pa.array([0] * len(hours))})


@every(("by", "late"), [("time", 0.1), ("time", 0.4), ("random", 0.1)])
def test_the_share_of_the_label_is_told_and_asked_about_where_it_is_far_off(
    by: str, late: float, tmp_path: Path
) -> None:
    rows = [f"{int(i % 10 < 10 * (late if i >= 1800 else 0.4))},{i}" for i in range(2000)]
    config = {"dense": ["ts"], "sparse": [], "split": by, "time": "ts"}
    data = opened(tmp_path, {"a.csv": "\n".join(["y,ts", *rows]) + "\n"}, **config)
    line, *questions = data.remarks(DataConfig.model_validate({"train": "a.csv", "label": "y"} | config))
    shares = f"y: share 0.4 in training, 0.4 in evaluation, {late} in the test"
    assert line == f"{shares}; split by time (ts)" or (
        by == "random" and line.endswith("; split at random, not by time")
    )
    why = "does ts change with it? Then set another data.time, or data.split: random"
    assert questions == ([f"{shares}; {why}"] if by == "time" and late == 0.1 else [])


def test_a_mean_that_is_far_off_by_chance_or_of_few_groups_is_not_asked_about() -> None:
    def asked(rows: int, groups: int, share: float, scale: float = 1.0) -> int:
        labels = [scale * (np.arange(rows) < rows * each)[:, None] for each in (0.3, share)]
        sides = {name: Side(label_NT, None, groups) for name, label_NT in zip("ab", labels, strict=True)}
        return len(label_lines(["y"], sides, "user", None)) - 1

    assert asked(1000, 1000, 0.2) == asked(1000, 1000, 0.2, 7.5) == 1
    assert asked(1000, 1000, 0.25) == asked(100, 100, 0.2) == asked(1000, 50, 0.2) == 0


def test_shares_are_about_those_of_the_rows_or_told_in_a_line(tmp_path: Path) -> None:
    def written(users: list[int], by: str, **shares: float) -> tuple[Data, str]:
        files = {"a.csv": "y,x,user\n" + "".join(f"{i % 2},{i},{u}\n" for i, u in enumerate(users))}
        shares_by: Any = {"by": by, **shares}
        data = opened(tmp_path, files, dense=["x"], split=shares_by, seed=9)
        record = DataConfig.model_validate({"train": "a.csv", "split": shares_by}).split
        assert record is not None
        return data, data.uneven(record)

    for by in ("random", "user"):
        data, told = written([i // 2 for i in range(10_000)], by, eval=0.2, test=0.05)
        assert data.eval is not None and data.test is not None and told == ""
        assert abs(len(data.eval) - 2000) < 180 and abs(len(data.test) - 500) < 90
        assert "for evaluation + " in data.describe() and "for the test" in data.describe()
    users = [0] * 4_000 + list(range(1, 1001))  # one of them has most rows
    data, told = written(users, "random", eval=0.1, test=0.0)
    assert told == "" and not data.notes
    told = written(users, "user", eval=0.1, test=0.0)[1]
    held = re.fullmatch(r"data.split by user: evaluation has (.*)% of the rows, not 10%; equal values .*", told)
    assert held is not None and float(held[1]) < 4


@every(("by", "warned"), [("random", True), ("ts", False)])
def test_a_split_by_values_is_warned_of_where_most_rows_are_equal(tmp_path: Path, by: str, warned: bool) -> None:
    files = {"a.csv": "y,x,ts\n" + "".join(f"{i % 2},{i % 100 // 2},{i % 50}\n" for i in range(2_000))}
    data = opened(tmp_path, files, dense=["x"], split={"by": by, "eval": 0.2, "test": 0})
    assert any(re.match(r"data.split: 9\d% of the rows equal an earlier one", note) for note in data.notes) == warned


@every(
    ("changes", "lines", "text"),
    [
        ({"split": {"by": "usr"}}, "0,1,7,1 1,2,8,2", r"has no column usr; did you mean user\?"),
        ({"split": {"by": "y"}}, "0,1,7,1 1,2,8,2", "data.split.by: names y, which is the label"),
        ({"split": {"by": "user"}}, "0,1,7,1 1,2,7,2", "all rows have one value, so that none can be held out"),
        ({"split": {"by": "random"}}, "1,1,7,1 1,1,7,1", "all rows have one value, so"),
        ({"split": {"by": "time"}}, "0,1,7,4 1,2,8,4", "training data has no rows .*all rows have one"),
        ({"split": {"by": "time"}}, "0,1,7,4 1,2,8, 1,2,8,", "row 2, column ts: the time is missing"),
        ({"split": {"by": "time", "eval": 0.4, "test": 0.5}}, "0,1,7,1 1,2,8,2",
         r"the training data has no rows \(data.split: \{by: time, eval: 0.4, test: 0.5\}\)"),
        ({"split": {"by": "user"}}, "0,1,7,1 1,2,8,2", "data has no rows .data.split: .by: user"),
        ({"split": {"by": "x"}}, "0,1.5,7,1 1,2,8,2", "data has no rows"),
        ({"time": "ts"}, "0,1,7,4 1,2,8,", "row 2, column ts: the time is missing; allowed: numbers, dates"),
        ({"time": "ts"}, "0,1,7,soon 1,2,8,4", "row 1, column ts: 'soon' is not a number"),
        ({"time": "when"}, "0,1,7,4 1,2,8,4", "has no column when; it has: y, x, user, ts"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_or_ordered_is_one_line(
    tmp_path: Path, changes: dict[str, Any], lines: str, text: str
) -> None:
    files = {"a.csv": "\n".join(["y,x,user,ts", *lines.split()]) + "\n"}
    settings = {"label": {"column": "y", "kind": "number"}, "dense": ["x"]} | changes
    if changes.get("split", {}).get("by") == "time":
        settings["time"] = "ts"
    line = refusal(tmp_path, files, **settings)
    assert re.search(text, line), line


# Training samples in an order


@every(
    "stamps",
    [
        ["30", "4.5", "200", "4.5"],
        ["2026-03-01", "2025-12-31", "2026-10-01", "2025-12-31"],
        ["2026-01-01 09:00:00", "2026-01-01T08:59:59.5", "2026-01-02", "2026-01-01T08:59:59.5"],
        ["1790000000000000000", "1780000000000000000", "1800000000000000000", "1780000000000000000"],
    ],
)
def test_samples_come_by_time_equal_times_in_their_order_and_evaluation_files_as_they_are(
    tmp_path: Path, stamps: list[str]
) -> None:
    text = "\n".join(["x,y,ts", *(f"{x},{x % 2},{stamp}" for x, stamp in enumerate(stamps))])
    data = opened(tmp_path, {"a.csv": text, "e.csv": text}, dense=["x"], time="ts", eval="e.csv")
    assert (first_column(data.train), first_column(data.eval)) == ([1.0, 3.0, 0.0, 2.0], [0.0, 1.0, 2.0, 3.0])
    assert first_column(opened(tmp_path, {"a.csv": text}, dense=["x"]).train) == [0.0, 1.0, 2.0, 3.0]


def test_the_order_goes_across_chunks_and_files_of_different_units(tmp_path: Path) -> None:
    days = pa.array([dt.date(2026, 5, 2), dt.date(1969, 5, 2), dt.date(2026, 5, 1)])
    files = {"days.parquet": {"x": [0.0, 1.0, 2.0], "y": [0, 1, 0], "ts": days}}
    assert first_column(opened(tmp_path, files, dense=["x"], time="ts").train) == [1.0, 2.0, 0.0]
    second_N = np.random.default_rng(0).permutation(80_000)
    for name, part_N, unit in (("a", second_N[:70_000], "ms"), ("b", second_N[70_000:], "ns")):
        times = pa.array((np.datetime64("2026-01-01T00:00:00", "s") + part_N).astype(f"datetime64[{unit}]"))
        columns = {"x": pa.array(part_N.astype(np.float32)), "y": pa.array(part_N % 2), "ts": times}
        write_file(tmp_path / f"{name}.parquet", columns)
    data = opened(tmp_path, train=["a.parquet", "b.parquet"], dense=["x"], time="ts", split="random")
    found = first_column(data.train)
    assert len(found) > 60_000 and found == sorted(found) and not set(found) & set(first_column(data.eval))


# ---- histories that begin alike on both sides ----


DRAW = np.random.default_rng(0)
WALKS = [np.cumsum(np.where(DRAW.random(12) < 0.8, 1, DRAW.integers(0, 40, 12))) % 40 for _ in range(400)]
HISTORIES: dict[str, list[Any]] = {
    "by chance": [DRAW.integers(0, 150, 12) for _ in range(400)],
    "walks": WALKS,  # two of three next items are known
    "few items": [DRAW.integers(0, 4, 12) for _ in range(400)],
    "popular items": [np.minimum(DRAW.zipf(1.5, DRAW.integers(2, 10)), 30) for _ in range(900)],
    "equal histories": [np.arange(start, start + 12) % 20 for start in DRAW.integers(0, 20, 400)],
}
Rows = list[tuple[Any, int]]


class Lists(Takes):
    def __init__(self, rows: Rows) -> None:
        super().__init__(NEXT, len(rows))
        self.item = np.array([item for _, item in rows])
        self.lengths = np.array([len(entries) for entries, _ in rows], np.int32)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        self.seen = np.concatenate([entries for entries, _ in rows])


def rows_with_lists(histories: list[Any]) -> Rows:
    return [(entries[:k], entries[k]) for entries in histories for k in range(1, len(entries))]


def told(train: Rows, held: Rows) -> list[str]:
    return known_targets(Lists(train), Lists(held), sides_of(NEXT, ["item"]))


@every(("name", "histories"), HISTORIES.items(), ids=HISTORIES)
def test_rows_of_one_history_on_both_sides_are_found_and_users_on_one_side_are_not(name: str, histories: Any) -> None:
    rows = rows_with_lists(histories)
    held_N = np.random.default_rng(1).random(len(rows)) < 0.1
    parts = [[row for row, held in zip(rows, held_N, strict=True) if held == side] for side in (False, True)]
    assert len(told(*parts)) == (name != "equal histories")  # of which chance gives all
    users = len(histories) * 9 // 10
    assert told(rows_with_lists(histories[:users]), rows_with_lists(histories[users:])) == []
    assert told([(h[:-2], h[-2]) for h in histories if len(h) > 2], [(h[:-1], h[-1]) for h in histories]) == []
    assert (
        told(
            [row for h in histories for row in rows_with_lists([h])[:-1]], [rows_with_lists([h])[-1] for h in histories]
        )
        == []
    )


def test_the_share_is_that_of_a_search_through_all_lists_and_few_rows_are_no_share() -> None:
    rows = rows_with_lists(HISTORIES["by chance"][:40])
    train, held = rows[::3] + rows[1::3], rows[2::3]
    lists = [tuple(entries) for entries, _ in train]
    known = [any(each[: len(own) + 1] == (*own, item) for each in lists) for own, item in held]
    assert shares(Lists(train), Lists(held), "seen_item", "item")[0] == pytest.approx(np.mean(known))
    assert told(train, held)[0].startswith(f"{np.mean(known):.0%} of the evaluation targets stand in training lists")
    assert shares(Lists(train), Lists(held[:49]), "seen_item", "item") == (0.0, 0.0)
