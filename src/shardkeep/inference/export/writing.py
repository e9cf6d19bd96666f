"""Exports the model of a run: one folder that needs neither servers nor the training data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkeep import __version__
from shardkeep.assembly.model import build_dense_model, table_specs
from shardkeep.base.errors import ShardkeepError, UserError
from shardkeep.config import JobConfig
from shardkeep.inference.export.item_file import write_items
from shardkeep.inference.export.manifest import (
    ITEMS,
    PROGRAM,
    SETTINGS,
    TOWER,
    Manifest,
    RowFormat,
    TableRecord,
    TowerFormat,
    commit,
    new_files,
    records_of,
)
from shardkeep.inference.export.opening import trained_of_export
from shardkeep.inference.export.program import write_program
from shardkeep.inference.export.rows import write_rows
from shardkeep.inference.export.tower import write_tower
from shardkeep.inference.scoring import data_of, metrics_on
from shardkeep.inference.trained import Trained, items_of_run, needed_inputs, trained_of_checkpoint
from shardkeep.ps.checkpoints.folder import Checkpoint
from shardkeep.ps.checkpoints.row_stream import stream_rows
from shardkeep.ps.config import TableSpec
from shardkeep.records.lines import Tail
from shardkeep.records.training import Evaluation
from shardkeep.run.origin.warm_start import continuing
from shardkeep.run.reader import RunReader
from shardkeep.run.trained import Which, config_of, with_checkpoint
from shardkeep.workers.checkpoint.tower_state import read_tower
from shardkeep.workers.data.fitting.inputs import Inputs
from shardkeep.workers.data.sides import sides_of_model
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.embeddings.sequence import SequenceShape
from shardkeep.workers.metrics.quality import COUNTS

Told = Callable[[str, float], None]
_NOT_METRICS = ("kind", "role", "index", "time", "step", "train_samples", "train_bytes")


@dataclass(frozen=True)
class Formats:
    """How numbers are stored."""

    rows: RowFormat = "fp32"
    tower: TowerFormat = "fp32"


def export_run(
    run: Path,
    out: Path,
    *,
    which: Which = "auto",
    formats: Formats = Formats(),
    with_program: bool = False,
    told: Told = lambda _text, _share: None,
) -> Manifest:
    """Writes the model of a run to a folder. An earlier export there stays whole until the new one is complete.

    With number formats other than fp32 the model is evaluated before and after, where the job has evaluation data.

    Args:
        with_program: Store the dense model also as a program of torch.export, which a model of the user's own needs.

    Raises UserError, ConfigError, CheckpointError, and OSError where the disk fails.
    """
    with new_files(out) as folder:
        _, manifest = with_checkpoint(
            run, which, lambda checkpoint: _write(run, checkpoint, folder, formats, with_program, told)
        )
        manifest = replace(manifest, files=records_of(out, list(folder.iterdir())))
        commit(out, manifest)
    return manifest


def _write(
    run: Path, checkpoint: Checkpoint, folder: Path, formats: Formats, with_program: bool, told: Told
) -> Manifest:
    """Writes the files of a model. Returns the manifest, without their records."""
    config = config_of(run)
    inputs, own = needed_inputs(config, checkpoint), ":" in config.model.name
    if (with_program or own) and formats.tower != "fp32":
        why = "a model of your own" if own else "--with-program"
        raise UserError(f"--tower {formats.tower} with {why}, which stores a program of torch.export; allowed: fp32")
    tables = _write_tables(table_specs(config, inputs.layout.schema), checkpoint, folder, formats.rows, told)
    told("dense model", 1.0)
    state = read_tower(checkpoint)["model"]
    if with_program or own:
        write_program(folder / PROGRAM, *_module(config, inputs, tables, state))
    if not own:
        write_tower(folder / TOWER, state, formats.tower)
    manifest = Manifest(
        folder=folder.name,
        step=checkpoint.step,
        settings=config.model_dump(mode="json", include=set(SETTINGS)),
        inputs=inputs.to_json(),
        tables=tuple(tables),
        tower=formats.tower,
        program=own,
        metrics=_metrics(run, checkpoint.step),
        cost={},
        versions={"shardkeep": __version__, "torch": torch.__version__},
    )
    if manifest.finds_items:
        told("items", 1.0)
        write_items(folder / ITEMS, trained_of_export(folder.parent, manifest, items_of_run(config, run)).finder)
    if formats != Formats():
        after = trained_of_export(folder.parent, manifest)
        manifest = replace(manifest, cost=_cost(run, config, checkpoint, inputs, after, told))
    return manifest


def _write_tables(
    specs: Sequence[TableSpec], checkpoint: Checkpoint, folder: Path, format: RowFormat, told: Told
) -> list[TableRecord]:
    found: list[TableRecord] = []
    for number, spec in enumerate(specs):
        told(f"table {spec.name}", number / len(specs))
        blocks = stream_rows(checkpoint, spec.name, slots=False)
        found.append(write_rows(folder, number, spec, ((b.ids_N, b.rows_ND) for b in blocks), format))
    return found


def _module(
    config: JobConfig, inputs: Inputs, tables: Sequence[TableRecord], state: Mapping[str, torch.Tensor]
) -> tuple[nn.Module, int, Mapping[str, int], Mapping[str, SequenceShape]]:
    """The dense model with torch's own layers, its dense columns, its features with the values of their rows, and its
    sequences; of a retrieval model those of users."""
    schema = inputs.layout.schema
    scored = schema if config.items is None else sides_of_model(config.items, schema).users
    embeddings = Embeddings(scored, {table.spec.name: table.spec for table in tables})
    model = build_dense_model(config, schema, embeddings)
    model.load_state_dict(state)
    return model, scored.num_dense, embeddings.feature_dims, embeddings.sequences


def _metrics(run: Path, step: int) -> dict[str, Any]:
    """The job's evaluation at a step; {} = there was none."""
    records = Tail(RunReader(run).metrics_path)
    found = [record for record in records if isinstance(record, Evaluation) and record.step == step]
    return {key: value for key, value in found[-1].to_dict().items() if key not in _NOT_METRICS} if found else {}


def _cost(
    run: Path, config: JobConfig, checkpoint: Checkpoint, inputs: Inputs, after: Trained, told: Told
) -> dict[str, float] | None:
    """What the number formats changed of the metrics on the job's evaluation data; None = there are none."""
    try:
        dataset = data_of(continuing(config, checkpoint), "eval", told, inputs.fitted.split)
    except (ShardkeepError, OSError):
        dataset = None
    if dataset is None:
        return None
    before = trained_of_checkpoint(config, checkpoint, inputs.layout.schema, inputs, run=run)
    first, then = metrics_on(before, dataset, told), metrics_on(after, dataset, told)
    both = [(name, value, then.get(name)) for name, value in first.items() if name.partition("/")[0] not in COUNTS]
    return {n: changed - value for n, value, changed in both if isinstance(value, float) and isinstance(changed, float)}
