"""The examples of docs/guide/compression.md, run as written: a codec, one file and one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.import_path import IMPORT_PATH, ROOT

INSTALLED = """
import sys
import shardkeep.compression
shardkeep.compression.__path__ = [sys.argv[1], *shardkeep.compression.__path__]
"""
CODEC = """
import numpy as np
from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.values.codec import value_codec
from shardkeep.compression.config import PullConfig, PushConfig

assert PullConfig(values="int16").scale is None and PushConfig(values="int16", scale="pow2").scale == "pow2"
codec = value_codec("int16")
assert codec is value_codec(64) and (codec.name, codec.tag, codec.scale_bytes) == ("int16", 64, 1)
rng = np.random.default_rng(1)
for dim in (1, 3, 16):
    rows_KD = (rng.normal(size=(50, dim)) * np.exp2(rng.integers(-150, 120, (50, 1)))).astype(np.float32)
    encoded = codec.encode(rows_KD)
    assert encoded.shape == (50, codec.row_bytes(dim)) and encoded.dtype == np.uint8 and encoded.flags.c_contiguous
    decoded = codec.decode(encoded, dim)
    assert decoded.shape == rows_KD.shape and decoded.dtype == np.float32
    limit = np.maximum(np.abs(rows_KD).max(axis=1, keepdims=True).astype(np.float64) / 2**15, 2.0**-127)
    assert (np.abs(decoded.astype(np.float64) - rows_KD) <= limit).all()
odd = np.array([[1, np.nan], [np.inf, 0], [0, 0]], np.float32)
found = codec.decode(codec.encode(odd), 2)
assert not np.isfinite(found[:2]).any() and (found[2] == 0).all()
try:
    codec.decode(encoded.reshape(-1)[:-1], dim)
except CorruptMessage:
    pass
else:
    raise AssertionError("a wrong size")
"""


def blocks(heading: str) -> list[str]:
    section = (ROOT / "docs" / "guide" / "compression.md").read_text(encoding="utf-8").split(f"\n## {heading}\n")[1]
    return re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.DOTALL)


def test_the_examples_of_the_documents_work_as_they_stand(tmp_path: Path) -> None:
    add_to_registry(tmp_path, "FORMATS", *blocks("A codec of your own"))
    environment = {**os.environ, "PYTHONPATH": IMPORT_PATH, "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-c", f"{INSTALLED}{CODEC}", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def add_to_registry(folder: Path, registry: str, module: str, line: str) -> None:
    """Puts a module, and the file of its registry with a line for it, where they come before those of the library."""
    own = folder / module.splitlines()[0].removeprefix("# compression/")
    own.parent.mkdir()
    own.write_text(module)
    at, entry = line.splitlines()
    file = at.removeprefix("# compression/").removesuffix(f", in {registry}")
    before, after = (ROOT / "compression" / file).read_text().split(f"\n{registry}: ")
    after = after.replace("\n)", f"\n    {entry},\n)", 1)
    (folder / file).write_text(f"{before}\n{registry}: {after}")
