"""Opens an export as a model: maps its rows, rebuilds its dense model. Needs neither servers nor the training data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shardkeep.assembly.model import build_scorer
from shardkeep.base.errors import CheckpointError, UserError
from shardkeep.base.files import use_newest
from shardkeep.inference.export.item_file import read_items
from shardkeep.inference.export.manifest import ITEMS, MANIFEST, PROGRAM, TOWER, Manifest, read_manifest
from shardkeep.inference.export.program import read_program
from shardkeep.inference.export.rows import map_rows
from shardkeep.inference.export.tower import load_tower
from shardkeep.inference.finding import Items
from shardkeep.inference.sorted_rows import SortedRows
from shardkeep.inference.trained import Module, Trained, computing_in
from shardkeep.workers.config import Amp
from shardkeep.workers.data.fitting.inputs import Inputs
from shardkeep.workers.data.schema import Schema
from shardkeep.workers.embeddings.inputs import Inputs as ModelInputs
from shardkeep.workers.embeddings.layer import Embeddings


@dataclass(frozen=True)
class Program:
    """A dense model that is a program."""

    model: nn.Module
    device: torch.device

    def predict(self, dense_BI: torch.Tensor, embeddings: ModelInputs) -> torch.Tensor:
        with torch.inference_mode():
            logits_BT: torch.Tensor = self.model(dense_BI, embeddings)
            return logits_BT.float()


def open_export(out: Path, *, verify: bool = False, amp: Amp | None = None) -> Trained:
    """The model of an export.

    Args:
        verify: Read all files and compare their checksums; else sizes, headers and the offsets' checksums only.
        amp: Arithmetic of the dense model; None = that of the job.

    Raises UserError where there is none or its program has its own arithmetic, CheckpointError where it is damaged.
    """

    def load(manifest: Manifest) -> Trained:
        for file in manifest.files:
            file.check_size(out, "export the model again")
        if verify:
            manifest.verify(out)
        if manifest.program and amp not in (None, manifest.config(out).tower.amp):
            raise UserError(f"--amp {amp}: the dense model of {out} is a program, which computes as it was exported")
        return trained_of_export(out, manifest, amp=amp)

    return use_newest(lambda: read_manifest(out), load)[1]


def trained_of_export(out: Path, manifest: Manifest, items: Items | None = None, *, amp: Amp | None = None) -> Trained:
    """The model that a manifest describes, whose files are in `out`. Raises CheckpointError.

    Args:
        items: Of a retrieval model; None = its file has them."""
    config = computing_in(manifest.config(out), amp)
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

    if items is None and manifest.finds_items:
        items = read_items(folder / ITEMS)
    return Trained(config, manifest.step, schema, inputs, rows, dense, items=items)


def _check_tables(out: Path, manifest: Manifest, schema: Schema) -> None:
    """Raises CheckpointError where features and tables do not belong together."""
    features = [feature.name for feature in schema.looked_up]
    if list(schema.tables()) != [table.spec.name for table in manifest.tables] or len(set(features)) < len(features):
        raise CheckpointError(
            f"{out / MANIFEST}: damaged (tables: they are not those of inputs.sparse); export the model again"
        )
