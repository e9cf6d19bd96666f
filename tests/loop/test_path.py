"""Which files a plain pull and push run through: few, and none of a feature that is off."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from shardkeep import EmbeddingClient, TableSpec
from shardkeep.compression.config import CompressionConfig
from tests.support.import_path import ROOT


def files_of_a_step(client: EmbeddingClient, tables: list[TableSpec], *, warm_up: int = 3) -> set[str]:
    """Files of the rooms whose functions run in one step, by name. A step before it may enter more: it is the first."""
    seen: set[str] = set()
    rng = np.random.default_rng(0)

    def note(frame: FrameType, event: str, _arg: Any) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    for step in range(warm_up + 1):
        ids = {table.name: rng.integers(0, 1000, 256) for table in tables}
        if step == warm_up:
            threading.setprofile(note)
            sys.setprofile(note)
        try:
            rows = client.lookup(ids)
            sum(leaf.square().sum() for leaf in rows.values()).backward()
            client.apply(rows)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    found = [Path(name).resolve() for name in seen]
    inside = [path.relative_to(ROOT).as_posix() for path in found if path.is_relative_to(ROOT)]
    return {name for name in inside if name.startswith(("ps", "workers", "compression"))}


def test_a_plain_step_runs_through_few_files_and_none_of_a_feature_that_is_off() -> None:
    tables = [TableSpec(name=f"t{i}", optimizer={"name": "adagrad", "lr": 0.1}) for i in range(3)]
    with EmbeddingClient.local(tables) as client:
        files = files_of_a_step(client, tables)
    assert "ps/server/tables.py" in files and "ps/client/pull.py" in files
    assert len(files) <= 25, sorted(files)
    assert {name for name in files if name.startswith("compression/")} == {"compression/ledger.py"}
    off = ("compressor", "row_memory", "absent_rows", "journal", "snapshot", "pooling", "rpc/", "control/")
    assert not [name for name in files if any(word in name for word in off)]


def test_the_count_sees_a_feature_that_is_on() -> None:
    tables = [TableSpec(name="t", optimizer={"name": "sgd", "lr": 0.1})]
    compression = CompressionConfig.model_validate({"push": {"values": "fp16"}})
    with EmbeddingClient.local(tables, compression=compression) as client:
        assert {"ps/client/compressor.py", "compression/values/floats.py"} <= files_of_a_step(client, tables)
