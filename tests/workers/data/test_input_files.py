"""The files that data.train names: each has one role, folders may be partitions, some cannot be read."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.dataset as pads  # type: ignore[import-untyped]
import pytest

from shardkeep.base.errors import DataError
from shardkeep.inference.files import input_files
from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.input_files import find_files
from tests.support.cases import every
from tests.support.data_files import batch_of, first_column, opened, read, refusal, write_file
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


@pytest.mark.waits_for_processes
def test_a_folder_that_may_not_be_read_is_named(folder: Path) -> None:
    entries = [
        "days", "days/1/a.csv", "days/*/a.csv",
        "days/1", "days/1/*.csv", "days/*/*.csv", "days/**/*.csv", "days/**", "days/1", "days/1/*.csv",
    ]  # fmt: skip
    closed = [(folder / "days", 0o000)] * 3 + [(folder / "days/1", 0o000)] * 5 + [(folder / "days/1", 0o444)] * 2
    context = fork_context()
    answers, tell = context.Pipe(duplex=False)
    for root, names, paths in ((folder, entries, closed), (folder / "days", ["1/a.csv"], closed[:1])):
        child = context.Process(target=refused_to_strangers, args=(root, names, paths, tell))
        child.start()
        for entry, (path, mode) in zip(names, paths, strict=True):
            assert answers.poll(60.0)
            told = answers.recv()
            assert re.search(rf"{path}.*: cannot be read .Permission denied. .data.train.$", told), (entry, mode, told)
        child.join()
    answers.close()
    tell.close()


@every(
    ("log", "name"),
    [("_delta_log", "a Delta"), (".hoodie", "a Hudi"), ("metadata/v1.metadata.json", "an Iceberg")],
)
@every(
    "entry", ["t", "t/*.parquet", "t/c=1", "t/data", "t/data/b.parquet", "link", "link.parquet", "plain/*", "t/**/*"]
)
def test_a_table_with_a_log_is_refused_however_its_files_are_named(
    tmp_path: Path, log: str, name: str, entry: str
) -> None:
    root = tmp_path / re.sub(r"\W", "_", f"{log} {entry}")
    for file in ("t/a.parquet", "t/c=1/a.parquet", "t/data/b.parquet", f"t/{log}/0.json", "t/notes.csv", "plain/c.csv"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    (root / "link").symlink_to(root / "t/c=1")
    for link in ("link.parquet", "plain/link.parquet"):
        (root / link).symlink_to(root / "t/data/b.parquet")
    for find in (lambda: find_files(root, [entry], key="FILE", kind=""), lambda: input_files([str(root / entry)])):
        with pytest.raises(
            DataError, match=rf"{root}/t: is {name} table, and its files hold rows that its log excludes"
        ):
            find()
    assert find_files(root, ["t/notes.csv", "plain/c.csv"], key="FILE", kind="")


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
)
def test_what_is_no_file_of_data_is_refused_at_once(folder: Path, name: str, why: str) -> None:
    if not (folder / "empty").exists():
        os.mkfifo(folder / "fifo")
        (folder / "loop").symlink_to(folder / "loop")
        (folder / "dangling").symlink_to(folder / "nothing")
        (folder / "empty").mkdir()
    with pytest.raises(DataError, match=why) as caught:
        find_files(folder, [name], key="data.train", kind="csv")
    assert "\n" not in str(caught.value)


COLUMNS: dict[str, Any] = {"source": "csv", "dense": ["x"], "sparse": ["c"]}


def _write(path: Path, first: int, count: int = 200) -> Path:
    return write_file(path, "x,c,y\n" + "".join(f"{x},{x},{x % 2}\n" for x in range(first, first + count)))


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
        *(({"train": ["days"], "eval": [f"{link}.csv"]},
           f"{link}.csv .the same file as .*days/1.csv.: is in data.train and in") for link in ("soft", "hard")),
        ({"train": ["days", "days/1.csv"]}, "days/1.csv: is in data.train twice; name each file once"),
        ({"train": ["days", "hard.csv"]}, "hard.csv .the same file as .*1.csv.: is in data.train twice"),
        ({"train": ["other"], "eval": ["days/*", "days/2.csv"]}, "days/2.csv: is in data.eval twice"),
        ({"train": ["other"], "test": ["soft.csv", "hard.csv"]}, "hard.csv .* is in data.test twice"),
    ],
)  # fmt: skip
def test_a_file_is_there_once(root: Path, files: dict[str, Any], why: str) -> None:
    line = refusal(root, **COLUMNS, **files)
    assert re.search(why, line), line
    for key, names in files.items():
        if len(names) > 1:  # those of `evaluate` and `predict`
            with pytest.raises(DataError, match=why.replace(f"data.{key}", "--data")):
                input_files([f"{root}/./{name}" for name in names])


# Partitions: folders called KEY=VALUE are columns of the files in them.

FORMS = ["parquet", "csv"]
PLACES = ("dt=2024-05-01/country=DE", "dt=2024-05-01/country=FR", "dt=2024-05-02/country=DE")
DE, FR = hash_text(b"DE"), hash_text(b"FR")


def _partition(root: Path, form: str, places: tuple[str, ...] = PLACES, **columns: Any) -> dict[str, Any]:
    """Writes log/PLACE/part-0 in each place: x = 0, 1, then 2, 3, and so on. Returns settings that read them."""
    for p, place in enumerate(places):
        write_file(root / "log" / place / f"part-0.{form}", {"x": [2 * p, 2 * p + 1], "y": [0, 1]} | columns)
    return {"source": form, "train": ["log"], "dense": ["x"]}


@every("form", FORMS)
def test_values_of_partitions_are_texts_in_each_row(tmp_path: Path, form: str) -> None:
    settings = _partition(tmp_path, form) | {"sparse": ["country", "dt"]}
    for entries in (["log"], ["log/**/*.*"], ["log/dt=*"], ["log/dt=2024-05-0[12]"], ["log/*/*/part-0.*"]):
        rows = read(tmp_path, **settings | {"train": entries})
        assert rows.dense == [[0], [1], [2], [3], [4], [5]] and rows.ids["country"] == [DE, DE, FR, FR, DE, DE]
        assert rows.ids["dt"] == [hash_text(b"2024-05-01")] * 4 + [hash_text(b"2024-05-02")] * 2
    _partition(tmp_path, form, ("dt=1", "dt=1/other"))
    line = refusal(tmp_path, **settings | {"train": ["log/dt=1/other"], "sparse": ["dt"]})
    assert re.search(r"other/part-0.*has no column dt; it has: x, y", line), line


@every("form", FORMS)
def test_every_role_of_a_column_may_be_one_of_a_partition_and_a_column_of_the_file_comes_first(
    tmp_path: Path, form: str
) -> None:
    settings = _partition(tmp_path, form, ("click=0/price=1.5/w=2", "click=1/price=7/w=1"))
    roles = settings | {"label": "click", "dense": ["price"], "weight": "w", "sparse": ["x"]}
    batch = batch_of(opened(tmp_path, **roles).train)
    assert batch.label_BT[:, 0].tolist() == [0, 0, 1, 1] and batch.dense_BI[:, 0].tolist() == [1.5, 1.5, 7, 7]
    assert batch.weight_B is not None and batch.weight_B.tolist() == [2, 2, 1, 1]
    _partition(tmp_path, form, ("dt=2024-05-02", "dt=2024-05-01"), country=["US", "IT"])
    days = settings | {"train": ["log/dt=2024-05-02", "log/dt=2024-05-01"]}
    assert first_column(opened(tmp_path, **days, time="dt").train) == [2, 3, 0, 1]
    _partition(tmp_path, form, ("country=DE",), country=["US", "IT"])
    rows = read(tmp_path, **settings | {"train": ["log/country=DE"], "sparse": ["country"]})
    assert rows.ids["country"] == [hash_text(b"US"), hash_text(b"IT")]


def test_values_are_read_as_they_were_written(tmp_path: Path) -> None:
    values = ["a/b=c", "50 %", "ä", None]
    table = pa.table({"y": [0, 1, 0, 1], "x": [0, 1, 2, 3], "c d": values})
    by = pads.partitioning(pa.schema([("c d", pa.string())]), flavor="hive")
    pads.write_dataset(table, tmp_path / "log", format="parquet", partitioning=by)
    rows = read(tmp_path, source="parquet", train=["log"], dense=["x"], sparse=["c d"])
    ids = [MISSING_ID if value is None else hash_text(value.encode()) for value in values]
    assert dict(zip([x for (x,) in rows.dense], rows.ids["c d"], strict=True)) == dict(enumerate(ids))


def test_folders_that_are_no_partitions_stay_out_and_a_link_to_one_has_the_value_of_its_own_name(
    tmp_path: Path,
) -> None:
    settings = _partition(tmp_path, "csv", ("c=DE", "_log", ".hidden=1", "old", "=1"))
    (tmp_path / "log" / "_SUCCESS").touch()
    (tmp_path / "log" / "c=2").mkdir()
    found = find_files(tmp_path, ["log"], key="data.train", kind="csv")
    assert [str(path.relative_to(tmp_path)) for path in found] == ["log/c=DE/part-0.csv"]
    (tmp_path / "log" / "c=FR").symlink_to(tmp_path / "log" / "c=DE")
    for value, id_ in (("DE", DE), ("FR", FR)):
        rows = read(tmp_path, **settings | {"train": [f"log/c={value}"], "sparse": ["c"], "cache": "cache"})
        assert rows.ids["c"] == [id_] * 2
