"""Asks a server by tritonclient: triton_probe.py GRPC HTTP MODEL < JSON.

stdin: columns by name, texts or numbers, and several values as {"values": ..., "lengths": ...}. Prints the scores of
each form as JSON. Imports nothing of shardkeep.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as over_grpc  # type: ignore[import-not-found]
import tritonclient.http as over_http  # type: ignore[import-not-found]
from tritonclient.utils import InferenceServerException  # type: ignore[import-not-found]


def tensors(columns: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, values in columns.items():
        if isinstance(values, dict):
            found[f"{name}.values"] = np.array([text.encode() for text in values["values"]], np.object_)
            found[f"{name}.lengths"] = np.array(values["lengths"], np.int32)
        elif isinstance(values[0], str):
            found[name] = np.array([text.encode() for text in values], np.object_)
        else:
            found[name] = np.array(values, np.float64 if isinstance(values[0], float) else np.int64)
    return found


def datatype(values: Any) -> str:
    return {"O": "BYTES", "f": "FP64", "i": "INT64" if values.dtype.itemsize == 8 else "INT32"}[values.dtype.kind]


def inputs(kind: Any, columns: dict[str, Any], *, column: bool, **options: bool) -> list[Any]:
    found = []
    for name, values in tensors(columns).items():
        shaped = values.reshape(-1, 1) if column else values
        made = kind.InferInput(name, list(shaped.shape), datatype(values))
        made.set_data_from_numpy(shaped, **options)
        found.append(made)
    return found


def main() -> None:
    grpc_address, http_address, model = sys.argv[1:]
    columns = json.load(sys.stdin)
    grpc = over_grpc.InferenceServerClient(grpc_address)
    http = over_http.InferenceServerClient(http_address, concurrency=2)
    scores: dict[str, Any] = {}
    for column in (False, True):
        found = grpc.infer(model, inputs(over_grpc, columns, column=column), request_id="g")
        scores[f"grpc {column}"] = found.as_numpy("score").tolist()
        for sent in (True, False):
            told = inputs(over_http, columns, column=column, binary_data=sent)
            scores[f"http {column} {sent}"] = http.infer(model, told).as_numpy("score").tolist()
            for wanted in (True, False):
                outputs = [over_http.InferRequestedOutput("score", binary_data=wanted)]
                found = http.infer(model, told, outputs=outputs, request_id="h")
                assert found.get_response()["id"] == "h"
                scores[f"http {column} {sent} {wanted}"] = found.as_numpy("score").tolist()
    outputs = [over_grpc.InferRequestedOutput("score")]
    waiting = http.async_infer(model, inputs(over_http, columns, column=False))
    scores["http async"] = waiting.get_result().as_numpy("score").tolist()
    scores["grpc output"] = (
        grpc.infer(model, inputs(over_grpc, columns, column=False), outputs=outputs).as_numpy("score").tolist()
    )
    facts = {}
    for name, client in (("grpc", grpc), ("http", http)):
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(model)
        assert not client.is_model_ready("other") if name == "http" else True
    metadata = grpc.get_model_metadata(model, as_json=True)
    facts["grpc inputs"] = [each["name"] for each in metadata["inputs"]]
    facts["http inputs"] = [each["name"] for each in http.get_model_metadata(model)["inputs"]]
    facts["version"] = http.get_server_metadata()["version"]
    assert grpc.get_server_metadata(as_json=True)["version"] == facts["version"]
    facts["errors"] = []
    for kind, client in ((over_grpc, grpc), (over_http, http)):
        try:
            client.infer(model, inputs(kind, columns, column=False)[:-1])
        except InferenceServerException as error:
            facts["errors"].append(error.message())
    print(json.dumps({"scores": scores, "facts": facts}))


if __name__ == "__main__":
    main()
