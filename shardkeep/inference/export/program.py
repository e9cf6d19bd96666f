"""The dense model as a program of torch.export, for a model whose class the reader does not have: writer and reader.

Loading a program runs its code. So only load programs that you trust (docs/guide/security.md). The archive keeps no
sample inputs, which torch pickles, and is refused where an entry is marked as a pickle.
"""

# B = samples, I = dense columns, D = embedding dim

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkeep.base.errors import CheckpointError, UserError

PROGRAM = "tower.pt2"
_SAMPLES = 16
"""Of the traced call; other numbers are allowed."""
_SAMPLE_INPUTS = "/sample_inputs/"
_PICKLES = (".pkl", ".pickle")


def write_program(path: Path, model: nn.Module, num_dense: int, features: Mapping[str, int]) -> None:
    """Writes `model(dense_BI, embeddings)` for any number of samples from 2 on. Raises UserError, OSError.

    Args:
        features: Feature to values of its row (D), in the order in which the model gets them."""
    dense_BI = torch.zeros(_SAMPLES, num_dense)
    embeddings = {name: torch.zeros(_SAMPLES, dim) for name, dim in features.items()}
    batch = torch.export.Dim("batch", min=2)
    shapes = ({0: batch}, {name: {0: batch} for name in features})
    try:
        program = torch.export.export(model.eval(), (dense_BI, embeddings), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # a model of the user's own may raise anything
        why = " ".join(str(error).split())[:200]
        raise UserError(f"the model cannot become a program of torch.export: {type(error).__name__}: {why}") from error
    whole = path.with_name("program.pt2")
    try:
        torch.export.save(program, whole)
        _copy(whole, path)
    finally:
        whole.unlink(missing_ok=True)
    _check(path)


def read_program(path: Path) -> nn.Module:
    """The model. Runs what the program says. Raises CheckpointError."""
    _check(path)
    try:
        return torch.export.load(path).module()
    except Exception as error:  # torch raises anything for an archive that is damaged
        why = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}: cannot be loaded ({type(error).__name__}: {why})") from error


def _copy(whole: Path, path: Path) -> None:
    """Without the sample inputs; torch wants their entry, which may be empty."""
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as target:
        for entry in source.infolist():
            target.writestr(entry, b"" if _SAMPLE_INPUTS in entry.filename else source.read(entry))


def _check(path: Path) -> None:
    """Raises CheckpointError for an archive with pickles, and for one that cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                pickled = _SAMPLE_INPUTS in entry.filename or entry.filename.endswith(_PICKLES)
                if pickled and entry.file_size:
                    raise CheckpointError(f"{path}: holds a pickle ({entry.filename}), which is not read")
                if entry.filename.endswith("_config.json") and _has_pickle(json.loads(archive.read(entry))):
                    raise CheckpointError(f"{path}: an entry is marked as a pickle, which is not read")
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: is no archive of torch.export ({error})") from error


def _has_pickle(found: Any) -> bool:
    if isinstance(found, dict):
        return found.get("use_pickle") is True or any(map(_has_pickle, found.values()))
    return isinstance(found, list) and any(map(_has_pickle, found))
