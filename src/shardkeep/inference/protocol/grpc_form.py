"""The gRPC form: protobuf messages to requests, replies to protobuf messages. No type of protobuf leaves this file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from shardkeep.inference.protocol.datatypes import BYTES, NUMBERS, Values, pack, unpack
from shardkeep.inference.protocol.status import invalid
from shardkeep.inference.protocol.tensors import (
    MOST_HEADING_BYTES,
    MOST_HEADINGS,
    Description,
    Heading,
    InferReply,
    InferRequest,
    ModelMetadata,
    RequestedOutput,
    ServerMetadata,
)
from shardkeep.inference.recent import Recent
from shardkeep.proto import inference_pb2 as pb

SERVICE = "inference.GRPCInferenceService"
_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", BYTES: "bytes_contents",
}  # fmt: skip
"""Datatype -> its field of InferTensorContents; FP16 has none."""


class RequestReader:
    """Reads infer requests. A client sends the same descriptions again and again, so parsed ones are kept: a request
    of known descriptions costs one parse of its outer message. Any thread may call."""

    def __init__(self) -> None:
        self._headings = Recent(
            _heading, MOST_HEADINGS, lambda parts, found: not found[1] and sum(map(len, parts)) <= MOST_HEADING_BYTES
        )

    def read(self, message: bytes) -> InferRequest:
        """Raises Refusal for bytes that are no request, or one whose inputs do not fit their descriptions."""
        try:
            packed = pb.PackedInferRequest.FromString(message)
        except DecodeError as error:
            raise invalid(f"the {len(message)} bytes are no ModelInferRequest") from error
        raw = packed.raw_input_contents
        parts = tuple(packed.inputs)
        outputs = tuple(map(_output, packed.outputs)) if packed.outputs else ()
        heading, typed = self._headings[parts]
        if typed:
            if len(raw):
                raise invalid("inputs have contents and the request has raw_input_contents; allowed: one of them")
            values = [_contents(told, part) for told, part in zip(heading.inputs, parts, strict=True)]
        else:
            if len(raw) != len(heading.inputs):
                raise invalid(f"{len(heading.inputs)} inputs and {len(raw)} raw_input_contents; allowed: as many")
            values = [
                unpack(told.name, told.datatype, each, told.count)
                for told, each in zip(heading.inputs, raw, strict=True)
            ]
        name, version, top = packed.model_name, packed.model_version, _top(packed.parameters)
        return InferRequest(name, version, heading, values, packed.id, outputs, not typed, len(message), top)


def _top(parameters: Any) -> int | None:
    """The parameter `top`. Raises Refusal where it is no whole number."""
    if "top" not in parameters:
        return None
    kind = parameters["top"].WhichOneof("parameter_choice")
    if kind not in ("int64_param", "uint64_param"):
        raise invalid(f"parameter top: is {kind or 'empty'}; allowed: int64_param")
    return int(getattr(parameters["top"], kind))


def write_reply(reply: InferReply, *, raw: bool) -> bytes:
    """The message of a reply. `raw`: outputs are raw bytes, else contents."""
    message = pb.ModelInferResponse(model_name=reply.model, model_version=reply.version, id=reply.id)
    for output in reply.outputs:
        made = message.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        if raw:
            message.raw_output_contents.append(pack(output.values))
        else:
            values = output.values if isinstance(output.values, list) else output.values.tolist()
            getattr(made.contents, _CONTENTS[output.datatype]).extend(values)
    return message.SerializeToString()


def read_model(message: bytes, *, metadata: bool) -> tuple[str, str]:
    """Name and version in a ModelMetadataRequest, or else a ModelReadyRequest. Raises Refusal."""
    kind = pb.ModelMetadataRequest if metadata else pb.ModelReadyRequest
    request = _parsed(kind, message, "message")
    return request.name, request.version


def write_state(state: bool) -> bytes:
    """The reply of ServerLive, ServerReady and ModelReady: one truth value, with the same number in all three."""
    return pb.ServerReadyResponse(ready=state).SerializeToString()


def write_server(server: ServerMetadata) -> bytes:
    message = pb.ServerMetadataResponse(name=server.name, version=server.version)
    return message.SerializeToString()


def write_model(model: ModelMetadata) -> bytes:
    message = pb.ModelMetadataResponse(name=model.name, versions=[model.version], platform=model.platform)
    for field, tensors in ((message.inputs, model.inputs), (message.outputs, model.outputs)):
        for tensor in tensors:
            field.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    return message.SerializeToString()


def _parsed(kind: Any, message: bytes, what: str) -> Any:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise invalid(f"the {len(message)} bytes are no {what} of the protocol") from error


def _heading(parts: tuple[bytes, ...]) -> tuple[Heading, bool]:
    """The descriptions, and whether the inputs have contents of their own."""
    inputs = [_parsed(pb.ModelInferRequest.InferInputTensor, part, "input") for part in parts]
    for each in inputs:
        if "shared_memory_region" in each.parameters:
            raise invalid(f"input {each.name}: is in shared memory; allowed: values in the request")
    heading = Heading(tuple(Description.of(each.name, each.datatype, each.shape) for each in inputs))
    return heading, any(each.HasField("contents") for each in inputs)


def _output(part: bytes) -> RequestedOutput:
    output = _parsed(pb.ModelInferRequest.InferRequestedOutputTensor, part, "requested output")
    for name in ("classification", "shared_memory_region"):
        if name in output.parameters:
            raise invalid(f"output {output.name}: {name} is not supported; allowed: the values")
    return RequestedOutput(output.name)


def _contents(told: Description, part: bytes) -> Values:
    """The values that an input carries itself."""
    contents = pb.ModelInferRequest.InferInputTensor.FromString(part).contents
    field = _CONTENTS.get(told.datatype)
    if field is None:
        raise invalid(f"input {told.name}: {told.datatype} has no contents; allowed: raw_input_contents")
    other = [found.name for found, _ in contents.ListFields() if found.name != field]
    values: Sequence[Any] = getattr(contents, field)
    if other or len(values) != told.count:
        held = other[0] if other else f"{len(values)} {field}"
        raise invalid(f"input {told.name}: has {held}; expected: {told.count} {field}")
    if told.datatype == BYTES:
        return list(values)
    found = np.array(values, np.uint64 if field == "uint64_contents" else None)  # by itself numpy may take float64
    dtype = NUMBERS[told.datatype]
    if dtype.kind in "iu" and found.size:
        limits = np.iinfo(dtype)
        if found.min() < limits.min or found.max() > limits.max:
            raise invalid(f"input {told.name}: holds a number that {told.datatype} does not")
    return found.astype(dtype)
