"""The registry of forms of row files. To add one, write a module with its ENTRY and name it here."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from shardkeep.base.errors import DataError, UserError
from shardkeep.base.printable import printable
from shardkeep.row_files import npy_form, parquet_form
from shardkeep.row_files.form import RowFile, RowForm

_MODULES = (parquet_form, npy_form)
FORMS = MappingProxyType[str, RowForm]({module.ENTRY.name: module.ENTRY for module in _MODULES})
SUFFIXES = ", ".join(form.suffix for form in FORMS.values())


def form_of(path: Path) -> RowForm | None:
    """The form of a file by its name; None = no name of a row file."""
    return next((form for form in FORMS.values() if path.name.endswith(form.suffix)), None)


def open_rows(path: Path, *, key: str) -> RowFile:
    """Opens a row file and checks its columns and types. Reads no row.

    Args:
        key: The setting that names it, for errors.

    Raises:
        UserError: Its name has no known suffix, or it cannot be read.
        DataError: It is damaged, or has other columns or types.
    """
    form = form_of(path)
    if form is None:
        raise UserError(f"{key}: {printable(str(path))}; allowed: a file whose name ends in {SUFFIXES}")
    try:
        for file in form.files(path):
            with file.open("rb"):  # the error of the system, which the libraries word in other ways
                pass
        return form.open(path)
    except OSError as error:
        raise UserError(f"{key}: {error.filename or path}: cannot be read ({error.strerror or error})") from error
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
