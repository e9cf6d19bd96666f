"""`shardkeep cache`: lists the stored columns of data, and removes useless ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from shardkeep.base.errors import UserError
from shardkeep.base.sizes import size_text
from shardkeep.config import load_config
from shardkeep.workers.data.store.contents import StoredFiles, contents, folders_at, folders_of, remove


def cache_lines(where: Path | None, *, clean: bool = False, unused_days: float | None = None) -> Iterator[str]:
    """Yields the lines about the caches of a config, in a folder, or of the user. With `clean`, removes entries.

    Raises UserError if there is no such file or folder.
    """
    if where is not None and not where.exists():
        raise UserError(f"{where}: no such file or folder; allowed: a config, a cache folder, or a folder of data")
    if unused_days is not None and not clean:
        raise UserError(f"--unused {unused_days:g}: has no effect without --clean")
    config = where is not None and where.is_file()
    folders = folders_of(load_config(where).data) if config and where else folders_at(where)
    held = {folder: entries for folder in folders if (entries := contents(folder))}
    if not held:
        places = ", ".join(str(folder) for folder in folders)
        yield f"no cached data in {places}" if places else "a source without files has no cached data"
    freed = 0
    for folder, entries in held.items():
        yield f"{folder}: {size_text(sum(entry.size_bytes for entry in entries))}"
        gone = {entry.path for entry in remove(entries, unused_days=unused_days)} if clean else set()
        freed += sum(entry.size_bytes for entry in entries) - sum(entry.size_bytes for entry in contents(folder))
        yield from (f"  {_line(entry, removed=entry.path in gone)}" for entry in entries)
    useless = [entry.size_bytes for entries in held.values() for entry in entries if entry.useless]
    if clean:
        yield f"{size_text(freed)} removed"
    elif useless:
        yield f"{size_text(sum(useless))} of no use; --clean removes them"


def _line(entry: StoredFiles, *, removed: bool) -> str:
    parts = [f"{size_text(entry.size_bytes):>9}", entry.path.name, f"{entry.num_columns} columns"]
    if entry.used is not None:
        parts.append(f"used {_ago(entry.used)}")
    if entry.files:
        more = f" and {len(entry.files) - 1} more" if len(entry.files) > 1 else ""
        parts.append(f"from {entry.files[0]}{more}")
    parts += [f"({text})" for text in (entry.useless, "removed" if removed else "") if text]
    return "  ".join(parts)


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for unit, name in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name} ago"
    return "just now"
