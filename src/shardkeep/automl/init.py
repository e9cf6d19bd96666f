"""From a file to a job: `shardkeep init`. Reads an excerpt, chooses a role for each column and settings by rules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardkeep.automl import names
from shardkeep.automl.columns import look_at, sure_marks
from shardkeep.automl.job_file import Keys, yaml_with_notes
from shardkeep.automl.roles import Role, roles_of
from shardkeep.automl.rules import DECAY, RULES, Size
from shardkeep.base.files import atomic_write
from shardkeep.base.machine.limits import limit_bytes
from shardkeep.base.machine.topology import usable_cores
from shardkeep.base.yaml_text import write_yaml
from shardkeep.config import JobConfig, fitted_to, parse_config
from shardkeep.config.overrides import Override, overridden
from shardkeep.config.paths import below_shell
from shardkeep.workers.data.conversion.rules import ReadingRules
from shardkeep.workers.data.input_files import PARQUET, files_of, find_files
from shardkeep.workers.data.sources.csv_dialect import dialect_of
from shardkeep.workers.data.sources.excerpt import Excerpt, excerpt_of
from shardkeep.workers.data_config import data_suffix

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


@dataclass(frozen=True)
class Plan:
    """What `init` saw and chose. `reading`: the keys of `data` that say how the files are read."""

    entries: Sequence[str]
    excerpt: Excerpt
    roles: Sequence[Role]
    reading: Mapping[str, Any]
    overrides: Sequence[Override]
    metric: str

    @property
    def name(self) -> str:
        """The job's, by its first file."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(self.entries[0]).name.partition(".")[0]).strip("-")[:100] or "job"

    @property
    def size(self) -> Size:
        """What the rules go by."""
        rows, time = self.excerpt.num_rows, next((role.facts for role in self.roles if role.use == "time"), None)
        looked_up = (role.facts for role in self.roles if role.use in ("sparse", "sequence") or role.both)
        table_rows = sum(facts.distinct_of_all(rows) for facts in looked_up)
        ordered = time is not None and time.number_V is not None and _grows(time.number_V[time.code_N])
        given = {one.keys for one in self.overrides}
        trained = 1.0 if ("data", "eval") in given else 0.9 if ("data", "test") in given else 0.8
        return Size(rows, table_rows, len(usable_cores()), limit_bytes(), ordered, self.metric, trained)

    def write(self, out: Path) -> Path:
        """Writes the job's file, and returns its path. Raises ConfigError where an override does not fit, and DataError
        where a file that it names is not there."""
        text = self.yaml(out.parent)
        files_of(parse_config(text, folder=out.parent).data)
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(out, text)
        return out

    def yaml(self, folder: Path) -> str:
        """The job's file, for this folder."""
        notes, size, given = dict[Keys, str](), self.size, {one.keys for one in self.overrides}
        data = {"train": [_from(folder, entry) for entry in self.entries], **self.reading, **self._columns(notes)}
        own = [
            ids for group in data.get("sequences", {}).values() for ids, table in group["ids"].items() if ids == table
        ]
        settings: dict[str, Any] = {"name": self.name, "servers": 0, "workers": 1, "threads": 1, "data": data}
        settings |= {"model": {}, "tables": {"default": {}} | {name: {} for name in own}, "train": {}, "eval": {}}
        for key, rule, note in RULES:
            *above, last = key.split(".")
            node = settings
            for each in above:
                node = node[each]
            chosen_here = {keys[-1] for keys in given if keys[:-1] == (*above, last)}
            if (value := rule(size)) is not None and not chosen_here & {"name", *DECAY}:  # another optimizer or decay
                node[last] = value
                notes |= {(*above, last): note} if note else {}
        for one in self.overrides:
            if one.keys in (("model",), ("model", "name")):
                settings, _ = fitted_to(settings, one.value)
        settings = overridden(settings, self.overrides, JobConfig)
        for part in ("eval", "test"):
            if isinstance(entries := settings["data"].get(part), list):
                settings["data"][part] = [_from(folder, entry) for entry in entries]
        split = settings["data"].get("split")
        by = split.get("by") if isinstance(split, Mapping) else split
        if by != "time" and ("data", "time") not in given:
            settings["data"].pop("time", None)  # has no effect then
        rows = f"{'' if self.excerpt.whole else 'about '}{self.excerpt.num_rows:,} rows, {len(self.roles)} columns"
        left_out = [f"# left out: {role.name} ({role.why})\n" for role in self.roles if role.use == "left out"]
        head = f"# By shardkeep init: {rows}. docs/reference/config.md has every key.\n"
        chosen = {keys: note for keys, note in notes.items() if keys not in given}
        return head + "".join(left_out) + yaml_with_notes(settings, chosen)

    def _columns(self, notes: dict[Keys, str]) -> dict[str, Any]:
        """The part of `data` that the roles make."""
        users = [name for _, name in sorted((role.user, role.name) for role in self.roles if role.user is not None)]
        by = "time" if any(role.use == "time" for role in self.roles) else (*users, "random")[0]
        about = {"time": "the newest rows", "random": "rows by chance"}.get(by, "users that training never sees")
        others = ", ".join(each for each in (*users[:1], "random") if each != by)
        notes["data", "split"] = about + (f"; or by: {others}" if others else "")
        found: dict[str, Any] = {"split": {"by": by, "eval": 0.1, "test": 0.1}}
        if given := {one.keys for one in self.overrides} & {("data", "eval"), ("data", "test")}:  # files of their own
            found = {} if ("data", "eval") in given else {"eval_fraction": 0.1}
        for role in self.roles:
            entry = {"column": role.name, **role.settings} if role.settings else role.name
            if role.use in ("label", "weight", "time"):
                found[role.use], notes["data", role.use] = entry, role.why
            if role.use in ("dense", "sparse"):
                found.setdefault(role.use, []).append(entry)
            if role.both:
                found.setdefault("sparse", []).append(role.name)
                notes["data", "dense", role.name] = "few values: in sparse, too"
        order = ("split", "eval_fraction", "label", "weight", "time", "dense", "sparse")
        return {key: found[key] for key in order if key in found} | self._sequences()

    def _sequences(self) -> dict[str, Any]:
        """The groups of list columns that have one length in each row."""
        groups: dict[str, list[Role]] = {}
        for role in self.roles:
            if role.use == "sequence":
                groups.setdefault(role.why, []).append(role)
        found: dict[str, Any] = {}
        for number, members in enumerate(groups.values(), 1):
            ids = [role for role in members if role.settings and "pooling" in role.settings]
            group: dict[str, Any] = {"ids": {role.name: self._table_of(role.name) for role in ids}}
            if numbers := [role.name for role in members if role not in ids]:
                group["numbers"] = numbers
            longest = np.quantile(np.asarray(members[0].facts.length_N), 0.95)
            group["max_length"] = int(min(MOST_LENGTH, max(1, longest)))
            group |= {key: value for key, value in (ids[0].settings or {}).items() if key in ("separator", "pad")}
            found[f"history_{number}"] = group
        return {"sequences": found} if found else {}

    def _table_of(self, name: str) -> str:
        """The feature whose values a history has, by its name: `item_id` for `hist_item_ids`; or its own table."""
        stem = names.stem_of(name)
        features = [role.name for role in self.roles if role.use == "sparse" and role.facts.kind != "list"]
        return next((each for each in features if stem and names.stem_of(each) == stem), name)


def plan_of(entries: Sequence[str], *, label: str | None, overrides: Sequence[str]) -> Plan:
    """Reads an excerpt and chooses the roles. Raises DataError and ConfigError."""
    paths = find_files(Path.cwd(), entries, key="FILE", kind="")
    source = {"source": "parquet" if paths[0].suffix.lower() in PARQUET else "csv"}
    target = {} if label is None else {"label": label}
    text = write_yaml({"data": {**source, **target, "train": list(map(str, paths))}})
    job = parse_config(text, overrides, origin=str(paths[0]))
    config, numbers = job.data, job.train.loss.of_numbers
    reading: dict[str, Any] = {} if all(map(data_suffix, entries)) else source
    if config.source == "csv":
        reading |= dialect_of(paths[0], config)
    config = config.model_copy(update=reading)
    excerpt = excerpt_of(config, paths)
    arrays = {name: excerpt.table.column(name).combine_chunks() for name in excerpt.table.column_names}
    rules = ReadingRules((*config.missing, *sorted(sure_marks(arrays.values()) - {*config.missing})))
    columns = [look_at(name, values, rules, decimal=config.decimal) for name, values in arrays.items()]
    named = (config.label.column, config.label.positive) if config.label else (None, None)
    roles = roles_of(columns, label=named[0], positive=named[1], origin=str(paths[0]))
    if numbers:  # the cut in two only serves to find columns that know the answer
        roles = [replace(role, settings=None, why="numbers") if role.use == "label" else role for role in roles]
    missing = [*rules.missing, *sorted({mark for role in roles if role.use != "left out" for mark in role.facts.marks})]
    reading |= {"missing": missing} if len(missing) > len(config.missing) else {}
    known = [below_shell(Override.parse(text), JobConfig) for text in overrides]
    return Plan(entries, excerpt, roles, reading, known, "mse" if numbers else "auc")


def _grows(time_N: np.ndarray[Any, Any]) -> bool:
    """Whether times only grow from row to row, but for one in a thousand."""
    return len(time_N) > 1 and float((np.diff(time_N) < 0).mean()) < 0.001


def _from(folder: Path, entry: str) -> str:
    """A file as a config in this folder names it."""
    path, folder = Path(entry).expanduser().absolute(), folder.absolute()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
