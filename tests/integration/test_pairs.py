"""Models of sequences, several labels and items, each with every mode, compression, table policy and use of a run: any
two of them meet in a job."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkeep
from shardkeep.compression.recipes import RECIPES
from shardkeep.inference.export.writing import export_run
from shardkeep.inference.predictor import Predictor
from shardkeep.inference.server.served_model import ServedModel
from shardkeep.launch.from_python import resume, train
from shardkeep.run.summary import Summary
from tests.support.label_files import LABELS
from tests.support.pairs import Case, cases_of
from tests.support.serving import Server

pytestmark = pytest.mark.slow

ROWS, STEPS, TOP = 480, 6, 4
RETRIEVAL = ("two_tower", "sasrec", "hstu")
MODELS: dict[str, dict[str, Any]] = {
    "din": {"name": "din", "hidden": [8]},
    "deepfm, transformer": {"name": "deepfm", "hidden": [8], "encoder": {"name": "transformer", "heads": 2}},
    "dlrm, hstu": {"name": "dlrm", "bottom": [8], "hidden": [8], "encoder": {"name": "hstu", "heads": 2}},
    "mmoe, din": {"name": "mmoe", "experts": 2, "hidden": [8], "task_hidden": [4], "encoder": {"name": "din"}},
    "ple, mean": {"name": "ple", "levels": 1, "hidden": [8], "task_hidden": [4], "encoder": {"name": "mean"}},
    "two_tower": {"name": "two_tower", "item": ["item", "category", "price"], "hidden": [8], "dim": 6},
    "sasrec": {"name": "sasrec", "layers": 1},
    "hstu": {"name": "hstu", "layers": 1, "heads": 2},
}
TABLES: dict[str, dict[str, Any]] = {
    "rows of any id": {},
    "freeze": {"item": {"freeze": True}},
    "admit": {"item": {"admit": {"min_count": 2}}},
    "int8 rows": {"item": {"dtype": "int8"}},
}
FACTORS = {
    "model": [*MODELS],
    "use": ["export", "serve", "resume", "warm start"],
    "tables": [*TABLES],
    "mode": ["sync", "bounded", "async"],
    "compression": ["coded ids", "balanced"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One table with the columns of all models."""
    random, path = np.random.default_rng(1), tmp_path_factory.mktemp("pairs") / "train.parquet"
    item, lengths = random.integers(0, 40, ROWS), random.integers(0, 6, ROWS)
    seen = [random.integers(0, 40, length) for length in lengths]
    clicked = random.random(ROWS) < np.where([i in list(s) for i, s in zip(item, seen, strict=True)], 0.9, 0.3)
    columns = {
        "user": [f"u{u}" for u in random.integers(0, 60, ROWS)],
        "item": item,
        "category": item % 5,
        "price": item * 0.5,
        "seen_item": pa.array([s.tolist() for s in seen], pa.list_(pa.int64())),
        "seen_age": pa.array([random.random(length).tolist() for length in lengths], pa.list_(pa.float64())),
        "clicked": clicked.astype(int),
        "bought": (clicked & (random.random(ROWS) < 0.5)).astype(int),
        "seconds": pa.array([None if random.random() < 0.3 else float(i % 7) for i in item]),
    }
    pq.write_table(pa.table(columns), path)
    return path


def data_of(model: str, file: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {"ids": {"seen_item": "item"}, "max_length": 4}
    split = {"by": "random", "eval": 0.2, "test": 0.0}
    data: dict[str, Any] = {"train": str(file), "split": split, "sparse": ["item"], "sequences": {"seen": seen}}
    if model in ("sasrec", "hstu"):
        return data
    data |= {"dense": ["price"], "sparse": ["user", "item", "category"]}
    if model == "two_tower":
        return data
    seen["numbers"] = ["seen_age"]
    return data | ({"labels": LABELS} if MODELS[model]["name"] in ("mmoe", "ple") else {"label": "clicked"})


def compression_of(case: Case) -> dict[str, Any]:
    if case["compression"] == "coded ids":
        return {"ids": "coded"}
    settings = copy.deepcopy(dict(RECIPES[case["compression"]].settings["compression"]))
    if case["mode"] == "sync":  # which allows no cache
        settings["pull"] = {key: settings["pull"][key] for key in ("values", "scale")}
    return settings


def job_of(case: Case, file: Path, *, steps: int = STEPS) -> shardkeep.JobConfig:
    return shardkeep.JobConfig.model_validate(
        {
            "servers": 0,  # compression rounds what would have been sent
            "workers": 1,
            "seed": 3,
            "data": data_of(case["model"], file),
            "model": MODELS[case["model"]],
            "consistency": {"mode": case["mode"]},
            "compression": compression_of(case),
            "tables": {"default": {"dim": 4}} | TABLES[case["tables"]],
            "tower": {"amp": "off", "compile": "off"},
            "train": {"batch_size": 32, "max_steps": steps},
            "eval": {"batch_size": 50},
        }
    )


def answers(model: Predictor, frame: pa.Table) -> Any:
    """Scores, or the items that are found."""
    return model.predict(frame).tolist() if model.trained.sides is None else model.top(frame, TOP)


def exported(case: Case, run: Path) -> Predictor:
    own = case["model"] in ("sasrec", "two_tower", "mmoe, din")
    export_run(run, run.parent / "export", with_program=own)
    return shardkeep.load(run.parent / "export")


def check_export(case: Case, file: Path, run: Path, _: Summary) -> None:
    frame = pq.read_table(file).slice(0, 60)
    assert answers(exported(case, run), frame) == answers(shardkeep.load(run), frame)


def check_serve(case: Case, file: Path, run: Path, _: Summary) -> None:
    rows = 7
    frame, model = pq.read_table(file).slice(0, rows), exported(case, run)
    inputs = chain.from_iterable(described(name, frame[name].combine_chunks()) for name in model.columns)
    with Server(ServedModel(model)) as server:
        more = {"parameters": {"top": TOP}} if case["model"] in RETRIEVAL else {}
        status, reply = server.post([*inputs], **more)
    assert status == 200, reply
    found = {each["name"]: np.array(each["data"]).reshape(rows, -1) for each in reply["outputs"]}
    expected = answers(model, frame)
    if case["model"] in RETRIEVAL:
        assert found["items"].tolist() == expected["items"]
        np.testing.assert_allclose(found["scores"], expected["scores"], atol=1e-6)
    else:
        np.testing.assert_allclose(np.hstack([*found.values()]), np.reshape(expected, (rows, -1)), atol=1e-6)


def described(name: str, column: pa.Array) -> list[dict[str, Any]]:
    if not pa.types.is_list(column.type):
        kind = "BYTES" if pa.types.is_string(column.type) else "FP64" if pa.types.is_floating(column.type) else "INT64"
        return [{"name": name, "datatype": kind, "shape": [len(column)], "data": column.to_pylist()}]
    values, lengths = column.flatten(), column.value_lengths()
    return [*described(f"{name}.values", values), described(f"{name}.lengths", lengths)[0] | {"datatype": "INT32"}]


def check_resume(case: Case, file: Path, run: Path, first: Summary) -> None:
    more = resume(run, overrides=[f"train.max_steps={2 * STEPS}"], quiet=True)
    assert more.steps == 2 * first.steps and more.state_digest != first.state_digest
    if (case["mode"], case["compression"]) == ("sync", "coded ids"):  # else the end of a job sends what was held back
        undisturbed = train(job_of(case, file, steps=2 * STEPS), run_dir=run.parent / "whole", quiet=True)
        assert more.state_digest == undisturbed.state_digest


def check_warm_start(case: Case, file: Path, run: Path, first: Summary) -> None:
    second = train(job_of(case, file), run_dir=run.parent / "second", quiet=True, from_run=run)
    assert second.steps == first.steps and second.state_digest != first.state_digest
    assert (run.parent / "second" / "checkpoints" / "step-00000000").is_dir()


CHECKS: dict[str, Callable[[Case, Path, Path, Summary], None]] = {
    "export": check_export,
    "serve": check_serve,
    "resume": check_resume,
    "warm start": check_warm_start,
}


@pytest.mark.parametrize("case", cases_of(FACTORS), ids=lambda case: " - ".join(case.values()))
def test_a_job_of_any_two_trains_and_is_used(case: Case, files: Path, tmp_path: Path) -> None:
    done = train(job_of(case, files), run_dir=tmp_path / "run", quiet=True)
    assert done.steps == STEPS and done.tables
    CHECKS[case["use"]](case, files, tmp_path / "run", done)
