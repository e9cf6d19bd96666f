"""From a file to a job: `shardkeep init`. Reads an excerpt, chooses a role for each column and settings by rules."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardkeep.automl import names
from shardkeep.automl.columns import Facts, look_at
from shardkeep.automl.job_file import yaml_with_notes
from shardkeep.automl.roles import Role, roles_of
from shardkeep.automl.rules import RULES, Size
from shardkeep.base.errors import UserError
from shardkeep.base.files import atomic_write
from shardkeep.base.machine.limits import limit_bytes
from shardkeep.base.machine.topology import usable_cores
from shardkeep.base.yaml_text import write_yaml
from shardkeep.config import JobConfig, parse_config
from shardkeep.config_files.overrides import Override, overridden
from shardkeep.config_files.paths import below_shell
from shardkeep.workers.data.conversion.rules import ReadingRules
from shardkeep.workers.data.input_files import PARQUET, find_files
from shardkeep.workers.data.sources.csv_dialect import dialect_of
from shardkeep.workers.data.sources.excerpt import Excerpt, excerpt_of
from shardkeep.workers.data_config import data_suffix

FEWEST_TIMES = 20
"""Distinct times from which the newest tenth of the rows can be cut off."""
MOST_LENGTH = 100
"""Entries of a history that are kept at most."""


def init(
    files: str | Path | Sequence[str | Path], *, label: str | None = None, overrides: Sequence[str] = ()
) -> JobConfig:
    """The job that `shardkeep init` would write for csv or parquet files. Reads an excerpt of them.

    Args:
        files: Files, folders or patterns, relative to the current folder.
        label: The column to predict; None = by its name and its two values.
        overrides: Settings that are known, as `--set` takes them: `data.delimiter=;`.

    Raises:
        DataError: A file cannot be read, or no column can be the label. The text lists the candidates.
        ConfigError: An override is wrong.
    """
    entries = [files] if isinstance(files, str | Path) else files
    plan = plan_of([str(entry) for entry in entries], label=label, overrides=overrides)
    return parse_config(plan.yaml(Path.cwd()), folder=Path.cwd())


def refuse_existing(out: Path, *, force: bool) -> None:
    """Raises UserError where the job's file exists, unless `force`."""
    if out.exists() and not force:
        raise UserError(f"{out}: exists; --force replaces it, --out FILE names another")


def write_job(plan: Plan, out: Path) -> None:
    """Writes the job's file. Raises ConfigError where an override does not fit."""
    text = plan.yaml(out.parent)
    parse_config(text, folder=out.parent)
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, text)


@dataclass(frozen=True)
class Plan:
    """What `init` saw and chose. `data`: settings that say how the files are read."""

    entries: Sequence[str]
    excerpt: Excerpt
    roles: Sequence[Role]
    data: Mapping[str, Any]
    overrides: Sequence[Override]

    @property
    def name(self) -> str:
        """The job's."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(self.entries[0]).name.partition(".")[0]).strip("-")[:100] or "job"

    @cached_property
    def time(self) -> Role | None:
        """The column of times."""
        return next((role for role in self.roles if role.use == "time"), None)

    @property
    def size(self) -> Size:
        """What the rules go by."""
        looked_up = [r.facts for r in self.roles if r.use in ("sparse", "sequence") or r.both]
        rows = self.excerpt.num_rows
        table_rows = sum(facts.distinct_of_all(rows) for facts in looked_up)
        ordered = self.time is not None and _sorted(self.time.facts)
        return Size(rows, table_rows, len(usable_cores()), limit_bytes(), ordered)

    def yaml(self, folder: Path) -> str:
        """The job's file, for this folder."""
        notes: dict[tuple[str, ...], str] = {}
        data = {"train": [_from(folder, entry) for entry in self.entries], **self.data, **self._columns(notes)}
        settings: dict[str, Any] = {"name": self.name, "servers": 0, "workers": 1, "threads": 1}
        settings |= {"data": data, "model": {}, "tables": {"default": {}} | self._own_tables(data), "train": {}}
        size = self.size
        for key, rule, note in RULES:
            *above, last = key.split(".")
            node = settings
            for each in above:
                node = node.setdefault(each, {})
            if (value := rule(size)) is not None:
                node[last] = value
                notes |= {(*above, last): note} if note else {}
        settings = overridden(settings, self.overrides, JobConfig)
        rows = f"{'' if self.excerpt.whole else 'about '}{self.excerpt.num_rows:,} rows"
        head = f"# By `shardkeep init`: {rows}, {len(self.roles)} columns. docs/reference/config.md has every key.\n"
        left = [f"#   {role.name}: {role.why}\n" for role in self.roles if role.use == "left out"]
        return head + ("# Left out:\n" if left else "") + "".join(left) + yaml_with_notes(settings, notes)

    def _columns(self, notes: dict[tuple[str, ...], str]) -> dict[str, Any]:
        """The part of `data` that the roles make."""
        found: dict[str, Any] = {"split": self._split(notes)}
        for use in ("label", "weight", "time"):
            for role in self.roles:
                if role.use == use:
                    found[use] = {"column": role.name, **role.settings} if role.settings else role.name
                    notes["data", use] = role.why
        for use in ("dense", "sparse"):
            chosen = [role for role in self.roles if role.use == use or (use == "sparse" and role.both)]
            entries = [{"column": r.name, **r.settings} if r.settings and not r.both else r.name for r in chosen]
            found |= {use: entries} if entries else {}
            notes |= {("data", use, r.name): "few values: a number and a category" for r in chosen if r.both}
        return found | self._sequences()

    def _split(self, notes: dict[tuple[str, ...], str]) -> dict[str, Any]:
        users = sorted((role.user, role.name) for role in self.roles if role.user is not None)
        by, note = "random", "rows by chance; or a column, whose values stay on one side"
        if users:
            by, note = users[0][1], "a user's rows stay on one side; or random"
        if self.time is not None and self.time.facts.distinct >= FEWEST_TIMES:
            by, note = "time", f"the newest rows; or {users[0][1] if users else 'random'}"
        notes["data", "split"] = note
        return {"by": by, "eval": 0.1, "test": 0.1}

    def _sequences(self) -> dict[str, Any]:
        """The groups of list columns that have one length in each row."""
        groups: dict[bytes, list[Role]] = {}
        for role in self.roles:
            if role.use == "sequence" and role.facts.length_N is not None:
                groups.setdefault(role.facts.length_N.tobytes(), []).append(role)
        found: dict[str, Any] = {}
        for number, members in enumerate(groups.values(), 1):
            length_N = members[0].facts.length_N
            assert length_N is not None
            ids = [role for role in members if role.settings and "pooling" in role.settings]
            group: dict[str, Any] = {"ids": {role.name: self._table_of(role.name) for role in ids}}
            if numbers := [role.name for role in members if role not in ids]:
                group["numbers"] = numbers
            group["max_length"] = int(min(MOST_LENGTH, max(1, np.quantile(length_N, 0.95))))
            group |= {key: value for key, value in (ids[0].settings or {}).items() if key == "separator"}
            found[f"history_{number}"] = group
        return {"sequences": found} if found else {}

    def _table_of(self, name: str) -> str:
        """The feature whose values a history has, by its name: `item_id` for `hist_item_ids`; or its own table."""
        words = _stems(name)
        features = [role.name for role in self.roles if role.use == "sparse" and role.facts.kind != "list"]
        return next((each for each in features if words and _stems(each) == words), name)

    def _own_tables(self, data: Mapping[str, Any]) -> dict[str, Any]:
        groups = data.get("sequences", {}).values()
        return {name: {} for group in groups for name, table in group["ids"].items() if name == table}


def plan_of(entries: Sequence[str], *, label: str | None, overrides: Sequence[str]) -> Plan:
    """Reads an excerpt and chooses the roles. Raises DataError and ConfigError."""
    known = [below_shell(Override.parse(text), JobConfig) for text in overrides]
    paths = find_files(Path.cwd(), entries, key="FILE", kind="")
    source = {"source": "parquet" if paths[0].suffix.lower() in PARQUET else "csv"}
    text = write_yaml({"data": {**source, "train": list(map(str, paths))}})
    config = parse_config(text, overrides, origin=str(paths[0])).data
    found: dict[str, Any] = {} if all(map(data_suffix, entries)) else source
    if config.source == "csv":
        found |= dialect_of(paths[0], config)
    config = config.model_copy(update=found)
    excerpt = excerpt_of(config, paths)
    rules = ReadingRules(tuple(config.missing))
    table = excerpt.table
    columns = [
        look_at(name, table.column(name).combine_chunks(), rules, decimal=config.decimal) for name in table.column_names
    ]
    positive = None if config.label is None else config.label.positive
    wanted = label or (config.label.column if config.label else None)
    roles = roles_of(columns, label=wanted, positive=positive, origin=str(paths[0]))
    if marks := sorted({mark for role in roles if role.use in ("dense", "time") for mark in role.facts.marks}):
        found["missing"] = [*config.missing, *marks]
    return Plan(entries, excerpt, roles, found, known)


def _sorted(facts: Facts) -> bool:
    """Whether times only grow from row to row, but for one in a thousand."""
    if facts.number_V is None:
        return False
    time_N = facts.number_V[facts.code_N[facts.code_N >= 0]]
    return len(time_N) > 1 and float((np.diff(time_N) < 0).mean()) < 0.001


def _stems(name: str) -> frozenset[str]:
    """The words of a name that tell one id from another."""
    besides = {"hist", "history", "seen", "past", "prev", "previous", "last", "list", "seq", "sequence", "clicked"}
    return (
        frozenset(word.rstrip("s") for word in names.words_of(name)) - besides - {"id", "idx", "index", "click", "of"}
    )


def _from(folder: Path, entry: str) -> str:
    """A file as a config in this folder names it."""
    path = Path(entry).expanduser().absolute()
    return os.path.relpath(path, folder.absolute()) if path.is_relative_to(folder.absolute()) else str(path)
