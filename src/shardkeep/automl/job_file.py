"""The YAML of a job with comments, as `init` writes it: short values in one line, a comment behind its key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardkeep.base.errors import JobError
from shardkeep.base.printable import printable
from shardkeep.base.yaml_text import read_yaml, write_yaml

WIDTH, COMMENTS_AT = 72, 48
"""Characters of a value in one line; the column at which comments begin."""
Keys = tuple[str, ...]


def yaml_with_notes(settings: Mapping[str, Any], notes: Mapping[Keys, str]) -> str:
    """The settings as YAML; `notes`: comments by the keys from the top. Raises JobError where it reads otherwise."""
    text = "".join(f"{line}\n" for line in _lines(settings, notes, ()))
    if read_yaml(text) != settings:
        raise JobError("the job cannot be written as YAML that reads as it is; rename columns with unusual characters")
    return text


def _lines(value: Any, notes: Mapping[Keys, str], above: Keys) -> Iterator[str]:
    """The lines of a mapping, or of a list of columns."""
    inner = "  " * len(above)
    entries = value.items() if isinstance(value, Mapping) else ((_named(each), each) for each in value)
    for key, below in entries:
        keys, head = (*above, key), f"{inner}{flow(key)}:" if isinstance(value, Mapping) else f"{inner}-"
        parts = below if isinstance(below, Mapping | list) else ()
        told = bool(parts) and any(other[: len(keys)] == keys and other != keys for other in notes)
        text = f"{head} {flow(below)}"
        if (len(text) > WIDTH and isinstance(below, Mapping | list) and isinstance(value, Mapping)) or told:
            yield _with_note(head, notes.get(keys, ""))
            yield from _lines(below, notes, keys)
        else:
            yield _with_note(text, notes.get(keys, ""))


def _with_note(text: str, note: str) -> str:
    return f"{text:<{COMMENTS_AT}} # {printable(note)}" if note else text


def _named(entry: Any) -> str:
    return str(entry["column"] if isinstance(entry, Mapping) else entry)


def flow(value: Any) -> str:
    """A value in one line."""
    return write_yaml([value], default_flow_style=True, sort_keys=False, width=1 << 20).strip()[1:-1]
