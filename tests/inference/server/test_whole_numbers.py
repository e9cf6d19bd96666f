"""Whole numbers of a request: each datatype's limits come as they were sent."""

from __future__ import annotations

import json

import numpy as np

from shardkeep.inference.protocol import grpc_form, json_form
from shardkeep.inference.protocol.datatypes import NUMBERS
from shardkeep.proto import inference_pb2 as pb
from tests.support.cases import every

WHOLE = [name for name, dtype in NUMBERS.items() if dtype.kind in "iu"]


@every("datatype", WHOLE)
def test_the_limits_beside_0_are_no_other_numbers(datatype: str) -> None:
    limits = np.iinfo(NUMBERS[datatype])
    sent = [0, int(limits.max), int(limits.max) - 1, int(limits.min)]
    request = pb.ModelInferRequest(model_name="m")
    described = request.inputs.add(name="x", datatype=datatype, shape=[len(sent)])
    width = "64" if datatype.endswith("64") else ""
    field = f"{'u' * datatype.startswith('U')}int{width}_contents"
    getattr(described.contents, field).extend(sent)
    by_grpc = grpc_form.RequestReader().read(request.SerializeToString())
    body = {"inputs": [{"name": "x", "datatype": datatype, "shape": [len(sent)], "data": sent}]}
    by_json = json_form.RequestReader().read(json.dumps(body).encode(), None, model="m", version="")
    for (values,) in (by_grpc.values, by_json.values):
        assert isinstance(values, np.ndarray) and values.tolist() == sent
