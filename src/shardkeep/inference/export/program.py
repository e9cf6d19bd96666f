"""The dense model as a program of torch.export, for a model whose class the reader does not have: writer and reader.

Loading a program runs its code. So only load programs that you trust (docs/guide/security.md). The archive keeps no
sample inputs, which torch pickles, and only entries that torch does not unpickle are read.
"""

# B = samples, I = dense columns, D = embedding dim

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from shardkeep.base.errors import CheckpointError, UserError
from shardkeep.base.files import naming
from shardkeep.workers.embeddings.inputs import zeros
from shardkeep.workers.embeddings.sequence import SequenceShape

_SAMPLES = 16
"""Of the traced call; other numbers are allowed."""
_SAMPLE_INPUTS = "/sample_inputs/"
_PLAIN = re.compile(r"(weight|tensor)_\d+")
_ENTRIES = re.compile(
    r"[^/]+/(archive_format|archive_version|byteorder|\.data/version|\.data/serialization_id|models/model\.json"
    r"|data/sample_inputs/model\.pt|data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json))"
)
"""Entries of an archive. torch reads others by pickle."""
_ENCRYPTED = 1
"""A flag of an entry."""


def write_program(
    path: Path,
    model: nn.Module,
    num_dense: int,
    features: Mapping[str, int],
    sequences: Mapping[str, SequenceShape] = MappingProxyType({}),
) -> None:
    """Writes `model(dense_BI, embeddings)` for any number of samples from 2 on, and any number of entries of sequences.
    Raises UserError, OSError.

    Args:
        features: Feature to values of its row (D), in the order in which the model gets them.
        sequences: Group to what the model gets of it, after the features."""
    inputs = torch.zeros(_SAMPLES, num_dense), zeros(features, sequences, _SAMPLES, torch.device("cpu"))
    batch = torch.export.Dim("batch", min=2)
    shapes: dict[str, Any] = {name: {0: batch} for name in features}
    for number, (name, shape) in enumerate(sequences.items()):
        entries = {0: torch.export.Dim(f"entries{number}", min=0)}
        shapes[name] = [dict.fromkeys(shape.ids, entries), entries, {0: batch}, None]
    try:
        with _quiet():
            program = torch.export.export(model.eval(), inputs, dynamic_shapes=({0: batch}, shapes), strict=False)
    except Exception as error:  # a model of the user's own may raise anything
        why = " ".join(str(error).split())[:200]
        raise UserError(f"the model cannot become a program of torch.export: {type(error).__name__}: {why}") from error
    whole = io.BytesIO()  # torch ends the process where a disk is full
    torch.export.save(program, whole)
    with naming(path):
        _copy(whole, path)
    _check(path)


def read_program(path: Path) -> nn.Module:
    """The model. Runs what the program says. Raises CheckpointError."""
    _check(path)
    try:
        return torch.export.load(path).module()
    except Exception as error:  # torch raises anything for an archive that is damaged
        why = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}: cannot be loaded ({type(error).__name__}: {why})") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch logs the graph of a model that cannot be exported; the error says it in one line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _copy(whole: io.BytesIO, path: Path) -> None:
    """Without the sample inputs; torch wants their entry, which may be empty."""
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as target:
        for entry in source.infolist():
            target.writestr(entry, b"" if _SAMPLE_INPUTS in entry.filename else source.read(entry))


def _check(path: Path) -> None:
    """Raises CheckpointError for an archive with pickles, and for one that cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                pickled = _SAMPLE_INPUTS in entry.filename and entry.file_size
                if pickled or not _ENTRIES.fullmatch(entry.filename):
                    raise CheckpointError(f"{path}: has an entry that is not read ({entry.filename[:80]})")
                if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _ENCRYPTED:
                    raise CheckpointError(f"{path}: {entry.filename} is compressed or encrypted, which is not read")
                if entry.filename.endswith("_config.json") and _has_pickle(json.loads(archive.read(entry))):
                    raise CheckpointError(f"{path}: {entry.filename} marks an entry as a pickle, which is not read")
    except (OSError, ValueError, EOFError, RecursionError, NotImplementedError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: is no archive of torch.export ({error})") from error


def _has_pickle(found: Any) -> bool:
    if isinstance(found, dict):
        name = found.get("path_name", "weight_0")
        plain = isinstance(name, str) and _PLAIN.fullmatch(name)
        return bool(found.get("use_pickle")) or not plain or any(map(_has_pickle, found.values()))
    return isinstance(found, list) and any(map(_has_pickle, found))
