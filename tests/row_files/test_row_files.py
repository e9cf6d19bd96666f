"""Row files: what each form writes it reads back, and what a user's own file may hold."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardkeep.base.errors import DataError, ShardkeepError, UserError
from shardkeep.row_files.registry import FORMS, form_of, open_rows
from shardkeep.workers.data.conversion.hashing import hash_text
from tests.support.cases import every

IDS = np.array([5, -1, 2**63 - 1, -(2**63), 0], np.int64)
ROWS = np.arange(15, dtype=np.float32).reshape(5, 3)


def written(path: Path, ids: np.ndarray = IDS, rows: np.ndarray = ROWS, block: int = 2) -> Path:
    form = form_of(path)
    assert form is not None
    with contextlib.closing(form.write(form.files(path), rows.shape[1], len(rows))) as writer:
        for begin in range(0, len(ids), block):
            writer.add(ids[begin : begin + block], rows[begin : begin + block])
    return path


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    file = open_rows(path, key="rows")
    chunks = list(file.chunks())
    assert file.rows == sum(ids.size for ids, _ in chunks)
    assert all(ids.dtype == np.int64 and rows.dtype == np.float32 and rows.shape[1] == file.dim for ids, rows in chunks)
    return np.concatenate([ids for ids, _ in chunks]), np.concatenate([rows for _, rows in chunks])


@every("form", FORMS)
def test_what_a_form_writes_it_reads_back(tmp_path: Path, form: str) -> None:
    ids, rows = read(written(tmp_path / f"user{FORMS[form].suffix}"))
    assert np.array_equal(ids, IDS) and np.array_equal(rows, ROWS)
    file = open_rows(written(tmp_path / f"x{FORMS[form].suffix}", IDS[:0], ROWS[:0]), key="rows")
    assert (file.rows, file.dim) == (0, 3) and not sum(ids.size for ids, _ in file.chunks())
    ids, rows = np.arange(150_000), np.random.default_rng(0).normal(size=(150_000, 2)).astype(np.float32)
    path = written(tmp_path / f"large{FORMS[form].suffix}", ids, rows, block=70_000)
    assert len(list(open_rows(path, key="rows").chunks())) >= 3
    found = read(path)
    assert np.array_equal(found[0], ids) and np.array_equal(found[1], rows)


def test_the_libraries_of_each_form_read_it(tmp_path: Path) -> None:
    table = pq.read_table(written(tmp_path / "x.parquet"))
    assert table.schema.names == ["id", "row"] and table.schema.field("row").type.list_size == 3
    written(tmp_path / "x.npy")
    for ids, rows in (
        (table["id"].to_numpy(), np.stack(table["row"].to_numpy())),
        (np.load(tmp_path / "x.ids.npy"), np.load(tmp_path / "x.rows.npy")),
    ):
        assert np.array_equal(ids, IDS) and np.array_equal(rows, ROWS) and rows.dtype == np.float32


@every("name", ["user.npy", "user.ids.npy", "user.rows.npy"])
def test_either_file_of_a_pair_names_both(tmp_path: Path, name: str) -> None:
    written(tmp_path / "user.npy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["user.ids.npy", "user.rows.npy"]
    assert np.array_equal(read(tmp_path / name)[0], IDS)


def parquet(path: Path, ids: Any, rows: Any, **more: Any) -> Path:
    pq.write_table(pa.table({"id": ids, "row": rows, **more}), path)
    return path


LISTS = pa.array(ROWS.tolist(), pa.list_(pa.float32()))


@every("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_texts_become_the_ids_that_the_data_give_them(tmp_path: Path, kind: Any) -> None:
    texts = ["u1", "", "ü", "7", " u2 "]
    ids, _ = read(parquet(tmp_path / "x.parquet", pa.array(texts).cast(kind), LISTS))
    assert ids.tolist() == [hash_text(text.strip().encode()) for text in texts]
    ids, rows = read(parquet(tmp_path / "x.parquet", pa.array(range(5), pa.int32()), LISTS, name=["a"] * 5))
    assert ids.tolist() == [0, 1, 2, 3, 4] and np.array_equal(rows, ROWS), "other columns do not matter"


NUMBERS, VALUES = pa.array(range(5)), ROWS.tolist()
FLOATS = pa.list_(pa.float32())


@every(
    ("ids", "rows", "text"),
    [
        (pa.array(np.arange(5.0)), LISTS, "id is double; allowed: int64, or texts"),
        (NUMBERS, pa.array(VALUES, pa.list_(pa.float64())), "row is list<.*double>; allowed: lists of float32"),
        (NUMBERS, pa.array(np.arange(5, dtype=np.float32)), "row is float; allowed: lists of float32"),
        (NUMBERS, pa.array([*VALUES[:4], [1.0]], FLOATS), "x.parquet, row 5: has 1 values, the first row 3"),
        (NUMBERS, pa.array([None, *VALUES[1:]], FLOATS), "x.parquet, row 1: row is missing"),
        (pa.array([None, 1, 2, 3, 4]), LISTS, "x.parquet, row 1: id is missing"),
        (NUMBERS, pa.array([VALUES[0], [1.0, 2.0, None], *VALUES[2:]], FLOATS), "x.parquet, row 2: a value is missing"),
        (pa.array([1, 2**63 - 1, 2**64 - 1, 2, 3], pa.uint64()), LISTS,
         "x.parquet, row 3: id 18446744073709551615 does not fit int64; allowed: at most 9223372036854775807"),
        (NUMBERS, pa.array([*VALUES[:4], [1.0, float("nan"), 2.0]], FLOATS),
         "x.parquet, row 5: id 4 has the value nan"),
    ],
)  # fmt: skip
def test_a_parquet_file_that_does_not_fit_is_named_with_what_is_wrong(
    tmp_path: Path, ids: pa.Array, rows: pa.Array, text: str
) -> None:
    with pytest.raises(DataError, match=text) as caught:
        read(parquet(tmp_path / "x.parquet", ids, rows))
    assert str(tmp_path / "x.parquet") in str(caught.value) and "\n" not in str(caught.value)


def test_an_error_names_the_row_over_all_chunks_and_the_text_of_its_id(tmp_path: Path) -> None:
    rows = np.ones((80_000, 2), np.float32)
    rows[70_000, 1] = np.inf
    texts = [f" u{number}\n" for number in range(80_000)]
    with pytest.raises(DataError, match=r"x\.parquet, row 70001: id 'u70000' has the value inf$"):
        read(parquet(tmp_path / "x.parquet", pa.array(texts), pa.array(list(rows), FLOATS)))
    with pytest.raises(DataError, match=r"x\.rows\.npy, row 70001: id 70000 has the value inf$"):
        read(written(tmp_path / "x.npy", np.arange(80_000), rows))


@every(
    ("ids", "rows", "text"),
    [
        (IDS.astype(float), ROWS, "float64 .* allowed: int64"),
        (IDS.reshape(1, 5), ROWS, "allowed: int64"),
        (IDS, ROWS.astype(np.float16), "float16 .* allowed: float32"),
        (IDS, ROWS.reshape(-1), "allowed: float32"),
        (IDS[:4], ROWS, "has 5 rows, user.ids.npy 4 ids"),
    ],
)
def test_arrays_of_numpy_that_do_not_fit_are_named(
    tmp_path: Path, ids: np.ndarray, rows: np.ndarray, text: str
) -> None:
    np.save(tmp_path / "user.ids.npy", ids)
    np.save(tmp_path / "user.rows.npy", rows)
    with pytest.raises(DataError, match=text):
        read(tmp_path / "user.npy")


def test_an_array_of_objects_is_refused_and_not_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "x.rows.npy", ROWS)
    np.save(tmp_path / "x.ids.npy", np.array([print, print], object), allow_pickle=True)
    with pytest.raises(DataError, match=r"x\.ids\.npy: is no array of numpy"):
        read(tmp_path / "x.npy")


@every("size", [0, 1, 7, 9, 60, 150, "all but one"])
@every("form", FORMS)
def test_a_truncated_file_is_named(tmp_path: Path, form: str, size: int | str) -> None:
    path = FORMS[form].files(written(tmp_path / f"x{FORMS[form].suffix}"))[-1]
    content = path.read_bytes()
    path.write_bytes(content[: -1 if isinstance(size, str) else size])
    with pytest.raises(ShardkeepError) as caught:
        read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@every("form", FORMS)
def test_flipped_bytes_never_end_in_a_traceback(tmp_path: Path, form: str) -> None:
    rng = np.random.default_rng(0)
    for path in FORMS[form].files(written(tmp_path / f"x{FORMS[form].suffix}")):
        content = path.read_bytes()
        for _ in range(60):
            harmed = bytearray(content)
            harmed[rng.integers(len(harmed))] ^= 1 << int(rng.integers(8))
            path.write_bytes(bytes(harmed))
            with contextlib.suppress(ShardkeepError):
                read(path)
        path.write_bytes(content)


@every(
    ("name", "text"),
    [
        ("rows.csv", "tables.user.init.path: rows.csv; allowed: a file whose name ends in .parquet, .npy"),
        ("none.parquet", "tables.user.init.path: none.parquet: cannot be read"),
        ("none.npy", "tables.user.init.path: none.ids.npy: cannot be read"),
    ],
)
def test_a_file_that_is_not_there_is_named_with_its_setting(name: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        open_rows(Path(name), key="tables.user.init.path")
    assert str(caught.value).startswith(text)
