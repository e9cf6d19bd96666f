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
        assert entry_of(job, name).name in line and "kB" in line
        assert f"made {time.strftime('%Y-')}" in line and "used just now" in line
        assert line.endswith(f"from {job.parent / name}.csv")
    assert shown(job) == shown(job.parent) == shown(job.parent / ".shardkeep-cache")
    assert shown(job, clean=True).endswith("0 B removed")
    assert entry_of(job, "a").is_dir() and entry_of(job, "b").is_dir()


def other_version(job: Path, entry: Path) -> None:
    meta = json.loads((entry / "meta.json").read_text())
    (entry / "meta.json").write_text(json.dumps(meta | {"format": 2}))


DAMAGED = "damaged, of another version, or others can write it"


@every(
    ("happens", "why"),
    [
        (lambda job, entry: (job.parent / "a.csv").write_text(ROWS + "3,1\n"), "a.csv has changed"),
        (lambda job, entry: (job.parent / "a.csv").unlink(), "a.csv is gone"),
        (other_version, DAMAGED),
        (lambda job, entry: (entry / "meta.json").write_text("{"), DAMAGED),
        (lambda job, entry: (entry / "meta.json").unlink(), DAMAGED),
        (
            lambda job, entry: entry.rename(entry.with_name(f".{entry.name}.abcd_123")),
            "left by a conversion that died",
        ),
    ],
    ids=["changed", "gone", "version", "damaged", "no meta", "died"],
)
def test_what_no_job_will_read_is_named_and_removed(
    tmp_path: Path, happens: Callable[[Path, Path], object], why: str
) -> None:
    job = converted(tmp_path)
    happens(job, entry_of(job, "a"))
    text = shown(job.parent)
    assert f"({why})" in text.replace(f"{job.parent}/", "") and "of no use; --clean removes them" in text
    assert f"{why})  (removed)" in shown(job.parent, clean=True).replace(f"{job.parent}/", "")
    cache = job.parent / ".shardkeep-cache"
    assert not [*cache.glob("a-*"), *(p for p in cache.glob(".a-*") if p.is_dir())] and entry_of(job, "b").is_dir()


def test_what_is_being_converted_stays(job: Path) -> None:
    entry = entry_of(job, "a")
    part = entry.with_name(f".{entry.name}.abcd_123")
    part.mkdir()
    (entry / "meta.json").unlink()
    with file_lock(entry.with_name(f".{entry.name}.lock")):
        assert "being written" in shown(job.parent, clean=True)
    assert part.is_dir() and entry.is_dir()


def test_entries_that_no_job_has_read_for_days_go_where_asked_for(job: Path) -> None:
    old = time.time() - 5 * 86_400
    os.utime(entry_of(job, "a") / "meta.json", (old, old))
    assert "used 5 days ago" in shown(job)
    open_data(load_config(job).data, seed=0)
    assert "used just now" in shown(job).splitlines()[1]
    os.utime(entry_of(job, "a") / "meta.json", (old, old))
    shown(job, clean=True, unused_days=6.0)
    assert entry_of(job, "a").is_dir()
    assert "removed" in shown(job, clean=True, unused_days=4.0)
    assert not list(job.parent.glob(".shardkeep-cache/a-*")) and entry_of(job, "b").is_dir()
    shown(job.parent, clean=True, unused_days=0.0)
    assert not [p for p in (job.parent / ".shardkeep-cache").iterdir() if p.is_dir()]


def test_room_that_entries_share_counts_once_and_is_freed_with_the_last_of_them(tmp_path: Path) -> None:
    rows = "".join(f"{i},{i % 7},{i % 2},{i % 3 % 2}\n" for i in range(20_000))
    (tmp_path / "a.csv").write_text("x,z,y,y2\n" + rows)
    cache = tmp_path / ".shardkeep-cache"

    def opened(dense: list[str], label: str) -> None:
        data = {"root": str(tmp_path), "train": "a.csv", "label": label, "dense": dense}
        open_data(DataConfig.model_validate(data), seed=0)

    def room() -> int:
        return sum({p.stat().st_ino: p.stat().st_size for p in cache.glob("*/*")}.values())

    opened(["x", "z"], "y")
    alone = room()
    opened(["x"], "y")
    opened(["z"], "y2")
    assert room() < alone + 20_000 + 10_000  # a byte for each other label, and what describes the entries
    assert shown(cache).startswith(f"{cache}: {size_text(room())}")
    names = sorted(cache.glob("a-*"), key=lambda path: path.stat().st_ctime_ns)
    for entry in names[:2]:
        os.utime(entry / "meta.json", (0, 0))
    before = room()
    text = shown(cache, clean=True, unused_days=1.0)
    assert text.count("(removed)") == 2 and text.endswith(f"{size_text(before - room())} removed")
    assert before - room() < 10_000 and [path for path in names if path.exists()] == names[2:]
    opened(["z"], "y2")
    before = room()
    assert shown(cache, clean=True, unused_days=0.0).endswith(f"{size_text(before)} removed") and room() == 0


def test_an_entry_with_rows_of_a_test_is_shown(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(400)))
    data = {"root": str(tmp_path), "train": "a.csv", "label": "y", "dense": ["x"], "split": {"by": "random"}}
    open_data(DataConfig.model_validate(data), seed=0)
    assert "a-" in shown(tmp_path)


def test_folders_that_only_have_such_a_name_are_not_touched(tmp_path: Path) -> None:
    for name in ("crate-0123456789abcdef", ".crate-0123456789abcdef.abcd_123", ".config.d", "data"):
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
