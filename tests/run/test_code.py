"""The digests of a run's code."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

import shardkeep
from shardkeep.config import JobConfig
from shardkeep.run.origin.code import PACKAGE, code_of


def test_the_package_has_one_digest_of_the_sources_in_all_its_rooms() -> None:
    root = Path(shardkeep.__file__).parent
    files = [Path(folder, name) for folder, _, names in os.walk(root, followlinks=True) for name in names]
    sources = sorted(path for path in files if path.suffix == ".py")
    assert {root / "config" / "job.py", root / "workers" / "run.py", root / "automl" / "init.py"} <= set(sources)
    texts = [f"{path.relative_to(root)}\0".encode() + path.read_bytes() for path in sources]
    assert code_of(JobConfig(), None)[PACKAGE] == xxhash.xxh3_64_hexdigest(b"".join(texts))
