"""Files of text, plain or compressed: how they are packed, and what their first bytes show."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.errors import DataError, first_line
from shardkeep.workers.file_kinds import COMPRESSIONS, kind_of_start

BLOCK_BYTES = 1 << 24  # a row must fit; also what one read holds in memory
BOM = b"\xef\xbb\xbf"


def compression_of(path: Path) -> str | None:
    """How a file is compressed; None = it is not. Raises DataError."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    for suffix, (name, magic) in COMPRESSIONS.items():
        if start.startswith(magic):
            return name
        if path.suffix == suffix and start:
            raise DataError(f"{path}: ends in {suffix} but does not hold {name} data")
    return None


def first_bytes(path: Path, kind: str = "csv") -> bytes:
    """The first MB of the text, unpacked, without a byte order mark. Raises DataError where it is not text of `kind`,
    or has only spaces."""
    compression = compression_of(path)
    try:
        with path.open("rb") as raw:
            start = bytes(pa.input_stream(raw, compression=compression).read(1 << 20))
    except OSError as error:
        raise DataError(f"{path}: {reason(error)}") from error
    if start[:4] == b"PK\x03\x04":
        raise DataError(f"{path}: is a zip archive or a spreadsheet; unpack it, or save it as csv")
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path}: is text in UTF-16; save it as UTF-8 (iconv -f UTF-16 -t UTF-8)")
    if (found := kind_of_start(start)) not in ("", kind):
        raise DataError(f"{path}: holds {found}; use data.source: {found}")
    if b"\0" in start:
        raise DataError(f"{path}: is binary, not text (byte {start.index(0)} is 0)")
    if not (start := start.removeprefix(BOM)).strip():
        raise DataError(f"{path}: is empty")
    return start


def reason(error: Exception) -> str:
    """What is wrong with a file of text that pyarrow cannot read."""
    text = first_line(error)
    if "straddling" in text:
        return f"a row is longer than {BLOCK_BYTES >> 20} MB, or a quote is opened and never closed"
    if any(word in text for word in ("runcated", "inflate", "EOF", "decompress")):
        return f"the compressed file is truncated or damaged ({text})"
    return f"cannot be read ({text})"
