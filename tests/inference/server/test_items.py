"""A served retrieval model answers with items and scores, as many as a request asks for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest

from shardkeep.inference.predictor import Predictor
from shardkeep.inference.protocol.datatypes import unpack
from shardkeep.inference.server.served_model import Loaded, ServedModel
from shardkeep.inference.server.signature import Rows
from shardkeep.proto import inference_pb2 as pb
from tests.support.retrieval_models import NEXT, TOWERS, Takes, frame_of, untrained
from tests.support.serving import Server

ROWS, MOST = 3, 20
FRAME = frame_of(Takes(TOWERS, 300), TOWERS, ROWS)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(untrained())


@pytest.fixture(scope="module")
def server(predictor: Predictor) -> Iterator[Server]:
    with Server(ServedModel(predictor, most_top=MOST), name="m") as server:
        yield server


def inputs() -> list[dict[str, Any]]:
    return [
        {"name": "age", "datatype": "FP64", "shape": [ROWS], "data": FRAME["age"].astype(float).tolist()},
        {"name": "user", "datatype": "INT64", "shape": [ROWS], "data": FRAME["user"].tolist()},
    ]


@pytest.mark.parametrize("top", [None, 1, MOST], ids=["10 by default", "one", "most"])
def test_a_request_gets_the_items_that_the_predictor_finds(
    server: Server, predictor: Predictor, top: int | None
) -> None:
    status, reply = server.post(inputs(), **({} if top is None else {"parameters": {"top": top}}))
    items, scores = reply["outputs"]
    expected = predictor.top(FRAME, top or 10)
    assert status == 200 and items["shape"] == scores["shape"] == [ROWS, top or 10]
    assert items["data"] == [*chain.from_iterable(expected["items"])]
    assert np.allclose(scores["data"], [*chain.from_iterable(expected["scores"])], atol=1e-6)


def test_grpc_takes_the_parameter_too(server: Server, predictor: Predictor) -> None:
    request = pb.ModelInferRequest(model_name="m")
    request.parameters["top"].int64_param = 4
    for name, datatype, kind in (("age", "FP64", np.float64), ("user", "INT64", np.int64)):
        request.inputs.add(name=name, datatype=datatype, shape=[ROWS])
        request.raw_input_contents.append(FRAME[name].astype(kind).tobytes())
    reply = server.infer(request)
    assert [output.name for output in reply.outputs] == ["items", "scores"]
    found = unpack("items", "INT64", reply.raw_output_contents[0], ROWS * 4)
    assert np.array(found).reshape(ROWS, 4).tolist() == predictor.top(FRAME, 4)["items"]


@pytest.mark.parametrize(
    ("top", "why"),
    [
        (0, "parameter top: 0; allowed: 1 to 20 (the items, and --most-top)"),
        (21, "parameter top: 21; allowed: 1 to 20 (the items, and --most-top)"),
        ("x", "parameter top: 'x'; allowed: a whole number"),
        (True, "parameter top: True; allowed: a whole number"),
    ],
    ids=["none", "more than allowed", "a text", "a truth value"],
)
def test_a_number_of_items_that_is_not_allowed_is_refused(server: Server, top: Any, why: str) -> None:
    status, reply = server.post(inputs(), parameters={"top": top})
    assert (status, reply["error"]) == (400, why)


def test_requests_of_one_batch_get_as_many_items_as_each_asks_for(predictor: Predictor) -> None:
    loaded = Loaded.of(predictor, most_top=MOST)
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
