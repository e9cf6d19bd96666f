"""`shardkeep cache`: what it shows, what it removes, and what it must never remove."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardkeep.base.errors import UserError
from shardkeep.base.files import file_lock
from shardkeep.base.sizes import size_text
from shardkeep.cli.cache import cache_lines
from shardkeep.config import load_config
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every

ROWS = "x,y\n1,0\n2,1\n"


@pytest.fixture(autouse=True)
def no_other_entries(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cleaning looks into the user's own folders too: here they are empty ones."""
    folder = tmp_path_factory.mktemp("own")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return converted(tmp_path)


def converted(folder: Path) -> Path:
    for name in ("a.csv", "b.csv"):
        (folder / name).write_text(ROWS)
    (folder / "job.yaml").write_text("data: {source: csv, train: a.csv, eval: b.csv, label: y, dense: [x]}")
    open_data(load_config(folder / "job.yaml").data, seed=0)
    return folder / "job.yaml"


def entry_of(job: Path, name: str) -> Path:
    (found,) = job.parent.glob(f".shardkeep-cache/{name}-*")
    return found


def shown(where: Path, **options: object) -> str:
    return "\n".join(cache_lines(where, **options))  # type: ignore[arg-type]


def test_entries_are_shown_with_size_times_and_files_and_those_in_use_stay_when_cleaned(job: Path) -> None:
    lines = shown(job).splitlines()
    assert lines[0].startswith(f"{job.parent / '.shardkeep-cache'}: ")
    for line, name in zip(lines[1:], ("a", "b"), strict=True):
        assert entry_of(job, name).name in line and " B  " in line and "  2 columns  used just now  " in line
        assert line.endswith(f"from {job.parent / name}.csv")
    assert shown(job) == shown(job.parent) == shown(job.parent / ".shardkeep-cache")
    assert shown(job, clean=True).endswith("0 B removed")
    assert entry_of(job, "a").is_dir() and entry_of(job, "b").is_dir()


def other_version(job: Path, entry: Path) -> None:
    meta = json.loads((entry / "files.json").read_text())
    (entry / "files.json").write_text(json.dumps(meta | {"format": 0}))


DAMAGED = "damaged, or of another version"


@every(
    ("happens", "why"),
    [
        (lambda job, entry: (job.parent / "a.csv").write_text(ROWS + "3,1\n"), "a.csv has changed"),
        (lambda job, entry: (job.parent / "a.csv").unlink(), "a.csv is gone"),
        (other_version, DAMAGED),
        (lambda job, entry: (entry / "files.json").write_text("{"), DAMAGED),
        (lambda job, entry: (entry / "files.json").unlink(), DAMAGED),
    ],
    ids=["changed", "gone", "version", "damaged", "no meta"],
)
def test_what_no_job_will_read_is_named_and_removed(
    tmp_path: Path, happens: Callable[[Path, Path], object], why: str
) -> None:
    job = converted(tmp_path)
    happens(job, entry_of(job, "a"))
    text = shown(job.parent)
    assert f"({why})" in text.replace(f"{job.parent}/", "") and "of no use; --clean removes them" in text
    assert f"{why})  (removed)" in shown(job.parent, clean=True).replace(f"{job.parent}/", "")
    assert not list(job.parent.glob(".shardkeep-cache/a-*")) and entry_of(job, "b").is_dir()


def test_what_is_being_converted_stays(job: Path) -> None:
    entry = entry_of(job, "a")
    (entry / "files.json").unlink()
    with file_lock(entry / "lock"):
        assert "removed)" not in shown(job.parent, clean=True) and entry.is_dir()
    assert "removed)" in shown(job.parent, clean=True) and not entry.is_dir()


def test_entries_that_no_job_has_read_for_days_go_where_asked_for(job: Path) -> None:
    old = time.time() - 5 * 86_400
    os.utime(entry_of(job, "a") / "files.json", (old, old))
    assert "used 5 days ago" in shown(job)
    open_data(load_config(job).data, seed=0)
    assert "used just now" in shown(job).splitlines()[1]
    os.utime(entry_of(job, "a") / "files.json", (old, old))
    shown(job, clean=True, unused_days=6.0)
    assert entry_of(job, "a").is_dir()
    assert "removed" in shown(job, clean=True, unused_days=4.0)
    assert not list(job.parent.glob(".shardkeep-cache/a-*")) and entry_of(job, "b").is_dir()
    shown(job.parent, clean=True, unused_days=0.0)
    assert not [p for p in (job.parent / ".shardkeep-cache").iterdir() if p.is_dir()]


def test_all_columns_of_a_set_of_files_are_one_entry_which_takes_the_room_of_its_files(tmp_path: Path) -> None:
    rows = "".join(f"{i},{i % 7},{i % 2},{i % 3 % 2}\n" for i in range(20_000))
    (tmp_path / "a.csv").write_text("x,z,y,y2\n" + rows)
    cache = tmp_path / ".shardkeep-cache"
    for dense, label, count in ((["x", "z"], "y", 3), (["x"], "y", 3), (["z"], "y2", 4)):
        data = {"root": str(tmp_path), "train": "a.csv", "label": label, "dense": dense}
        open_data(DataConfig.model_validate(data), seed=0)
        lines = shown(cache).splitlines()
        room = sum(path.stat().st_size for path in cache.glob("*/*"))
        assert lines[0] == f"{cache}: {size_text(room)}" and len(lines) == 2 and f"  {count} columns  " in lines[1]
    data |= {"split": {"by": "random"}, "dense": ["x"]}
    open_data(DataConfig.model_validate(data), seed=0)
    room = sum(path.stat().st_size for path in cache.glob("*/*"))
    assert shown(cache, clean=True, unused_days=0.0).endswith(f"{size_text(room)} removed")
    assert list(cache.iterdir()) == []


def test_folders_that_only_have_such_a_name_are_not_touched(tmp_path: Path) -> None:
    for name in ("crate-0123456789abcdef", ".crate-0123456789abcdef", ".config.d", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lib.rs").write_text("")
    before = sorted(tmp_path.rglob("*"))
    assert "no cached data" in shown(tmp_path, clean=True, unused_days=0.0)
    assert sorted(tmp_path.rglob("*")) == before


def test_wrong_arguments_are_refused_and_sizes_are_for_a_person(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder; allowed: a config, a cache folder"):
        shown(tmp_path / "none")
    with pytest.raises(UserError, match="--unused 3: has no effect without --clean"):
        shown(tmp_path, unused_days=3.0)
    sizes = {0: "0 B", 999: "999 B", 1500: "1.5 kB", 786_000_000: "786.0 MB", 2_500_000_000: "2.5 GB"}
    assert {size: size_text(size) for size in sizes} == sizes
