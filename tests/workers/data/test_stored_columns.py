"""A stored column comes back as it was written, or is refused: the kernels that read it check nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings as hypothesis_settings, strategies as st

from shardkeep.workers.data.batch import Values
from shardkeep.workers.data.columns.column import MAX_CODED, ColumnWriter, Kind, StoredColumn
from shardkeep.workers.data.columns.dataset import LABEL, StoredDataset
from shardkeep.workers.data.schema import Feature, Schema
from tests.support.cases import every

INT = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(width=64) | st.sampled_from([0.0, -0.0, 1.0, 0.1, 2.0**24 + 1, 1e300, np.inf, np.nan])
LISTS = st.lists(st.lists(st.lists(st.tuples(INT, FLOAT), max_size=4), max_size=5), min_size=1, max_size=4)
"""Chunks of rows of lists of ids with weights."""


def written(kind: Kind, chunks: Sequence[Values], path: Path | None = None, width: int | None = None) -> StoredColumn:
    writer = ColumnWriter(kind, path, width=width)
    for values in chunks:
        writer.add(values)
    column = writer.close({"first": 3})
    column.verify()
    return column


def written_twice(folder: Path, kind: Kind, chunks: Sequence[Values], width: int | None = None) -> StoredColumn:
    """The column out of a file, beside which nothing is left, and which is equal to the one in memory."""
    memory = written(kind, chunks, width=width)
    stored = written(kind, chunks, folder / "c.column", width=width)
    assert [path.name for path in folder.iterdir()] == ["c.column"] and stored.facts == {"first": 3}
    assert (stored.content, stored.num_bytes, len(stored)) == (memory.content, memory.num_bytes, len(memory))
    assert stored.values.tobytes() == memory.values.tobytes() and stored.values.dtype == memory.values.dtype
    return stored


@hypothesis_settings(max_examples=20, deadline=None)
@given(chunks=st.lists(st.lists(INT | st.integers(0, 9)), min_size=1, max_size=4))
def test_ids_come_back_in_any_chunks(tmp_path_factory: pytest.TempPathFactory, chunks: list[list[int]]) -> None:
    parts = [Values(np.array(chunk, np.int64)) for chunk in chunks]
    column = written_twice(tmp_path_factory.mktemp("ids"), "ids", parts)
    expected = [value for chunk in chunks for value in chunk]
    assert column.ids(np.arange(len(expected))[::-1].copy()).tolist() == expected[::-1]
    assert column.content == written("ids", [Values(np.array(expected, np.int64))]).content


@hypothesis_settings(max_examples=20, deadline=None)
@given(chunks=st.lists(st.lists(FLOAT | st.sampled_from([0.0, 1.0])), min_size=1, max_size=4))
@example(chunks=[[0.0, 1.0], [-0.0]])
@example(chunks=[[1.0], [0.5], [0.1]])
@example(chunks=[[1.0, 0.0], [2.0**24 + 1], []])
def test_numbers_come_back_to_the_bit(tmp_path_factory: pytest.TempPathFactory, chunks: list[list[float]]) -> None:
    parts, expected = (
        [np.array(chunk, np.float64) for chunk in chunks],
        np.array([*itertools.chain(*chunks)], np.float64),
    )
    column = written_twice(tmp_path_factory.mktemp("numbers"), "numbers", [Values(part) for part in parts])
    found = column.values.astype(np.float64)
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(np.signbit(found[found == 0]), np.signbit(expected[expected == 0]))
    with np.errstate(over="ignore"):
        exact = np.array_equal(expected.astype(np.float32), expected, equal_nan=True)
        numbers = column.values.astype(np.float32)
    assert (column.values.dtype == np.float64) == (not exact) and numbers.dtype == np.float32
    rows = [Values(np.repeat(part, 3).reshape(-1, 3)) for part in parts]
    wide = written_twice(tmp_path_factory.mktemp("rows"), "numbers", rows, width=3)
    assert wide.values.shape == (len(expected), 3)
    assert np.array_equal(wide.values, np.repeat(expected, 3).reshape(-1, 3), equal_nan=True)


@hypothesis_settings(max_examples=20, deadline=None)
@given(chunks=LISTS, kept=st.sampled_from([1, 2, 3, 1 << 31, -1, -2, -3]))
def test_lists_come_back_whole_or_as_their_newest_entries(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[list[list[tuple[int, float]]]], kept: int
) -> None:
    parts = []
    for rows in chunks:
        flat, lengths = [entry for row in rows for entry in row], np.array([len(row) for row in rows], np.int64)
        weights = np.array([number for _, number in flat], np.float64)
        with np.errstate(over="ignore"):
            parts.append(Values(np.array([i for i, _ in flat], np.int64), lengths, weights.astype(np.float32)))
    column = written_twice(tmp_path_factory.mktemp("lists"), "ids", parts)
    rows = list(itertools.chain.from_iterable(chunks))[::-1]
    places, lengths = column.entries(np.arange(len(rows))[::-1].copy(), kept)
    shown = [row[-kept:] if kept > 0 else row[:-kept][::-1] for row in rows]
    assert column.ids(places).tolist() == [i for row in shown for i, _ in row]
    assert lengths.tolist() == [len(row) for row in shown] and column.weights is not None
    with np.errstate(over="ignore"):
        weights = np.array([number for row in shown for _, number in row], np.float64).astype(np.float32)
    assert np.array_equal(column.weights[places], weights, equal_nan=True)


@every(
    ("distinct", "kind"),
    [(256, "u1"), (257, "u2"), (MAX_CODED, "u2"), (MAX_CODED + 1, "i8"), (MAX_CODED + 70_000, "i8")],
)
def test_ids_take_the_room_that_their_number_needs(tmp_path: Path, distinct: int, kind: str) -> None:
    rng = np.random.default_rng(distinct)
    ids_N = rng.permutation(np.append(np.arange(distinct) * 7919, rng.integers(0, distinct, 5000) * 7919))
    column = written("ids", [Values(part) for part in np.array_split(ids_N, 9)], tmp_path / "c.column")
    assert column.values.dtype == np.dtype(kind) and (column.dictionary is None) == (kind == "i8")
    assert np.array_equal(StoredColumn.open(tmp_path / "c.column").ids(np.arange(len(ids_N))), ids_N)


def test_rows_are_stored_in_half_the_room_where_their_numbers_are_small(tmp_path: Path) -> None:
    for last, kind in ((2**31 - 1, np.int32), (2**31, np.int64)):
        column = written_twice(tmp_path, "rows", [Values(np.array([5, 0])), Values(np.array([last]))])
        assert column.values.tolist() == [5, 0, last] and column.values.dtype == kind


def test_a_column_that_is_not_completed_leaves_no_file_and_the_one_of_before(tmp_path: Path) -> None:
    path = tmp_path / "c.column"
    before = written("ids", [Values(np.arange(3))], path)
    writer = ColumnWriter("ids", path)
    writer.add(Values(np.arange(600), np.full(300, 2)))
    writer.discard()
    assert [p.name for p in tmp_path.iterdir()] == ["c.column"] and StoredColumn.open(path).content == before.content
    written("ids", [Values(np.array([7, 8, 9]))], path)
    assert before.ids(np.arange(3)).tolist() == [0, 1, 2], "a file that is replaced stays mapped"


def test_any_byte_that_is_not_as_written_is_found(tmp_path: Path) -> None:
    path = tmp_path / "c.column"
    lists = Values(np.array([5, 700, 5, 9]), np.array([1, 0, 3]), np.ones(4, np.float32))
    whole = written("ids", [lists], path)
    content = path.read_bytes()

    def parts(column: StoredColumn) -> list[Any]:
        arrays = (column.values, column.dictionary, column.offsets, column.weights)
        return [column.facts, *(None if part is None else (part.dtype, part.shape, part.tobytes()) for part in arrays)]

    def check(changed: bytes) -> None:
        path.write_bytes(changed)
        try:
            column = StoredColumn.open(path)
            column.verify()
        except ValueError:
            return
        assert parts(column) == expected

    expected = parts(whole)
    for at in range(0, len(content), 3):
        check(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
    for size in range(0, len(content), 5):
        check(content[:size])
    check(content + b"\0")
    with pytest.raises(OSError):
        StoredColumn.open(tmp_path / "none.column")


def _lists(**changes: Any) -> StoredColumn:
    arrays: dict[str, Any] = {
        "values": np.array([0, 1, 2, 1], np.uint8),
        "dictionary": np.array([5, 6, 7]),
        "offsets": np.array([0, 1, 4], np.int32),
        "weights": np.ones(4, np.float32),
    }
    return StoredColumn(**arrays | changes)


@every(
    ("changes", "why"),
    [
        ({"values": np.array([0, 1, 3, 1], np.uint8)}, "outside of the dictionary"),
        ({"dictionary": np.array([5])}, "outside of the dictionary"),
        ({"offsets": np.array([0, 1, 5], np.int32)}, "offsets"),
        ({"offsets": np.array([0, 5, 4], np.int32)}, "offsets"),
        ({"offsets": np.array([-2_000_000_000, 1, 4], np.int32)}, "offsets"),
        ({"offsets": np.array([0, 1, 2_000_000_000], np.int32)}, "offsets"),
        ({"offsets": np.array([0, 1, 3])}, "offsets"),
        ({"offsets": np.array([], np.int32)}, "offsets"),
        ({"weights": np.ones(3, np.float32)}, "other weights than entries"),
    ],
)
def test_places_that_lead_out_of_an_array_are_refused(changes: dict[str, Any], why: str) -> None:
    _lists().check()
    with pytest.raises(ValueError, match=why):
        _lists(**changes).check()


@every(
    ("change", "why"),
    [
        (lambda columns: columns | {LABEL: StoredColumn(np.zeros(3, np.float32))}, "not of the same rows"),
        (lambda columns: columns | {"ids:c": StoredColumn(np.zeros(2, np.uint8))}, "holds no ids"),
        (lambda columns: columns | {"ids:c": StoredColumn(np.zeros(2, np.float32))}, "holds no ids"),
    ],
)
def test_columns_that_do_not_fit_each_other_are_no_samples(
    change: Callable[[dict[str, StoredColumn]], dict[str, StoredColumn]], why: str
) -> None:
    schema = Schema((), (Feature("c", "c"),))
    columns = {LABEL: StoredColumn(np.zeros(2, np.float32)), "ids:c": StoredColumn(np.arange(2))}
    dataset = StoredDataset(schema, (), columns, [], np.array([1, 0, 1]))
    assert dataset.gather(np.array([2, 1])).ids["c"].values_N.tolist() == [1, 0]
    for rows in ([2], [-1]):
        with pytest.raises(ValueError, match="a row is outside"):
            StoredDataset(schema, (), columns, [], np.array(rows))
        with pytest.raises(IndexError, match="outside"):
            StoredDataset(schema, (), columns, []).gather(np.array(rows))
    with pytest.raises(ValueError, match=why):
        StoredDataset(schema, (), change(columns), [])
