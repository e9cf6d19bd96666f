"""From a file to a job: `shardkeep init`. Reads an excerpt, chooses a role for each column and settings by rules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardkeep.automl.columns import look_at, sure_marks
from shardkeep.automl.job_file import Keys, yaml_with_notes
from shardkeep.automl.roles import Role, doubts, roles_of, table_of
from shardkeep.automl.rules import DECAY, RULES, Size
from shardkeep.base.compiling.kernels import load_kernels
from shardkeep.base.compiling.sources import with_imports
from shardkeep.base.files import atomic_write
from shardkeep.base.logs.log import EventLog
from shardkeep.base.machine.limits import limit_bytes
from shardkeep.base.machine.topology import usable_cores
from shardkeep.base.printable import printable
from shardkeep.base.yaml_text import write_yaml
from shardkeep.config import JobConfig, fitted_to, parse_config, unused
from shardkeep.config.overrides import Override, overridden
from shardkeep.config.paths import below_shell
from shardkeep.workers.data.conversion.rules import ReadingRules
from shardkeep.workers.data.input_files import files_of, find_files
from shardkeep.workers.data.sources.csv_dialect import dialect_of
from shardkeep.workers.data.sources.excerpt import Excerpt, excerpt_of
from shardkeep.workers.data_config import ALL, marks_of
from shardkeep.workers.file_kinds import data_suffix, kind_of

_log = EventLog("init")
MOST_LENGTH = 100
"""Entries of a history that are kept at most."""


def init(
    files: str | Path | Sequence[str | Path], *, label: str | None = None, overrides: Sequence[str] = ()
) -> JobConfig:
    """The job that `shardkeep init` would write for files. Reads an excerpt of them.

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
    for question in plan.questions:
        _log.warning(question)
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
        ordered = False
        if time is not None and time.number_V is not None:  # they only grow, but for one in a thousand
            ordered = float((np.diff(time.number_V[time.code_N]) < 0).mean()) < 0.001
        given = {one.keys for one in self.overrides}
        trained = 1.0 if ("data", "eval") in given else 0.9 if ("data", "test") in given else 0.8
        return Size(rows, table_rows, len(usable_cores()), limit_bytes(), ordered, self.metric, trained)

    @cached_property
    def sides(self) -> list[str]:
        """The label on the sides of the split, by the excerpt: one line, and a question where it is far off."""
        load_kernels(with_imports(["shardkeep.workers.data.columns.column_kernels"]))
        from shardkeep.workers.data.conversion.labels import decode_labels
        from shardkeep.workers.data.conversion.layout import layout_of
        from shardkeep.workers.data.conversion.typing import facts_of
        from shardkeep.workers.data.fitting.split import Split
        from shardkeep.workers.data.samples import SIDES, Side, label_lines

        job = parse_config(write_yaml(self._settings(Path.cwd())[0]), folder=Path.cwd())
        record, layout = job.data.held_out(job.seed), layout_of(job.data)
        if record is None:
            return []
        chunk, split = self.excerpt.chunk(self.entries[0], job.data.decimal), Split(record, layout)
        labels, known = decode_labels(chunk, layout.labels, layout.rules), facts_of({"": chunk.schema}, layout)
        side_N = np.where(labels.kept(layout.labels), split.parted([chunk], known), len(SIDES))
        groups_N = next((role.facts.code_N for role in self.roles if role.name == record.by), chunk.rows_N)
        own = {name: side_N == number for number, name in enumerate(SIDES) if (side_N == number).any()}
        label_NT = labels.value_N.astype(np.float64)[:, None]
        sides = {n: Side(label_NT[own_N], None, len(np.unique(groups_N[own_N]))) for n, own_N in own.items()}
        return label_lines(layout.label_columns, sides, record.by, job.data.time)

    @property
    def questions(self) -> list[str]:
        """What only the user knows, and what makes the job's figures worthless where the answer is no."""
        return [*(role.question for role in self.roles if role.question), *doubts(self.roles), *self.sides[1:]]

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
        settings, notes = self._settings(folder)
        rows = f"{'' if self.excerpt.whole else 'about '}{self.excerpt.num_rows:,} rows, {len(self.roles)} columns"
        lines = [f"By shardkeep init: {rows}. docs/reference/config.md has every key."]
        lines += [f"left out: {role.name} ({role.why})" for role in self.roles if role.use == "left out"]
        lines += [f"question: {question}" for question in self.questions]
        return "".join(f"# {printable(line)}\n" for line in lines) + yaml_with_notes(settings, notes)

    def _settings(self, folder: Path) -> tuple[dict[str, Any], dict[Keys, str]]:
        """The settings of the job's file, and its comments."""
        notes, size, given = dict[Keys, str](), self.size, {one.keys for one in self.overrides}
        data = {"train": [_from(folder, entry) for entry in self.entries], **self.reading, **self._columns(notes)}
        notes |= {("data", "absent"): "some files lack columns"} if "absent" in data else {}
        groups = [group["ids"].items() for group in data.get("sequences", {}).values()]
        own = [ids for group in groups for ids, table in group if ids == table]
        attends = bool(groups) and all(any(ids != table for ids, table in group) for group in groups)
        size = replace(size, attends=attends)
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
        for path in unused(parse_config(write_yaml(settings), folder=folder, judged="nothing")):
            group, _, key = path.partition(".")
            if (group, key) not in given:
                settings[group].pop(key, None)
        if "time" not in settings["data"] and not any(r.facts.formats for r in self.roles if r.use == "dense"):
            settings["data"].pop("time_format", None)
        return settings, {keys: note for keys, note in notes.items() if keys not in given}

    def _columns(self, notes: dict[Keys, str]) -> dict[str, Any]:
        """The part of `data` that the roles make."""
        users = [name for _, name in sorted((role.user, role.name) for role in self.roles if role.user is not None)]
        by = "time" if any(role.use == "time" for role in self.roles) else (*users, "random")[0]
        about = {"time": "the newest rows", "random": "rows by chance"}.get(by, "users that training never sees")
        others = ", ".join(each for each in (*users[:1], "random") if each != by)
        notes["data", "split"] = about + (f"; or by: {others}" if others else "")
        found: dict[str, Any] = {"split": {"by": by, "eval": 0.1, "test": 0.1}}
        if given := {one.keys for one in self.overrides} & {("data", "eval"), ("data", "test")}:  # files of their own
            found = {} if ("data", "eval") in given else {"split": {"by": by, "eval": 0.1, "test": 0}}
        for role in self.roles:
            entry = {"column": role.name, **role.settings} if role.settings else role.name
            if role.use in ("label", "weight", "time"):
                found[role.use], notes["data", role.use] = entry, role.why
            if role.use in ("dense", "sparse"):
                found.setdefault(role.use, []).append(entry)
            if role.both:
                found.setdefault("sparse", []).append(role.name)
                notes["data", "dense", role.name] = "few values: in sparse, too"
        order = ("split", "label", "weight", "time", "dense", "sparse")
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
            group: dict[str, Any] = {"ids": {role.name: table_of(role, self.roles) for role in ids}}
            if numbers := [role.name for role in members if role not in ids]:
                group["numbers"] = numbers
            longest = np.quantile(np.asarray(members[0].facts.length_N), 0.95)
            group["max_length"] = int(min(MOST_LENGTH, max(1, longest)))
            group |= {key: value for key, value in (ids[0].settings or {}).items() if key in ("separator", "pad")}
            found[f"history_{number}"] = group
        return {"sequences": found} if found else {}


def plan_of(entries: Sequence[str], *, label: str | None, overrides: Sequence[str]) -> Plan:
    """Reads an excerpt and chooses the roles. Raises DataError and ConfigError."""
    paths = find_files(Path.cwd(), entries, key="FILE", kind="")
    source = {"source": kind_of(paths[0]) or "csv"}
    target = {} if label is None else {"label": label}
    text = write_yaml({"data": {**source, **target, "train": list(map(str, paths))}})
    job = parse_config(text, overrides, origin=str(paths[0]), judged="nothing")
    config, numbers = job.data, job.train.loss.of_numbers
    reading: dict[str, Any] = {} if all(map(data_suffix, entries)) else source
    if config.source == "csv":
        reading |= dialect_of(paths[0], config)
    config = config.model_copy(update=reading)
    excerpt = excerpt_of(config, paths)
    reading |= {"absent": "missing"} if excerpt.differ else {}
    rows, marks = excerpt.chunk(str(paths[0]), config.decimal), marks_of(config.missing, ALL)
    missing = (*marks, *sorted(sure_marks(rows.columns.values()) - {*marks}))
    rules = ReadingRules(missing, time_format=tuple(config.time_format))
    columns = [look_at(name, values, rules, decimal=config.decimal) for name, values in rows.columns.items()]
    roles = roles_of(columns, rows, rules, config.label)
    if numbers:  # the cut in two only serves to find columns that know the answer
        roles = [replace(role, settings=None, why="numbers") if role.use == "label" else role for role in roles]
    shared = {ALL: [*missing]} if len(missing) > len(marks) else {}
    own = {role.name: sorted(role.facts.marks) for role in roles if role.use != "left out" and role.facts.marks}
    reading |= {"missing": {**shared, **own} if own else [*missing]} if shared or own else {}
    formats = sorted({form for role in roles if role.use != "left out" for form in role.facts.formats})
    reading |= {"time_format": [*config.time_format, *formats]} if formats else {}
    known = [below_shell(Override.parse(text), JobConfig) for text in overrides]
    return Plan(entries, excerpt, roles, reading, known, "mse" if numbers else "auc")


def _from(folder: Path, entry: str) -> str:
    """A file as a config in this folder names it."""
    path, folder = Path(entry).expanduser().absolute(), folder.absolute()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
