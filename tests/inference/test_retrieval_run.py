"""A retrieval job from files to found items: the trainer, `evaluate`, `predict --top`, `top` and an export agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

import shardkeep
from shardkeep.analysis.differences import differences
from shardkeep.base.errors import CheckpointError, UserError
from shardkeep.inference.export.manifest import read_manifest
from shardkeep.inference.export.writing import Formats, export_run
from shardkeep.inference.scoring import BestItems, evaluate_run, evaluation_rows, predict_files

TOP = 5


def rows(count: int, seed: int) -> pa.Table:
    random = np.random.default_rng(seed)
    user = random.integers(0, 30, count)
    film = np.minimum(random.geometric(0.2, count), 12) * 3 + user % 3
    seen = [[f"film {3 * each + u % 3}" for each in random.integers(1, 12, random.integers(0, 4))] for u in user]
    columns = {"user": [f"u{u}" for u in user], "film": [f"film {f}" for f in film], "genre": film % 3}
    return pa.table(columns | {"minutes": film + 80.0, "age": user + 18.0, "seen": pa.array(seen)})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("retrieval")
    pq.write_table(rows(400, 1), folder / "train.parquet")
    pq.write_table(rows(120, 2), folder / "eval.parquet")
    pq.write_table(rows(40, 3).select(["age", "seen", "user"]), folder / "users.parquet")
    return folder


@pytest.fixture(scope="module")
def run(files: Path) -> Path:
    job: dict[str, Any] = {
        "servers": 0,
        "workers": 1,
        "data": {
            "train": str(files / "train.parquet"),
            "eval": str(files / "eval.parquet"),
            "dense": ["minutes", "age"],
            "sparse": ["user", {"column": "film", "table": "films"}, "genre"],
            "sequences": {"history": {"ids": {"seen": "film"}, "max_length": 3}},
        },
        "model": {"name": "two_tower", "item": ["film", "genre", "minutes"], "hidden": [8], "dim": 6},
        "tables": {"default": {"dim": 4}},
        "tower": {"amp": "off", "compile": "off"},
        "train": {"batch_size": 50},
    }
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=files / "run", quiet=True)
    return files / "run"


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    export_run(run, run.parent / "exported", with_program=True)
    return run.parent / "exported"


def found(model: Path, data: Path, out: Path, *further: Path, top: int = TOP) -> dict[str, list[Any]]:
    predict_files(model, [data], out, keep=["user"], best=BestItems(top, further))
    return pq.read_table(out).to_pydict()


def test_evaluate_gives_the_numbers_of_the_trainer(run: Path, files: Path) -> None:
    trained = json.loads((run / "summary.json").read_text())["eval"]
    own, of_files = evaluate_run(run), evaluate_run(run, files=[files / "eval.parquet"], by="genre")
    groups = of_files.pop("by")["groups"]
    for name in ("recall@10", "recall@50", "ndcg@10", "mrr", "samples", "unknown_targets"):
        assert own[name] == trained[name] == of_files[name], name
    assert sum(group["samples"] for group in groups) == 120 and own["mrr"] > 0.1
    assert sum(group["samples"] * group["mrr"] for group in groups) == pytest.approx(120 * own["mrr"])


def test_predict_writes_the_items_that_a_loaded_model_finds(run: Path, files: Path, tmp_path: Path) -> None:
    users = pq.read_table(files / "users.parquet")
    written = found(run, files / "users.parquet", tmp_path / "found.parquet")
    loaded = shardkeep.load(run).top(users, TOP)
    assert written["user"] == users.column("user").to_pylist()
    assert written["items"] == loaded["items"] and written["scores"] == loaded["scores"]
    assert {name for row in written["items"] for name in row} <= {*rows(400, 1).column("film").to_pylist()}


def test_a_csv_has_lists_as_json(run: Path, files: Path, tmp_path: Path) -> None:
    parquet = found(run, files / "users.parquet", tmp_path / "found.parquet")
    predict_files(run, [files / "users.parquet"], tmp_path / "found.csv", best=BestItems(TOP))
    table = pacsv.read_csv(tmp_path / "found.csv").to_pydict()
    assert [json.loads(text) for text in table["items"]] == parquet["items"]
    assert np.array([json.loads(text) for text in table["scores"]], np.float32).tolist() == parquet["scores"]


def test_further_items_are_found_by_their_columns(run: Path, files: Path, tmp_path: Path) -> None:
    """An item of several rows is there once, and one that is known already gets the vector of its new columns."""
    further = {"film": ["new", "new", "film 4"], "genre": [0, 1, 2], "minutes": [1.0, 2.0, 500.0]}
    pq.write_table(pa.table(further), tmp_path / "new.parquet")
    count = len({*rows(400, 1).column("film").to_pylist()})
    data, new = files / "users.parquet", tmp_path / "new.parquet"
    before = found(run, data, tmp_path / "a.parquet", top=count)
    after = found(run, data, tmp_path / "b.parquet", new, top=count + 1)
    for items, scores, old, past in zip(*after_and(after, before), strict=True):
        assert sorted(items) == sorted([*old, "new"])
        changed = {name for name, score in zip(items, scores, strict=True) if past.get(name) != score}
        assert changed == {"new", "film 4"}


def after_and(after: dict[str, list[Any]], before: dict[str, list[Any]]) -> tuple[list[Any], ...]:
    """Items and scores after, and items before with the score of each."""
    past = [dict(zip(*pair, strict=True)) for pair in zip(before["items"], before["scores"], strict=True)]
    return after["items"], after["scores"], before["items"], past


def test_an_export_finds_and_evaluates_alike(run: Path, exported: Path, files: Path, tmp_path: Path) -> None:
    data, own = files / "users.parquet", evaluate_run(run)
    assert found(exported, data, tmp_path / "a.parquet") == found(run, data, tmp_path / "b.parquet")
    assert own == evaluate_run(exported, files=[files / "eval.parquet"])


def test_vectors_of_an_export_have_length_1_and_give_the_scores(exported: Path, files: Path) -> None:
    folder = exported / read_manifest(exported).folder
    items = pq.read_table(folder / "items.parquet")
    vectors = np.array(items["vector"].to_pylist(), np.float32)
    assert items.column_names == ["value", "id", "vector"] and np.allclose((vectors**2).sum(1), 1)
    best = shardkeep.load(exported).top(pq.read_table(files / "users.parquet"), len(items))
    assert all(sorted(row) == sorted(items["value"].to_pylist()) for row in best["items"])


def test_number_formats_are_measured_by_ranks(run: Path, tmp_path: Path) -> None:
    manifest = export_run(run, tmp_path / "small", formats=Formats("int8", "int8"))
    assert manifest.cost is not None and {"recall@10", "mrr"} <= manifest.cost.keys()


def test_runs_are_compared_on_rows_with_the_same_targets_only(run: Path, files: Path) -> None:
    pq.write_table(rows(120, 5), files / "other.parquet")
    own, same, other = (
        evaluation_rows(run, files=each).scores() for each in ((), [files / "eval.parquet"], [files / "other.parquet"])
    )
    assert {each.metric for _, each in differences([own, same], ["a", "b"])} >= {"recall@10", "mrr"}
    with pytest.raises(UserError, match=r"^a and b have other evaluation rows \(120 and 120 rows, or other targets\)"):
        list(differences([own, other], ["a", "b"]))


def test_an_export_without_its_items_is_damaged(run: Path, tmp_path: Path) -> None:
    manifest = export_run(run, tmp_path / "out")
    (tmp_path / "out" / manifest.folder / "items.parquet").unlink()
    with pytest.raises(CheckpointError, match=r"items\.parquet"):
        shardkeep.load(tmp_path / "out")


@pytest.mark.parametrize(
    ("best", "why"),
    [
        (None, "--top is missing; two_tower finds items"),
        (BestItems(4000), r"--top 4000: the catalogue has \d+ items; allowed: 1 to \d+"),
    ],
    ids=["missing", "above the catalogue"],
)
def test_predict_refuses_what_it_cannot_find(
    run: Path, files: Path, tmp_path: Path, best: BestItems | None, why: str
) -> None:
    with pytest.raises(UserError, match=why):
        predict_files(run, [files / "users.parquet"], tmp_path / "out.parquet", best=best)
    assert not (tmp_path / "out.parquet").exists()


def test_a_run_without_its_catalogue_says_so(run: Path) -> None:
    path = run / "catalogue.arrow"
    kept = path.rename(path.with_suffix(".kept"))
    try:
        with pytest.raises(CheckpointError, match=r"catalogue\.arrow: the items of the model cannot be read"):
            shardkeep.load(run)
    finally:
        kept.rename(path)
