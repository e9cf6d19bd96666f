"""The model with which a job begins: that of another run (`shardkeep train CONFIG --from RUN`), or rows of files.

It becomes the new run's checkpoint of step 0, so a death before its next checkpoint goes back to it. Files of another
run are linked where both runs are on one disk. The optimizer state is kept, but what one rank has not sent yet is not.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.base.errors import CheckpointError, ConfigError, UserError
from shardkeep.base.files import atomic_write
from shardkeep.base.machine.versions import versions
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints.folder import Checkpoint, FileRecord
from shardkeep.ps.checkpoints.index import earlier_steps, indexes, specs_of
from shardkeep.ps.config import TableConfig, TableSpec
from shardkeep.ps.server.table.initializers.config import InitConfig
from shardkeep.records.json_text import to_json
from shardkeep.run.checkpoints import checkpoints_of, owned
from shardkeep.run.trained import Which, checkpoint_of, config_of

if TYPE_CHECKING:
    from shardkeep.run.folder import RunFolder
    from shardkeep.run.origin.pretrained import Pretrained  # loads pyarrow, which servers do without
    from shardkeep.workers.data.samples import Data

ZEROS = InitConfig(name="zeros")


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The checkpoint of another run with which a job begins."""

    run: Path
    checkpoint: Checkpoint
    config: JobConfig

    def text(self) -> str:
        """One line for the user."""
        return f"the model of step {self.checkpoint.step:,} of {self.run}"

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the new run's checkpoint of step 0. The inputs are those of the other run."""
        model = self.config.model.model_dump(mode="json")
        origin = {"run": str(self.run.absolute()), "step": self.checkpoint.step, "model": model}
        inputs = self.checkpoint.facts.get("inputs")
        return {"from": origin, "samples": 0, "versions": versions(), "inputs": inputs}


def plan_warm_start(config: JobConfig, run: Path, which: Which = "auto") -> WarmStart:
    """Finds the checkpoint, and checks that its model is that of the job. Raises UserError (no such run or checkpoint)
    and ConfigError (a setting that differs)."""
    if not config.checkpoint.on:
        raise ConfigError(
            "checkpoint.every_steps: off with --from, which begins with a checkpoint; allowed: auto or more"
        )
    before = config_of(run)
    checkpoint = checkpoint_of(before, run, which)
    ours, theirs = config.model.model_dump(mode="json"), before.model.model_dump(mode="json")
    for key in ours | theirs:
        if key != "item":  # columns, which may come and go
            _same(f"model.{key}", ours.get(key), theirs.get(key), run)
    _same("tower.optimizer.name", config.tower.optimizer.name, before.tower.optimizer.name, run)
    return WarmStart(run, checkpoint, before)


def begun(config: JobConfig, start: WarmStart, data: Data) -> tuple[JobConfig, str]:
    """The config of a job that begins with the model of another run, and how its columns are others, in words.

    Rows of new tables begin at 0 where models add rows without a weight, so that the first scores are those of the run.
    Raises ConfigError for a table or a column that is there in another form.
    """
    from shardkeep.workers.models.registry import adds_rows  # loads torch

    schema, there = data.train.schema, {spec.name: spec for spec in specs_of(start.checkpoint)}
    new, gone = changed_columns(start.facts["inputs"], data.inputs)
    zeros, adds = [], adds_rows(config.model.name, schema.num_dense)
    for name in schema.tables():
        own, theirs = config.tables.get(name), there.get(name)
        may = adds and not config.table(name).optimizer.keeps_zeros
        if (own is None or own.init is None) and (may if theirs is None else theirs.init.name == "zeros"):
            zeros.append(name)
    tables = {name: config.tables.get(name, TableConfig()).model_copy(update={"init": ZEROS}) for name in zeros}
    config = config.model_copy(update={"tables": {**config.tables, **tables}})
    for name in filter(there.__contains__, schema.tables()):
        for key, mine, other in _table_settings(config.table(name), start.config.table(name)):
            _same(f"tables.{name}.{key}", mine, other, start.run)
    loud = [c.name for c in schema.looked_up if c.name in new and adds and config.table(c.table).init.name != "zeros"]
    words = {
        "new columns": new,
        "columns that are gone, with their weights": gone,
        "tables whose rows begin at 0": [name for name in zeros if name not in there],
        f"columns whose rows {config.model.name} adds without a weight, so that they change the first scores": loud,
    }
    return config, "; ".join([start.text(), *(f"{key}: {', '.join(names)}" for key, names in words.items() if names)])


def _table_settings(ours: TableSpec, theirs: TableSpec) -> Iterator[tuple[str, Any, Any]]:
    yield "dim", ours.dim, theirs.dim
    yield "optimizer.name", ours.optimizer.name, theirs.optimizer.name
    if ours.optimizer.name == theirs.optimizer.name == "ftrl":  # its z was summed up with that rate
        yield "optimizer.lr", ours.optimizer.lr, theirs.optimizer.lr
    yield "init", ours.init.model_dump(mode="json"), theirs.init.model_dump(mode="json")


def _same(key: str, ours: Any, theirs: Any, run: Path) -> None:
    if ours != theirs:
        raise ConfigError(f"{key}: {ours}; --from {run} was trained with {theirs}")


def write_start(start: WarmStart | None, config: JobConfig, folder: RunFolder, files: Sequence[Pretrained]) -> None:
    """Writes the checkpoint of step 0 of a new run: the model of another run, rows of files, or both. Reports each.

    Raises ConfigError (the folder of checkpoints is in use), DataError (a row file is damaged) and CheckpointError."""
    checkpoints = checkpoints_of(config, folder.path)
    if checkpoints.complete():
        raise ConfigError(
            f"checkpoint.dir: {checkpoints.folder} holds checkpoints of another run; allowed: an empty one"
        )
    checkpoints = owned(checkpoints, config, folder.path, secrets.token_hex(8))
    try:
        partial = checkpoints.begin(0)
        records = [] if start is None else _model_of(start.checkpoint, partial)
        records += _rows_of(files, partial)
        checkpoints.commit(0, records, _facts(start, files))
    except BaseException as error:
        checkpoints.abandon(0)
        if isinstance(error, OSError):
            raise CheckpointError(f"{checkpoints.folder}: cannot be written ({error.strerror or error})") from error
        raise
    finally:
        checkpoints.release()
    for origin in ([] if start is None else [start.text()]) + [each.text() for each in files]:
        folder.event({"text": f"began with {origin}"})


def tables_of(start: WarmStart | None) -> list[str]:
    """The tables that have rows of another run."""
    return [] if start is None else [spec.name for spec in specs_of(start.checkpoint)]


def _facts(start: WarmStart | None, files: Sequence[Pretrained]) -> dict[str, Any]:
    facts: dict[str, Any] = {"from": {}, "samples": 0, "versions": versions(), "inputs": None}
    if start is not None:
        facts = start.facts
    if files:
        facts["from"]["files"] = {each.spec.name: each.facts for each in files}
    return facts


def _model_of(checkpoint: Checkpoint, partial: Path) -> list[FileRecord]:
    rows = _merged_rows if checkpoint.base is not None else _linked_rows
    return [*rows(checkpoint, partial), *_links(checkpoint, checkpoint.below("tower"), partial)]


def _rows_of(files: Sequence[Pretrained], partial: Path) -> list[FileRecord]:
    """The rows of files, beside those of another run."""
    if not files:
        return []
    from shardkeep.ps.server.snapshot.start_rows import write_start_rows

    return write_start_rows([each.start() for each in files], partial, shard=len(list(partial.glob("server-*"))))


def refuse_start_of_another(config: JobConfig, folder: Path) -> None:
    """Raises ConfigError if a new job would take the checkpoint of step 0 of another run for its own."""
    checkpoints = checkpoints_of(config, folder)
    if config.checkpoint.dir is not None and checkpoints.has_start:
        raise UserError(
            f"checkpoint.dir: {checkpoints.folder} holds the start of another run; allowed: another folder, or --resume"
        )


def continuing(config: JobConfig, checkpoint: Checkpoint) -> JobConfig:
    """The config of a job that continues a model: its columns are read as those of the model, unless `data.refit`."""
    inputs = checkpoint.facts.get("inputs")
    if inputs is None or config.data.refit:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"fitted": inputs})})


def _steps(checkpoint: Checkpoint) -> int:
    return earlier_steps(checkpoint) + checkpoint.step


def _linked_rows(checkpoint: Checkpoint, partial: Path) -> list[FileRecord]:
    """The files of a checkpoint that holds all rows, with new indexes."""
    files = []
    for record, index in indexes(checkpoint):
        server = record.path.rpartition("/")[0]
        files += _links(checkpoint, [file for file in checkpoint.below(server) if file != record], partial)
        path = partial / record.path
        path.parent.mkdir(exist_ok=True)
        atomic_write(path, to_json({**index, "earlier_steps": _steps(checkpoint)}) + "\n")
        files.append(FileRecord.of(partial, path))
    return files


def _merged_rows(checkpoint: Checkpoint, partial: Path) -> list[FileRecord]:
    """The rows of an increment and of what it builds on, in one: all of them are in memory meanwhile."""
    from shardkeep.ps.server.snapshot.files import load_snapshots, write_snapshot
    from shardkeep.ps.server.tables import Tables

    tables = Tables(specs_of(checkpoint), seed=0)
    load_snapshots(tables, checkpoint, shard=0, num_shards=1)
    tables.earlier_steps = _steps(checkpoint)
    return write_snapshot(tables.snapshot(), partial, shard=0)


def _links(checkpoint: Checkpoint, files: list[FileRecord], partial: Path) -> list[FileRecord]:
    """Links files into a new checkpoint, or copies them to another disk."""
    found = []
    for file in files:
        source, path = checkpoint.folder / file.path, partial / file.path
        path.parent.mkdir(exist_ok=True)
        try:
            with contextlib.suppress(FileExistsError):
                os.link(source, path)
            found.append(file)
        except OSError:
            shutil.copyfile(source, path)
            found.append(FileRecord.of(partial, path))
    return found


def changed_columns(theirs: Mapping[str, Any] | None, ours: Mapping[str, Any] | None) -> tuple[list[str], list[str]]:
    """The columns that a job has and the run with which it begins had not, and the reverse; none where one of them has
    no raw columns. Raises ConfigError for a column that both read, in different ways."""
    if theirs is None or ours is None:
        return [], []
    before, now = _columns(theirs), _columns(ours)
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            raise ConfigError(
                f"data.{now[name][0]}: {name} is not read as in the run of --from, whose rows it would get"
            )
    return [name for name in now if name not in before], [name for name in before if name not in now]


def _columns(inputs: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """What is known of each column, by name: first its place in `data`."""
    kinds = inputs["kinds"]
    found = {c["column"]: (key, c, kinds.get(c["column"])) for key in ("dense", "sparse") for c in inputs[key]}
    for name, group in inputs.get("sequences", {}).items():
        found |= {column: (f"sequences.{name}", kinds.get(column)) for column in group["ids"]}
        found |= {number["column"]: (f"sequences.{name}", number) for number in group["numbers"]}
    return found
