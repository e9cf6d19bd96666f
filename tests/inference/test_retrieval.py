"""Retrieval models find the items whose vectors are nearest: loaded, trained from files, exported and served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

import shardkeep
from shardkeep.analysis.differences import differences
from shardkeep.assembly.model import build_scorer, table_specs
from shardkeep.base.errors import CheckpointError, UserError
from shardkeep.config import load_config
from shardkeep.inference.export.manifest import read_manifest
from shardkeep.inference.export.writing import Formats, export_run
from shardkeep.inference.finding import Items
from shardkeep.inference.predictor import Predictor
from shardkeep.inference.protocol.datatypes import unpack
from shardkeep.inference.scoring import evaluate_run, evaluation_rows, predict_files
from shardkeep.inference.server.served_model import Loaded, ServedModel
from shardkeep.inference.server.signature import Rows
from shardkeep.inference.sorted_rows import SortedRows, SortedTable
from shardkeep.inference.trained import Trained
from shardkeep.workers.data.fitting.inputs import Inputs
from shardkeep.workers.data.schema import Schema, sample_inputs
from tests.support.cases import every
from tests.support.retrieval import ITEM, NEXT, TOWERS, Takes, catalogue_of
from tests.support.serving import Server, raw_request

TOP, DIM = 5, 8
MODELS: dict[str, tuple[Schema, dict[str, Any]]] = {
    "two_tower": (TOWERS, {"name": "two_tower", "item": list(ITEM), "hidden": [12], "dim": DIM}),
    "sasrec": (NEXT, {"name": "sasrec", "dropout": 0.0}),
    "hstu": (NEXT, {"name": "hstu", "layers": 1, "heads": 2}),
}


def untrained(name: str, samples: Takes | None = None, **settings: Any) -> Trained:
    """A model with rows and layers that nobody has trained. It knows the items of some samples."""
    schema, model = MODELS[name]
    job = {
        "data": {"source": "tests.support.retrieval:none"},
        "model": model,
        "tables": {"default": {"dim": DIM, "init": {"name": "normal", "std": 1.0}}},
        "tower": {"amp": "off", "compile": "off"},
    }
    config = shardkeep.JobConfig.model_validate(job | settings)
    specs = table_specs(config, schema)
    nothing = [SortedTable.of(np.empty(0, np.int64), np.empty((0, spec.dim), np.float32)) for spec in specs]
    return Trained(
        config,
        1,
        schema,
        Inputs.of_json(sample_inputs(schema, {"tags"} & {feature.name for feature in schema.features})),
        SortedRows(specs, [nothing], seed=config.seed),
        lambda embeddings: build_scorer(config, schema, embeddings, lambda _model: None),
        items=Items(catalogue_of(samples or Takes(schema, 300))),
    )


def frame_of(samples: Takes, count: int) -> dict[str, Any]:
    """The columns of users of the first samples, as a person has them."""
    if samples.schema is TOWERS:
        return {"age": samples.age[:count, 0], "user": samples.user[:count]}
    starts = samples.starts[: count + 1].astype(np.int32)
    return {"seen_item": pa.ListArray.from_arrays(pa.array(starts), pa.array(samples.seen))}


@every("name", ["two_tower", "sasrec"])
def test_the_best_items_of_users_are_those_of_all_scores(name: str) -> None:
    """A custom index receives the vectors of users, from their columns alone."""
    samples = Takes(MODELS[name][0], 300)
    trained = untrained(name, samples)
    predictor, frame = Predictor(trained), frame_of(samples, 40)
    assert predictor.columns == list(frame) and predictor.outputs == ("items", "scores")
    alone = [trained.logits(trained.sides.users_of(samples.gather(np.array([n])))) for n in range(40)]
    found, scores = predictor.top(frame, 7), np.concatenate(alone) @ trained.finder.index.vectors_ME.T
    values = trained.finder.ranking.catalogue.values.to_pylist()
    order = np.argsort(-scores, axis=1, kind="stable")[:, :7]
    best = np.take_along_axis(scores, order, axis=1)
    assert found["items"] == [[values[place] for place in row] for row in order]
    assert np.allclose(found["scores"], best, atol=1e-6)
    users_BE = predictor.vectors(frame)
    own = np.sort(users_BE @ trained.finder.index.vectors_ME.T, axis=1)[:, :-8:-1]
    assert users_BE.dtype == np.float32 and np.allclose(own, best, atol=1e-6)


@every("name", MODELS)
def test_the_place_of_a_sample_changes_none_of_its_bits(name: str) -> None:
    for seed in range(4):  # the first one alone has equal bits by chance
        samples = Takes(MODELS[name][0], 300, seed=seed)
        trained, order, tops = untrained(name, samples), np.random.default_rng(seed).permutation(100), []
        for rows in (np.arange(100), order):
            batch = trained.sides.users_of(samples.gather(rows))
            tops.append(trained.finder.top(trained.logits(batch), batch, 9))
        assert tops[0].scores_BK[order].tobytes() == tops[1].scores_BK.tobytes()
        assert tops[0].places_BK[order].tolist() == tops[1].places_BK.tolist()


def test_what_a_sample_has_seen_is_not_found_where_the_evaluation_excludes_it() -> None:
    samples = Takes(NEXT, 300)
    trained, frame = untrained("sasrec", samples, eval={"exclude_seen": True}), frame_of(samples, 40)
    items = len(trained.finder.index)
    found, seen = Predictor(trained).top(frame, items)["items"], frame["seen_item"].to_pylist()
    assert all(not {*row} & {*known} for row, known in zip(found, seen, strict=True))
    assert [len(row) for row in found] == [items - len({*known}) for known in seen]


@every("name", MODELS)
def test_similarities_in_half_precision_are_as_many_as_in_float32(name: str) -> None:
    samples = Takes(MODELS[name][0], 300)
    counts = []
    for amp in ("off", "bf16"):
        trained = untrained(name, samples, tower={"amp": amp, "compile": "off"})
        assert trained.sides is not None
        users_BE = trained.logits(trained.sides.users_of(samples.gather(np.arange(300))))
        counts.append(np.unique(users_BE @ trained.finder.index.vectors_ME[0]).size)
    assert counts[1] > 0.95 * counts[0]


def test_what_a_model_cannot_find_is_refused() -> None:
    predictor, frame = Predictor(untrained("two_tower")), frame_of(Takes(TOWERS, 9), 3)
    for k in (0, 41):
        with pytest.raises(UserError, match=rf"k: {k}: the catalogue has 40 items; allowed: 1 to 40"):
            predictor.top(frame, k)
    with pytest.raises(UserError, match=r"two_tower finds items; allowed: top\(data, k\)"):
        predictor.predict(frame)


# ---- a job, from files to found items ----


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
        "tables": {"default": {"dim": 4}, "films": {"dim": 4, "init": {"name": "zeros"}}},
        "tower": {"amp": "off", "compile": "off"},
        "train": {"batch_size": 50},
    }
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=files / "run", quiet=True)
    return files / "run"


@pytest.fixture(scope="module")
def program(run: Path) -> Path:
    export_run(run, run.parent / "exported", with_program=True)
    return run.parent / "exported"


def found(model: Path, out: Path) -> dict[str, list[Any]]:
    predict_files(model, [model.parent / "users.parquet"], out, keep=["user"], top=TOP)
    return pq.read_table(out).to_pydict()


def test_evaluate_gives_the_numbers_of_the_trainer(run: Path, program: Path, files: Path) -> None:
    trained = json.loads((run / "summary.json").read_text())["eval"]
    own, of_files = evaluate_run(run), evaluate_run(run, files=[files / "eval.parquet"], by="genre")
    groups = of_files.pop("by")["groups"]
    for name in ("recall@10", "recall@50", "ndcg@10", "mrr", "samples", "unknown_targets"):
        assert own[name] == trained[name] == of_files[name], name
    assert sum(group["samples"] for group in groups) == 120 and own["mrr"] > 0.1
    assert sum(group["samples"] * group["mrr"] for group in groups) == pytest.approx(120 * own["mrr"])
    assert own == evaluate_run(program, files=[files / "eval.parquet"])


def test_predict_writes_the_items_that_a_loaded_model_finds(
    run: Path, program: Path, files: Path, tmp_path: Path
) -> None:
    users = pq.read_table(files / "users.parquet")
    written, loaded = found(run, tmp_path / "found.parquet"), shardkeep.load(run).top(users, TOP)
    assert written == {"user": users.column("user").to_pylist(), **loaded}
    assert {name for row in written["items"] for name in row} <= {*rows(400, 1).column("film").to_pylist()}
    assert found(program, tmp_path / "exported.parquet") == written
    predict_files(program, [files / "users.parquet"], tmp_path / "found.csv", top=TOP)
    lists = pacsv.read_csv(tmp_path / "found.csv").to_pydict()  # as JSON
    assert [json.loads(text) for text in lists["items"]] == written["items"]
    assert np.array([json.loads(text) for text in lists["scores"]], np.float32).tolist() == written["scores"]


def test_an_export_of_a_job_that_continues_finds_new_items_by_their_columns(
    run: Path, files: Path, tmp_path: Path
) -> None:
    """Rows of tables stay as they were: vectors of new items differ by genre and minutes alone."""
    days, new = rows(90, 4), ["new", "same", "other"]
    taken = {"film": new, "genre": [0, 0, 2], "minutes": [90.0, 90.0, 500.0]}
    news = pa.table({name: taken.get(name, days[name][:3]) for name in days.column_names}, days.schema)
    pq.write_table(pa.concat_tables([days, news]), tmp_path / "day.parquet")
    job = load_config(run / "config.yaml").model_dump()
    job["tables"]["films"]["optimizer"] = {"lr": 1e-30}
    job["data"] |= {"train": [str(tmp_path / "day.parquet")]}
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=tmp_path / "run", from_run=run, quiet=True)
    export_run(tmp_path / "run", tmp_path / "out")
    names = {*days["film"].to_pylist(), *new}
    best = shardkeep.load(tmp_path / "out").top(pq.read_table(files / "users.parquet"), len(names))
    for items, scores in zip(best["items"], best["scores"], strict=True):
        score = dict(zip(items, scores, strict=True))
        assert {*items} == names and score["new"] == score["same"] != score["other"]


def test_exports_have_vectors_of_length_1_and_without_their_items_models_are_damaged(
    run: Path, program: Path, files: Path, tmp_path: Path
) -> None:
    items = pq.read_table(program / read_manifest(program).folder / "items.parquet")
    vectors = np.array(items["vector"].to_pylist(), np.float32)
    assert items.column_names == ["value", "id", "vector"] and np.allclose((vectors**2).sum(1), 1)
    best = shardkeep.load(program).top(pq.read_table(files / "users.parquet"), len(items))
    assert all(sorted(row) == sorted(items["value"].to_pylist()) for row in best["items"])
    small = export_run(run, tmp_path / "small", formats=Formats("int8", "int8"))
    assert small.cost is not None and {"recall@10", "mrr"} <= small.cost.keys()
    (tmp_path / "small" / small.folder / "items.parquet").unlink()
    with pytest.raises(CheckpointError, match=r"items\.parquet"):
        shardkeep.load(tmp_path / "small")
    kept = (run / "catalogue.arrow").rename(run / "kept")
    try:
        with pytest.raises(CheckpointError, match=r"catalogue\.arrow: the items of the model cannot be read"):
            shardkeep.load(run)
    finally:
        kept.rename(run / "catalogue.arrow")


def test_runs_are_compared_on_rows_with_the_same_targets_only(
    run: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkeep.analysis.differences.RESAMPLES", (20, 20))
    pq.write_table(rows(120, 5), tmp_path / "other.parquet")
    own, same, other = (
        evaluation_rows(run, files=each).scores()
        for each in ((), [files / "eval.parquet"], [tmp_path / "other.parquet"])
    )
    assert {each.metric for _, each in differences([own, same], ["a", "b"])} >= {"recall@10", "mrr"}
    with pytest.raises(UserError, match=r"^a and b have other evaluation rows \(120 and 120 rows, or other targets\)"):
        list(differences([own, other], ["a", "b"]))


def test_predict_needs_the_number_of_items(program: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--top is missing; two_tower finds items"):
        predict_files(program, [program.parent / "users.parquet"], tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


# ---- served ----


ROWS, MOST = 3, 20
FRAME = frame_of(Takes(TOWERS, 300), ROWS)
COLUMNS = {"age": FRAME["age"].astype(np.float64), "user": FRAME["user"]}


@pytest.fixture(scope="module")
def finder() -> Predictor:
    return Predictor(untrained("two_tower"))


@pytest.fixture(scope="module")
def server(finder: Predictor) -> Iterator[Server]:
    with Server(ServedModel(finder, most_top=MOST), name="m") as server:
        yield server


@every(
    ("parameters", "top", "why"),
    [
        ({}, 10, ""),
        ({"top": 1}, 1, ""),
        ({"top": MOST}, MOST, ""),
        ({"top": 0}, 0, "parameter top: 0; allowed: 1 to 20 (the items, and --most-top)"),
        ({"top": 21}, 0, "parameter top: 21; allowed: 1 to 20 (the items, and --most-top)"),
        ({"top": "x"}, 0, "parameter top: 'x'; allowed: a whole number"),
        ({"top": True}, 0, "parameter top: True; allowed: a whole number"),
    ],
)
def test_a_request_gets_the_items_that_the_predictor_finds(
    server: Server, finder: Predictor, parameters: dict[str, Any], top: int, why: str
) -> None:
    inputs = [
        {"name": "age", "datatype": "FP64", "shape": [ROWS], "data": COLUMNS["age"].tolist()},
        {"name": "user", "datatype": "INT64", "shape": [ROWS], "data": COLUMNS["user"].tolist()},
    ]
    status, reply = server.post(inputs, parameters=parameters)
    if why:
        assert (status, reply["error"]) == (400, why)
        return
    items, scores = reply["outputs"]
    expected = finder.top(FRAME, top)
    assert status == 200 and items["shape"] == scores["shape"] == [ROWS, top]
    assert items["data"] == [*chain.from_iterable(expected["items"])]
    assert np.allclose(scores["data"], [*chain.from_iterable(expected["scores"])], atol=1e-6)


def test_grpc_takes_the_parameter_and_requests_of_one_batch_get_as_many_as_each_asks_for(
    server: Server, finder: Predictor
) -> None:
    request = raw_request(COLUMNS, model="m")
    request.parameters["top"].int64_param = 4
    reply = server.infer(request)
    assert [output.name for output in reply.outputs] == ["items", "scores"]
    items = unpack("items", "INT64", reply.raw_output_contents[0], ROWS * 4)
    assert np.array(items).reshape(ROWS, 4).tolist() == finder.top(FRAME, 4)["items"]
    columns = [*COLUMNS.values()]
    few, many = Loaded.of(finder, most_top=MOST).answers([Rows(ROWS, columns, 2), Rows(ROWS, columns, 5)])
    assert few.places_BK.shape == (ROWS, 2) and many.places_BK.shape == (ROWS, 5)
    assert few.places_BK.tolist() == many.places_BK[:, :2].tolist()


def test_a_row_that_has_fewer_items_ends_with_none() -> None:
    samples = Takes(NEXT, 300)
    predictor = Predictor(untrained("sasrec", samples, eval={"exclude_seen": True}))
    seen = samples.gather(np.array([np.argmax(samples.lengths)])).ids["seen_item"].values_N
    described = [
        {"name": "seen_item.values", "datatype": "INT64", "shape": [len(seen)], "data": seen.tolist()},
        {"name": "seen_item.lengths", "datatype": "INT32", "shape": [1], "data": [len(seen)]},
    ]
    with Server(ServedModel(predictor), name="m") as server:
        status, reply = server.post(described, parameters={"top": 40})
    items, scores = (output["data"] for output in reply["outputs"])
    missing = len({*seen.tolist()})
    assert status == 200 and items[-missing:] == [-1] * missing and not {*items} & {*seen.tolist()}
    assert scores[-missing:] == [float(np.finfo(np.float32).min)] * missing
