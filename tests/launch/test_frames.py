"""Jobs whose data are in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkeep
from shardkeep.base.errors import ConfigError, DataError, UserError
from shardkeep.config import load_config
from tests.support.cases import every

ROWS = 100
DATA = {"label": "clicked", "dense": ["price"], "sparse": ["user", "tag"]}
JOB: dict[str, Any] = {
    "name": "frame",
    "servers": 0,
    "workers": 1,
    "data": DATA,
    "model": {"name": "dlrm", "bottom": [4], "hidden": [4]},
    "tables": {"default": {"dim": 4}},
    "train": {"batch_size": 50},
    "consistency": {"mode": "sync"},
}


def columns(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    user = rng.integers(0, 40, ROWS)
    return {
        "clicked": (user + rng.integers(0, 40, ROWS) > 40).astype(int),
        "user": user,
        "tag": [f"t{i}" for i in rng.integers(0, 9, ROWS)],
        "price": rng.normal(size=ROWS).round(3),
    }


def rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def test_a_frame_of_any_form_trains_the_bits_of_a_file_and_its_run_keeps_its_data_and_is_resumed_from_them(
    tmp_path: Path,
) -> None:
    train, held = columns(), columns(seed=1)
    for name, table in (("train", train), ("held", held)):
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
    files = {"train": ["train.parquet"], "eval": ["held.parquet"], "root": str(tmp_path)}
    of_file = shardkeep.train({**JOB, "data": {**DATA, **files}}, run_dir=tmp_path / "file", quiet=True)
    forms: dict[str, Any] = {"Arrow": pa.table, "columns": dict, "rows": rows}
    for name, form in forms.items():
        run = shardkeep.train(JOB, train=form(train), eval=form(held), run_dir=tmp_path / name, quiet=True)
        assert run.state_digest == of_file.state_digest and run.eval == of_file.eval, name
        assert run.steps == ROWS // 50 and run.run_dir == tmp_path / name
        assert shardkeep.load(run.run_dir).predict(form(held)).shape == (ROWS,)
    kept = run.run_dir / "data" / "train.parquet"
    before = kept.read_bytes()
    with pytest.raises(UserError, match="holds a run already"):
        shardkeep.train(JOB, train=columns(seed=2), run_dir=run.run_dir, quiet=True)
    assert kept.read_bytes() == before
    longer = shardkeep.resume(run.run_dir, overrides=["train.epochs=2"], quiet=True)
    assert longer.steps == 2 * run.steps
    assert "<html" in str(longer.report())


def test_a_config_may_be_a_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = load_config({**JOB, "data": {**DATA, "train": "clicks.csv"}})
    assert job.data.source == "csv" and Path(job.data.root) == tmp_path


@every(
    ("config", "frame", "error", "text"),
    [
        ({**JOB, "data": {**DATA, "train": "x.csv"}}, columns(), ConfigError, "leave one of them out"),
        (JOB, 5, DataError, "train=: is a int; allowed: a DataFrame"),
        (JOB, {"clicked": [1], "user": [1, 2]}, DataError, "train=: cannot be read as columns"),
        (JOB, {"clicked": [0, 1]}, DataError, "price"),
        ({**JOB, "nmae": 1}, columns(), ConfigError, "nmae: unknown key; did you mean name"),
    ],
    ids=["files, too", "no frame", "ragged", "a column is missing", "unknown key"],
)
def test_what_cannot_be_trained_is_one_line(
    tmp_path: Path, config: Any, frame: Any, error: type[UserError], text: str
) -> None:
    with pytest.raises(error, match=text) as raised:
        shardkeep.train(config, train=frame, run_dir=tmp_path / "run", quiet=True)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run" / "config.yaml").exists()
