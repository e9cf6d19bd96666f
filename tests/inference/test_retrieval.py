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
from shardkeep.base.errors import CheckpointError, UserError
from shardkeep.inference.export.manifest import read_manifest
from shardkeep.inference.export.writing import Formats, export_run
from shardkeep.inference.predictor import Predictor
from shardkeep.inference.protocol.datatypes import unpack
from shardkeep.inference.scoring import BestItems, evaluate_run, evaluation_rows, predict_files
from shardkeep.inference.server.served_model import Loaded, ServedModel
from shardkeep.inference.server.signature import Rows
from shardkeep.inference.trained import Trained
from shardkeep.proto import inference_pb2 as pb
from shardkeep.workers.data.schema import Schema
from tests.support.cases import every
from tests.support.retrieval_models import NEXT, TOWERS, Takes, frame_of, untrained
from tests.support.serving import Server

TOP = 5
SCHEMAS = {"two_tower": TOWERS, "sasrec": NEXT}
MODELS: dict[str, tuple[Schema, dict[str, Any]]] = {
    "two_tower": (TOWERS, {}),
    "sasrec": (NEXT, {}),
    "hstu": (NEXT, {"model": {"name": "hstu", "layers": 1, "heads": 2}}),
}


def scores_of(trained: Trained, samples: Takes, count: int) -> np.ndarray:
    """Of all items, by the vectors."""
    assert trained.sides is not None
    users = np.concatenate(
        [trained.logits(trained.sides.users_of(samples.gather(np.array([n])))) for n in range(count)]
    )
    return users @ trained.finder.index.vectors_ME.T


@every("name", SCHEMAS)
def test_the_best_items_of_users_are_those_of_all_scores(name: str) -> None:
    """A custom index receives the vectors of users, from their columns alone."""
    schema = SCHEMAS[name]
    samples = Takes(schema, 300)
    trained = untrained(schema, samples=samples)
    predictor, frame = Predictor(trained), frame_of(samples, schema, 40)
    assert predictor.columns == (["age", "user"] if schema is TOWERS else ["seen_item"])
    assert predictor.outputs == ("items", "scores")
    found, scores = predictor.top(frame, 7), scores_of(trained, samples, 40)
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
    schema, settings = MODELS[name]
    for seed in range(4):  # the first one alone has equal bits by chance
        samples = Takes(schema, 300, seed=seed)
        trained = untrained(schema, samples=samples, **settings)
        order = np.random.default_rng(seed).permutation(100)
        tops = []
        for rows in (np.arange(100), order):
            batch = trained.sides.users_of(samples.gather(rows))
            tops.append(trained.finder.top(trained.logits(batch), batch, 9))
        assert tops[0].scores_BK[order].tobytes() == tops[1].scores_BK.tobytes()
        assert tops[0].places_BK[order].tolist() == tops[1].places_BK.tolist()


def test_what_a_sample_has_seen_is_not_found_where_the_evaluation_excludes_it() -> None:
    samples = Takes(NEXT, 300)
    trained = untrained(NEXT, samples=samples, eval={"exclude_seen": True})
    items = len(trained.finder.index)
    found = Predictor(trained).top(frame_of(samples, NEXT, 40), items)["items"]
    seen = frame_of(samples, NEXT, 40)["seen_item"].to_pylist()
    assert all(not {*row} & {*known} for row, known in zip(found, seen, strict=True))
    assert [len(row) for row in found] == [items - len({*known}) for known in seen]


@every("k", [0, 41])
def test_a_number_of_items_that_there_are_not_is_refused(k: int) -> None:
    with pytest.raises(UserError, match=rf"k: {k}: the catalogue has 40 items; allowed: 1 to 40"):
        Predictor(untrained()).top(frame_of(Takes(TOWERS, 9), TOWERS, 3), k)


def test_a_model_that_finds_items_scores_no_rows() -> None:
    with pytest.raises(UserError, match=r"two_tower finds items; allowed: top\(data, k\)"):
        Predictor(untrained()).predict(frame_of(Takes(TOWERS, 9), TOWERS, 3))


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


def test_runs_are_compared_on_rows_with_the_same_targets_only(
    run: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkeep.analysis.differences.RESAMPLES", (20, 20))
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


@every(
    ("best", "why"),
    [
        (None, "--top is missing; two_tower finds items"),
        (BestItems(4000), r"--top 4000: the catalogue has \d+ items; allowed: 1 to \d+"),
    ],
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


# ---- served ----


ROWS, MOST = 3, 20
FRAME = frame_of(Takes(TOWERS, 300), TOWERS, ROWS)


@pytest.fixture(scope="module")
def finder() -> Predictor:
    return Predictor(untrained())


@pytest.fixture(scope="module")
def server(finder: Predictor) -> Iterator[Server]:
    with Server(ServedModel(finder, most_top=MOST), name="m") as server:
        yield server


def inputs() -> list[dict[str, Any]]:
    return [
        {"name": "age", "datatype": "FP64", "shape": [ROWS], "data": FRAME["age"].astype(float).tolist()},
        {"name": "user", "datatype": "INT64", "shape": [ROWS], "data": FRAME["user"].tolist()},
    ]


@every("top", [None, 1, MOST])
def test_a_request_gets_the_items_that_the_predictor_finds(server: Server, finder: Predictor, top: int | None) -> None:
    status, reply = server.post(inputs(), **({} if top is None else {"parameters": {"top": top}}))
    items, scores = reply["outputs"]
    expected = finder.top(FRAME, top or 10)
    assert status == 200 and items["shape"] == scores["shape"] == [ROWS, top or 10]
    assert items["data"] == [*chain.from_iterable(expected["items"])]
    assert np.allclose(scores["data"], [*chain.from_iterable(expected["scores"])], atol=1e-6)


def test_grpc_takes_the_parameter_too(server: Server, finder: Predictor) -> None:
    request = pb.ModelInferRequest(model_name="m")
    request.parameters["top"].int64_param = 4
    for name, datatype, kind in (("age", "FP64", np.float64), ("user", "INT64", np.int64)):
        request.inputs.add(name=name, datatype=datatype, shape=[ROWS])
        request.raw_input_contents.append(FRAME[name].astype(kind).tobytes())
    reply = server.infer(request)
    assert [output.name for output in reply.outputs] == ["items", "scores"]
    found = unpack("items", "INT64", reply.raw_output_contents[0], ROWS * 4)
    assert np.array(found).reshape(ROWS, 4).tolist() == finder.top(FRAME, 4)["items"]


@every(
    ("top", "why"),
    [
        (0, "parameter top: 0; allowed: 1 to 20 (the items, and --most-top)"),
        (21, "parameter top: 21; allowed: 1 to 20 (the items, and --most-top)"),
        ("x", "parameter top: 'x'; allowed: a whole number"),
        (True, "parameter top: True; allowed: a whole number"),
    ],
)
def test_a_number_of_items_that_is_not_allowed_is_refused(server: Server, top: Any, why: str) -> None:
    status, reply = server.post(inputs(), parameters={"top": top})
    assert (status, reply["error"]) == (400, why)


def test_requests_of_one_batch_get_as_many_items_as_each_asks_for(finder: Predictor) -> None:
    loaded = Loaded.of(finder, most_top=MOST)
    columns = [FRAME["age"].astype(np.float64), FRAME["user"]]
    few, many = loaded.answers([Rows(ROWS, columns, 2), Rows(ROWS, columns, 5)])
    assert few.places_BK.shape == (ROWS, 2) and many.places_BK.shape == (ROWS, 5)
    assert few.places_BK.tolist() == many.places_BK[:, :2].tolist()


def test_a_row_that_has_fewer_items_ends_with_none() -> None:
    samples = Takes(NEXT, 300)
    predictor = Predictor(untrained(NEXT, samples=samples, eval={"exclude_seen": True}))
    row = int(np.argmax(samples.lengths))
    seen = samples.gather(np.array([row])).ids["seen_item"].values_N
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
