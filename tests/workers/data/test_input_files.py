"""The files that data.train names: each has one role, folders may be partitions, some cannot be read."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pyarrow.dataset as pads  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.input_files import find_files
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every
from tests.support.forked import fork_context
from tests.support.owners import STRANGER


def refused_to_strangers(root: Path, entries: list[str], closed: list[tuple[Path, int]], answers: Connection) -> None:
    """Sends the errors of a user to whom each folder is closed in turn. Runs in a process of its own: the kernel does
    not forgive a change of the user."""
    for entry, (path, mode) in zip(entries, closed, strict=True):
        path.chmod(mode)
        if as_root := os.geteuid() == 0:  # to whom all is open
            os.seteuid(STRANGER)
        try:
            found = str(find_files(root, [entry], key="data.train", kind="csv"))
        except DataError as error:
            found = str(error)
        if as_root:
            os.seteuid(0)
        path.chmod(0o755)
        answers.send(found)


@pytest.fixture
def folder() -> Iterator[Path]:
    """days/1/a.csv and days/2/b.csv, where everybody may go: pytest closes its own folders whenever it starts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for part, file in (("1", "a.csv"), ("2", "b.csv")):
            (folder / "days" / part).mkdir(parents=True)
            (folder / "days" / part / file).write_text("x,y\n1,0\n")
        yield folder


CLOSED = [
    ("days", 0o000, "days"),
    ("days", 0o000, "days/1/a.csv"),
    ("days", 0o000, "days/*/a.csv"),
    ("days/1", 0o000, "days/1"),
    ("days/1", 0o000, "days/1/*.csv"),
    ("days/1", 0o000, "days/*/*.csv"),
    ("days/1", 0o000, "days/**/*.csv"),
    ("days/1", 0o000, "days/**"),
    ("days/1", 0o444, "days/1"),
    ("days/1", 0o444, "days/1/*.csv"),
]


@pytest.mark.waits_for_processes
def test_a_folder_that_may_not_be_read_is_named(folder: Path) -> None:
    context = fork_context()
    answers, tell = context.Pipe(duplex=False)
    asked = [[entry for _, _, entry in CLOSED], [(folder / closed, mode) for closed, mode, _ in CLOSED]]
    for root, entries, paths in ((folder, *asked), (folder / "days", ["1/a.csv"], [(folder / "days", 0o000)])):
        child = context.Process(target=refused_to_strangers, args=(root, entries, paths, tell))
        child.start()
        for entry, (path, mode) in zip(entries, paths, strict=True):
            assert answers.poll(60.0)
            told = answers.recv()
            assert re.search(rf"{path}.*: cannot be read .Permission denied. .data.train.$", told), (entry, mode, told)
        child.join()
    answers.close()
    tell.close()


def test_patterns_find_files_in_order_of_their_names(folder: Path) -> None:
    for pattern in ("days/**/*.csv", "days/*/*.csv", "days/**", "days/[12]/?.csv"):
        found = find_files(folder, [pattern], key="data.train", kind="csv")
        assert [path.name for path in found] == ["a.csv", "b.csv"]


@every(
    ("name", "why"),
    [
        ("fifo", "is neither a file nor a folder"),
        ("/dev/zero", "is neither a file nor a folder"),
        ("loop", "is a link that leads nowhere"),
        ("dangling", "is a link that leads nowhere"),
        ("a\0b.csv", "no such file|is no path"),
        ("x" * 300, "cannot be read .File name too long."),
        ("~no_such_user_at_all/x.csv", "is no path .Could not determine home directory"),
        ("empty", "the folder has no files .data.train."),
        ("days", r"the folder has no files .data.train.; for those in its subfolders: data.train: .days/\*\*/\*"),
        ("no/such/*.csv", "no file matches"),
    ],
    ids=["fifo", "device", "loop", "dangling", "nul", "long", "home", "empty", "folders", "nothing"],
)  # fmt: skip
def test_what_is_no_file_of_data_is_refused_at_once(folder: Path, name: str, why: str) -> None:
    if not (folder / "empty").exists():
        os.mkfifo(folder / "fifo")
        (folder / "loop").symlink_to(folder / "loop")
        (folder / "dangling").symlink_to(folder / "nothing")
        (folder / "empty").mkdir()
    with pytest.raises(DataError, match=why) as caught:
        find_files(folder, [name], key="data.train", kind="csv")
    assert "\n" not in str(caught.value)


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


def test_rows_keep_their_role_when_files_come_move_or_grow(root: Path) -> None:
    before = _held(root, train=["days"])
    assert 80 < len(before) < 160
    (root / "days").rename(root / "moved")
    assert before == _held(root, train=["moved/*.csv"])
    _write(root / "moved" / "0.csv", 5000)
    after = _held(root, train=["moved"])
    assert before == {x for x in after if x < 5000} < after
    (root / "moved" / "0.csv").unlink()
    _write(root / "moved" / "1.csv", 0, 300)
    after = _held(root, train=["moved"])
    assert before == {x for x in after if not 200 <= x < 300} < after


def test_files_of_different_names_or_partitions_hold_out_different_rows(root: Path) -> None:
    held = _held(root, train=["days"])
    assert {x for x in held if x < 1000} != {x - 1000 for x in held if x >= 1000}
    named, linked = (_held(root, train=[name]) for name in ("days/1.csv", "soft.csv"))
    assert named != linked and _held(root, train=["days/1.csv"]) == named, "a link is split by its own name"
    for day in range(30):
        _write(root / "log" / f"dt={day}" / "part-0.csv", 1000 * day, 10)
    held = _held(root, train=["log"])
    assert 60 < len(held) < 120 and len({x % 1000 for x in held}) == 10


# Partitions: folders called KEY=VALUE are columns of the files in them.

Write = Callable[[pa.Table, Path], None]
FORMS: list[tuple[str, Write]] = [("parquet", pq.write_table), ("csv", pacsv.write_csv)]
PLACES = ("dt=2024-05-01/country=DE", "dt=2024-05-01/country=FR", "dt=2024-05-02/country=DE")


def _partition(root: Path, form: str, write: Write, places: tuple[str, ...] = PLACES, **columns: Any) -> None:
    """log/PLACE/part-0 in each place: x = 0, 1, then 2, 3, and so on."""
    for p, place in enumerate(places):
        folder = root / "log" / place
        folder.mkdir(parents=True)
        write(pa.table({"x": [2 * p, 2 * p + 1], "y": [0, 1]} | columns), folder / f"part-0.{form}")


def _opened(root: Path, form: str, **settings: Any) -> Data:
    base = {"root": str(root), "source": form, "train": ["log"], "label": "y", "dense": ["x"], "scale": "none"}
    return open_data(DataConfig.model_validate(base | settings), seed=0)


def _ids(data: Data, name: str) -> list[int]:
    return data.train.gather(np.arange(len(data.train))).ids[name].values_N.tolist()


def _numbers(data: Data) -> list[list[float]]:
    return data.train.gather(np.arange(len(data.train))).dense_BI.T.tolist()


@every(("form", "write"), FORMS)
def test_values_of_partitions_are_texts_in_each_row(tmp_path: Path, form: str, write: Write) -> None:
    _partition(tmp_path, form, write)
    data = _opened(tmp_path, form, sparse=["country", "dt"])
    de, fr = hash_text(b"DE"), hash_text(b"FR")
    assert _ids(data, "country") == [de, de, fr, fr, de, de]
    assert _ids(data, "dt") == [hash_text(b"2024-05-01")] * 4 + [hash_text(b"2024-05-02")] * 2
    assert _numbers(data) == [[0, 1, 2, 3, 4, 5]]


@every(("form", "write"), FORMS)
def test_every_role_of_a_column_may_be_one_of_a_partition(tmp_path: Path, form: str, write: Write) -> None:
    _partition(tmp_path, form, write, ("click=0/price=1.5/w=2", "click=1/price=7/w=1"))
    roles = {"label": "click", "dense": ["price"], "weight": "w", "sparse": ["x"]}
    batch = (data := _opened(tmp_path, form, **roles)).train.gather(np.arange(4))
    assert batch.label_BT[:, 0].tolist() == [0, 0, 1, 1] and _numbers(data) == [[1.5, 1.5, 7, 7]]
    assert batch.weight_B is not None and batch.weight_B.tolist() == [2, 2, 1, 1]


@every(("form", "write"), FORMS)
def test_a_partition_may_hold_the_time_and_a_column_of_the_file_comes_first(
    tmp_path: Path, form: str, write: Write
) -> None:
    _partition(tmp_path, form, write, ("dt=2024-05-02", "dt=2024-05-01"), country=["US", "IT"])
    by_time = _opened(tmp_path, form, train=["log/dt=2024-05-02", "log/dt=2024-05-01"], time="dt")
    assert _numbers(by_time) == [[2, 3, 0, 1]]
    _partition(tmp_path, form, write, ("country=DE",), country=["US", "IT"])
    found = _ids(_opened(tmp_path, form, train=["log/country=DE"], sparse=["country"]), "country")
    assert found == [hash_text(b"US"), hash_text(b"IT")]


def test_values_are_read_as_they_were_written(tmp_path: Path) -> None:
    values = ["a/b=c", "50 %", "ä", None]
    table = pa.table({"y": [0, 1, 0, 1], "x": [0, 1, 2, 3], "c d": values})
    by = pads.partitioning(pa.schema([("c d", pa.string())]), flavor="hive")
    pads.write_dataset(table, tmp_path / "log", format="parquet", partitioning=by)
    data = _opened(tmp_path, "parquet", sparse=["c d"])
    ids = [MISSING_ID if value is None else hash_text(value.encode()) for value in values]
    assert dict(zip(_numbers(data)[0], _ids(data, "c d"), strict=True)) == dict(enumerate(ids))


@every(("form", "write"), FORMS)
def test_patterns_lead_to_partitions_too(tmp_path: Path, form: str, write: Write) -> None:
    _partition(tmp_path, form, write)
    for entries in (["log/**/*.*"], ["log/dt=*"], ["log/dt=2024-05-0[12]"], ["log/*/*/part-0.*"]):
        data = _opened(tmp_path, form, train=entries, sparse=["country"])
        assert _numbers(data) == [[0, 1, 2, 3, 4, 5]] and hash_text(b"FR") in _ids(data, "country")


def test_folders_that_are_no_partitions_stay_out(tmp_path: Path) -> None:
    _partition(tmp_path, "csv", pacsv.write_csv, ("dt=1", "_delta_log", ".hidden=1", "old", "=1"))
    (tmp_path / "log" / "_SUCCESS").touch()
    (tmp_path / "log" / "dt=2").mkdir()
    found = find_files(tmp_path, ["log"], key="data.train", kind="csv")
    assert [str(path.relative_to(tmp_path)) for path in found] == ["log/dt=1/part-0.csv"]


@every(("form", "write"), FORMS)
def test_a_file_outside_of_its_partition_lacks_the_column(tmp_path: Path, form: str, write: Write) -> None:
    _partition(tmp_path, form, write, ("dt=1", "dt=1/other"))
    with pytest.raises(DataError, match=r"other/part-0.*has no column dt; it has: x, y"):
        _opened(tmp_path, form, train=["log/dt=1/other"], sparse=["dt"])


def test_a_link_to_a_partition_has_the_value_of_its_own_name(tmp_path: Path) -> None:
    _partition(tmp_path, "csv", pacsv.write_csv, ("c=DE",))
    (tmp_path / "log" / "c=FR").symlink_to(tmp_path / "log" / "c=DE")
    for value in ("DE", "FR"):
        data = _opened(tmp_path, "csv", train=[f"log/c={value}"], sparse=["c"], cache="cache")
        assert _ids(data, "c") == [hash_text(value.encode())] * 2
