"""Opens an export as a model: maps its rows, rebuilds its dense model. Needs neither servers nor the training data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import nn

from shardkeep.base.errors import CheckpointError
from shardkeep.base.settings import first_problem
from shardkeep.config import JobConfig
from shardkeep.inference.export.manifest import MANIFEST, Manifest, read_manifest
from shardkeep.inference.export.program import PROGRAM, read_program
from shardkeep.inference.export.rows import map_rows
from shardkeep.inference.export.tower import TOWER, load_tower
from shardkeep.inference.sorted_rows import SortedRows
from shardkeep.inference.trained import Module, Trained
from shardkeep.roles.assembly import build_scorer
from shardkeep.workers.data.conversion.inputs import Inputs
from shardkeep.workers.data.schema import Schema
from shardkeep.workers.embeddings.layer import Embeddings

_ATTEMPTS = 5


@dataclass(frozen=True)
class Program:
    """A dense model that is a program."""

    model: nn.Module
    device: torch.device

    def predict(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            logits_BT: torch.Tensor = self.model(dense_BI, embeddings)
            return logits_BT.float()


def config_of_export(out: Path) -> JobConfig:
    """The settings of an export. Raises UserError, CheckpointError."""
    return _config(out, read_manifest(out))


def open_export(out: Path, *, verify: bool = False) -> Trained:
    """The model of an export.

    Args:
        verify: Read all files and compare their checksums; else sizes, headers and the offsets' checksums only.

    Raises UserError where there is none, CheckpointError where it is damaged.
    """
    for _ in range(_ATTEMPTS):
        manifest = read_manifest(out)
        try:
            manifest.check_sizes(out)
            if verify:
                manifest.verify(out)
            return trained_of_export(out, manifest)
        except CheckpointError:
            if read_manifest(out).folder == manifest.folder:
                raise  # else a new export took its place meanwhile
    raise CheckpointError(f"{out}: new exports replace it faster than it opens; load it again")


def trained_of_export(out: Path, manifest: Manifest) -> Trained:
    """The model that a manifest describes, whose files are in `out`. Raises CheckpointError."""
    config = _config(out, manifest)
    try:
        inputs = Inputs.of_json(manifest.inputs)
    except ValueError as error:
        raise CheckpointError(f"{out / MANIFEST}: damaged (inputs: {error}); export the model again") from error
    folder, schema = out / manifest.folder, inputs.layout.schema
    _check_tables(out, manifest, schema)
    layer = [map_rows(folder, number, table) for number, table in enumerate(manifest.tables)]
    rows = SortedRows([table.spec for table in manifest.tables], [layer], seed=config.seed)

    def dense(embeddings: Embeddings) -> Module:
        if manifest.program:
            return Program(read_program(folder / PROGRAM), torch.device("cpu"))
        return build_scorer(config, schema, embeddings, lambda model: load_tower(model, folder / TOWER))

    return Trained(config, manifest.step, schema, inputs, rows, dense)


def _check_tables(out: Path, manifest: Manifest, schema: Schema) -> None:
    """Raises CheckpointError where features and tables do not belong together."""
    features = [feature.name for feature in schema.features]
    if list(schema.tables()) != [table.spec.name for table in manifest.tables] or len(set(features)) < len(features):
        raise CheckpointError(
            f"{out / MANIFEST}: damaged (tables: they are not those of inputs.sparse); export the model again"
        )


def _config(out: Path, manifest: Manifest) -> JobConfig:
    try:
        return JobConfig.model_validate(manifest.settings)
    except ValidationError as error:
        raise CheckpointError(
            f"{out / MANIFEST}: its settings do not fit this version: settings.{first_problem(error)}"
        ) from error
