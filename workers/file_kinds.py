"""The kind of a data file: by its suffix, and by its first bytes."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path, PurePosixPath

SUFFIXES = {
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".parquet", ".pq", ".parq"), "parquet"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "arrow"),
    ".orc": "orc",
}
"""The source of a file by its suffix."""
UNREAD = {
    **dict.fromkeys((".npz", ".npy"), "NumPy arrays"),
    **dict.fromkeys((".pkl", ".pickle"), "pickled objects"),
    **dict.fromkeys((".h5", ".hdf5"), "HDF5"),
    **dict.fromkeys((".xlsx", ".xls"), "a spreadsheet"),
    ".avro": "Avro",
}
"""What files hold that no source reads."""
_STARTS = {b"PAR1": "parquet", b"ARROW1": "arrow", b"FEA1": "arrow", b"\xff\xff\xff\xff": "arrow", b"ORC": "orc"}
_OBJECT = re.compile(rb'(\xef\xbb\xbf)?\s*\{\s*"')
COMPRESSIONS = {
    ".gz": ("gzip", b"\x1f\x8b"),
    ".bz2": ("bz2", b"BZh"),
    ".zst": ("zstd", b"\x28\xb5\x2f\xfd"),
    ".lz4": ("lz4", b"\x04\x22\x4d\x18"),
}
"""Of compressed texts by their suffix: the name that pyarrow has for it, and the first bytes."""


def data_suffix(name: str) -> str:
    """The suffix that says what a file holds; empty where it has none such."""
    path = PurePosixPath(name.lower())
    suffix = PurePosixPath(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix
    return suffix if suffix in SUFFIXES else ""


def kind_of(path: Path) -> str:
    """The source of a file by its suffix, else by its first bytes; "" = text, which may be a CSV."""
    if suffix := data_suffix(path.name):
        return SUFFIXES[suffix]
    with contextlib.suppress(OSError), path.open("rb") as file:
        return kind_of_start(file.read(64))
    return ""


def kind_of_start(start: bytes) -> str:
    """The source of a file by its first bytes; "" = text."""
    found = next((kind for magic, kind in _STARTS.items() if start.startswith(magic)), "")
    return found or ("jsonl" if _OBJECT.match(start) else "")
