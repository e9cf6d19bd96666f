"""Export: writes one table of a checkpoint to a row file, a part at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from shardkeep.base.errors import CheckpointError, UserError
from shardkeep.base.files import check_out, replacing
from shardkeep.ps.checkpoints.folder import Checkpoint
from shardkeep.ps.checkpoints.row_stream import Chain, count_rows, stream_rows
from shardkeep.row_files.form import RowForm
from shardkeep.row_files.registry import FORMS, SUFFIXES, form_of

Told = Callable[[float], None]
"""Called with the share that is done, in [0, 1]."""


def target_of(table: str, form: str | None, out: Path | None) -> tuple[Path, RowForm]:
    """The file to write and its form. Raises UserError if they contradict each other.

    Args:
        form: A name of FORMS; None = that of `out`, else Parquet.
        out: None = the table's name in the current folder.
    """
    if form is not None and form not in FORMS:
        raise UserError(f"--format {form}: allowed: {', '.join(FORMS)}")
    if out is None:
        found = FORMS[form or "parquet"]
        if "/" in table:
            raise UserError(f"--table {table}: is no name of a file; name one by --out")
        return Path(f"{table}{found.suffix}"), found
    named = form_of(out)
    if named is None or (form is not None and named.name != form):
        allowed = SUFFIXES if form is None else FORMS[form].suffix
        raise UserError(f"--out {out}: allowed: a name that ends in {allowed}")
    return out, named


def export_table(
    checkpoint: Checkpoint, table: str, out: Path, form: RowForm, told: Told = lambda _share: None
) -> tuple[int, list[Path]]:
    """Writes all rows of a table, in the order of `placement.keys_of`. Returns their number and the files.

    The files take their names when all rows are written. After an error, files of these names are as before.

    Raises:
        UserError: There is no such table, or `out` cannot be a file.
        CheckpointError: The checkpoint is damaged.
        OSError: The files cannot be written.
    """
    spec, count, done = Chain(checkpoint).table(table).spec, count_rows(checkpoint, table), 0
    files = form.files(out)
    for path in files:
        check_out(path)
    with replacing(files) as partial:
        with contextlib.closing(form.write(partial, spec.dim, count)) as writer:
            for ids_N, rows_ND, *_ in stream_rows(checkpoint, table, slots=False):
                writer.add(ids_N, rows_ND)
                done += ids_N.size
                told(done / max(1, count))
        if done != count:
            raise CheckpointError(f"{checkpoint.folder}: table {table} has {done} rows, its index {count}")
    return done, files
