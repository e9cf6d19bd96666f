"""`shardkeep cache`: what it shows, what it removes, and what it must never remove."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import pytest

from shardkeep.base.errors import UserError
from shardkeep.base.files import file_lock
from shardkeep.base.sizes import size_text
from shardkeep.cli.cache import cache_lines
from shardkeep.config import load_config
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig

CONFIG = """
name: t
data:
  source: csv
  train: a.csv
  eval: b.csv
  label: y
  dense: [x]
"""


@pytest.fixture(autouse=True)
def no_other_entries(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cleaning looks into the user's own folders too: here they are empty ones."""
    folder = tmp_path_factory.mktemp("own")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A config whose two files are converted."""
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("x,y\n1,0\n2,1\n")
    (tmp_path / "job.yaml").write_text(CONFIG)
    open_data(load_config(tmp_path / "job.yaml").data, seed=0)
    return tmp_path / "job.yaml"


def _entry(job: Path, name: str) -> Path:
    (found,) = job.parent.glob(f".shardkeep-cache/{name}-*")
    return found


def _shown(where: Path, **options: object) -> str:
    return "\n".join(cache_lines(where, **options))  # type: ignore[arg-type]


def test_entries_are_shown_with_size_times_and_files(job: Path) -> None:
    lines = _shown(job).splitlines()
    assert lines[0].startswith(f"{job.parent / '.shardkeep-cache'}: ")
    for line, name in zip(lines[1:], ("a", "b"), strict=True):
        assert _entry(job, name).name in line and "kB" in line
        assert f"made {time.strftime('%Y-')}" in line and "used just now" in line
        assert line.endswith(f"from {job.parent / name}.csv")
    assert _shown(job) == _shown(job.parent) == _shown(job.parent / ".shardkeep-cache")


def test_entries_in_use_stay_when_cleaned(job: Path) -> None:
    assert _shown(job, clean=True).endswith("0 B removed")
    assert _entry(job, "a").is_dir() and _entry(job, "b").is_dir()


@pytest.mark.parametrize("case", ["changed", "gone", "version", "damaged", "no meta", "died"])
def test_what_no_job_will_read_is_named_and_removed(job: Path, case: str) -> None:
    entry, why = _entry(job, "a"), "damaged, of another version, or others can write it"
    if case == "changed":
        (job.parent / "a.csv").write_text("x,y\n1,0\n2,1\n3,1\n")
        why = "a.csv has changed"
    elif case == "gone":
        (job.parent / "a.csv").unlink()
        why = "a.csv is gone"
    elif case == "version":
        meta = json.loads((entry / "meta.json").read_text())
        (entry / "meta.json").write_text(json.dumps(meta | {"format": 2}))
    elif case == "damaged":
        (entry / "meta.json").write_text("{")
    elif case == "no meta":
        (entry / "meta.json").unlink()
    else:
        part = entry.with_name(f".{entry.name}.abcd_123")
        entry.rename(part)
        entry, why = part, "left by a conversion that died"
    shown = _shown(job.parent)
    assert f"({why})" in shown.replace(f"{job.parent}/", "") and "of no use; --clean removes them" in shown
    assert f"{why})  (removed)" in _shown(job.parent, clean=True).replace(f"{job.parent}/", "")
    assert not entry.exists() and _entry(job, "b").is_dir()


def test_what_is_being_converted_stays(job: Path) -> None:
    entry = _entry(job, "a")
    part = entry.with_name(f".{entry.name}.abcd_123")
    part.mkdir()
    (entry / "meta.json").unlink()
    with file_lock(entry.with_name(f".{entry.name}.lock")):
        assert "being written" in _shown(job.parent, clean=True)
    assert part.is_dir() and entry.is_dir()


def test_entries_that_no_job_has_read_for_days_go_where_asked_for(job: Path) -> None:
    old = time.time() - 5 * 86_400
    os.utime(_entry(job, "a") / "meta.json", (old, old))
    assert "used 5 days ago" in _shown(job)
    _shown(job, clean=True, unused_days=6.0)
    assert _entry(job, "a").is_dir()
    assert "removed" in _shown(job, clean=True, unused_days=4.0)
    assert not list(job.parent.glob(".shardkeep-cache/a-*")) and _entry(job, "b").is_dir()
    _shown(job.parent, clean=True, unused_days=0.0)
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
    assert _shown(cache).startswith(f"{cache}: {size_text(room())}")
    names = sorted(cache.glob("a-*"), key=lambda path: path.stat().st_ctime_ns)
    for entry in names[:2]:
        os.utime(entry / "meta.json", (0, 0))
    before = room()
    shown = _shown(cache, clean=True, unused_days=1.0)
    assert shown.count("(removed)") == 2 and shown.endswith(f"{size_text(before - room())} removed")
    assert before - room() < 10_000 and [path for path in names if path.exists()] == names[2:]
    opened(["z"], "y2")
    before = room()
    assert _shown(cache, clean=True, unused_days=0.0).endswith(f"{size_text(before)} removed") and room() == 0


def test_an_entry_with_rows_of_a_test_is_shown(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(400)))
    data = {"root": str(tmp_path), "train": "a.csv", "label": "y", "dense": ["x"], "split": {"by": "random"}}
    open_data(DataConfig.model_validate(data), seed=0)
    assert "a-" in _shown(tmp_path)


def test_a_job_that_reads_an_entry_marks_it_used(job: Path) -> None:
    os.utime(_entry(job, "a") / "meta.json", (0, 0))
    open_data(load_config(job).data, seed=0)
    assert "used just now" in _shown(job).splitlines()[1]


def test_folders_that_only_have_such_a_name_are_not_touched(tmp_path: Path) -> None:
    for name in ("crate-0123456789abcdef", ".crate-0123456789abcdef.abcd_123", ".config.d", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lib.rs").write_text("")
    before = sorted(tmp_path.rglob("*"))
    assert "no cached data" in _shown(tmp_path, clean=True, unused_days=0.0)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder; allowed: a config, a cache folder"):
        _shown(tmp_path / "none")
    with pytest.raises(UserError, match="--unused 3: has no effect without --clean"):
        _shown(tmp_path, unused_days=3.0)


def test_sizes_are_for_a_person() -> None:
    assert [size_text(n) for n in (0, 999, 1500, 786_000_000, 2_500_000_000)] == [
        "0 B", "999 B", "1.5 kB", "786.0 MB", "2.5 GB"
    ]  # fmt: skip
