"""The HTTP form: JSON, with the values of tensors in it or, by the binary data extension, as bytes behind it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardkeep.inference.protocol.datatypes import BYTES, LENGTH_BYTES, NUMBERS, Values, pack, unpack
from shardkeep.inference.protocol.status import invalid
from shardkeep.inference.protocol.tensors import (
    MOST_DIMENSIONS,
    Description,
    Heading,
    InferReply,
    InferRequest,
    ModelMetadata,
    RequestedOutput,
    ServerMetadata,
    TensorMetadata,
)

HEADER_LENGTH = "Inference-Header-Content-Length"
"""The HTTP header with the length of the JSON, where bytes are behind it."""
_MOST_HEADS = 512
_MOST_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an input is behind the JSON. `prefix`: the length in front of a single text. `dtype`: of numbers that fill
    the place."""

    start: int
    end: int
    prefix: bytes | None
    dtype: np.dtype[Any] | None


@dataclass(frozen=True, slots=True)
class _Head:
    """The JSON of a request. `sizes`: bytes of each input behind it; None = values are in `told`."""

    heading: Heading
    sizes: tuple[int | None, ...]
    told: Sequence[Mapping[str, Any]]
    outputs: tuple[RequestedOutput, ...]
    binary: bool
    id: str
    places: tuple[_Place, ...] | None
    """Of the inputs, where all are behind the JSON."""


class RequestReader:
    """Reads infer requests. A client whose texts keep their lengths sends the same JSON in front of its bytes again and
    again, so a few are kept. One thread."""

    def __init__(self) -> None:
        self._heads: dict[bytes, _Head] = {}

    def read(self, body: bytes, header_length: str | None, *, model: str, version: str) -> InferRequest:
        """A request.

        Args:
            header_length: The value of that HTTP header; None = the body is JSON alone.

        Raises Refusal for a body that is no request."""
        size = len(body) if header_length is None else _length(header_length, len(body))
        text = body[:size]
        head = self._heads.get(text)
        if head is None:
            head = _read_head(text)
            if len(text) <= _MOST_HEAD_BYTES and None not in head.sizes:
                if len(self._heads) >= _MOST_HEADS:
                    self._heads.clear()
                self._heads[text] = head
        if head.places and size + head.places[-1].end == len(body):
            values = _unpacked(head.heading.inputs, head.places, body, size)
        else:
            values = self._one_by_one(head, body, size)
        return InferRequest(model, version, head.heading, values, head.id, head.outputs, head.binary, len(body))

    def _one_by_one(self, head: _Head, body: bytes, at: int) -> list[Values]:
        """The values of any head. Raises Refusal where they are not in the JSON and not behind it."""
        values = list[Values]()
        for told, each, described in zip(head.told, head.sizes, head.heading.inputs, strict=True):
            if each is None:
                values.append(_from_json(described, told.get("data")))
                continue
            end = at + each
            if end > len(body):
                raise invalid(f"input {described.name}: binary_data_size {each}; {len(body) - at} bytes are left")
            values.append(unpack(described.name, described.datatype, body[at:end], described.count))
            at = end
        if at != len(body):
            raise invalid(f"{len(body) - at} bytes behind the JSON belong to no input; see binary_data_size")
        return values


def _unpacked(inputs: Sequence[Description], places: Sequence[_Place], body: bytes, at: int) -> list[Values]:
    """The values behind the JSON, which ends at `at`. Raises Refusal."""
    values = list[Values]()
    for described, place in zip(inputs, places, strict=True):
        start = at + place.start
        if place.dtype is not None:
            values.append(np.frombuffer(body, place.dtype, described.count, start))
        elif place.prefix is not None and body.startswith(place.prefix, start):
            values.append([body[start + len(place.prefix) : at + place.end]])
        else:
            raw = body[start : at + place.end]
            values.append(unpack(described.name, described.datatype, raw, described.count))
    return values


def _places(inputs: Sequence[Description], sizes: Sequence[int | None]) -> tuple[_Place, ...] | None:
    places, at = list[_Place](), 0
    for each, size in zip(inputs, sizes, strict=True):
        if size is None:
            return None
        dtype = NUMBERS.get(each.datatype)
        fits = dtype is not None and size == each.count * dtype.itemsize > 0
        single = each.datatype == BYTES and each.count == 1 and LENGTH_BYTES <= size < 1 << 32
        prefix = (size - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little") if single else None
        places.append(_Place(at, at + size, prefix, dtype if fits else None))
        at += size
    return tuple(places)


def _read_head(text: bytes) -> _Head:
    head = _object("the body", _parsed(text))
    inputs = [_object("an input", each) for each in _list("inputs", head.get("inputs"))]
    described = tuple(map(_described, inputs))
    sizes = tuple(_size(each, told) for each, told in zip(described, inputs, strict=True))
    outputs = tuple(_output(_object("an output", each)) for each in _list("outputs", head.get("outputs", [])))
    binary = _flag("binary_data_output", _parameters("the request", head).get("binary_data_output", False))
    number = head.get("id", "")
    if not isinstance(number, str):
        raise invalid(f"id: {_shown(number)}; allowed: a text")
    places = _places(described, sizes)
    return _Head(Heading(described), sizes, inputs, outputs, bool(binary), number, places)


def write_reply(reply: InferReply, request: InferRequest) -> tuple[bytes, int | None]:
    """The body, and the length of its JSON where bytes are behind it."""
    chosen = {output.name: output.binary for output in request.outputs}
    outputs, behind = [], list[bytes]()
    for output in reply.outputs:
        told: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
        binary = chosen.get(output.name)
        if request.raw if binary is None else binary:
            behind.append(pack(output.values))
            told["parameters"] = {"binary_data_size": len(behind[-1])}
        else:
            told["data"] = _listed(output.values)
        outputs.append(told)
    head: dict[str, Any] = {"model_name": reply.model, "model_version": reply.version, "outputs": outputs}
    if reply.id:
        head["id"] = reply.id
    text = json.dumps(head).encode()
    return (b"".join([text, *behind]), len(text)) if behind else (text, None)


def write_error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()


def write_server(server: ServerMetadata) -> bytes:
    told = {"name": server.name, "version": server.version, "extensions": list(server.extensions)}
    return json.dumps(told).encode()


def write_model(model: ModelMetadata) -> bytes:
    def tensors(found: Sequence[TensorMetadata]) -> list[dict[str, Any]]:
        return [{"name": each.name, "datatype": each.datatype, "shape": list(each.shape)} for each in found]

    told = {"name": model.name, "versions": [model.version], "platform": model.platform}
    return json.dumps(told | {"inputs": tensors(model.inputs), "outputs": tensors(model.outputs)}).encode()


def _parsed(text: bytes) -> Any:
    if not text.strip():
        raise invalid("the body is empty; allowed: a JSON object")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deep
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise invalid(f"the body is no JSON: {why}") from error


def _described(told: Mapping[str, Any]) -> Description:
    name, datatype, shape = told.get("name"), told.get("datatype"), told.get("shape")
    if not isinstance(name, str) or not isinstance(datatype, str):
        raise invalid(f"an input has the name {_shown(name)} and datatype {_shown(datatype)}; allowed: texts")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise invalid(f"input {name}: shape {_shown(shape)}; allowed: [N] or [N, 1]")
    return Description.of(name, datatype, shape)


def _size(described: Description, told: Mapping[str, Any]) -> int | None:
    """The bytes behind the JSON that are the input's values; None = they are in the JSON."""
    name, parameters = described.name, told.get("parameters")
    if parameters is None:
        return None
    if "shared_memory_region" in _object("parameters of an input", parameters):
        raise invalid(f"input {name}: is in shared memory; allowed: values in the request")
    size = parameters.get("binary_data_size")
    if size is None:
        return None
    if "data" in told:
        raise invalid(f"input {name}: has data and binary_data_size; allowed: one of them")
    if type(size) is not int or size < 0:
        raise invalid(f"input {name}: binary_data_size {_shown(size)}; allowed: a number of bytes")
    return size


def _from_json(told: Description, data: Any) -> Values:
    """Elements as numbers, texts or truth values; null = missing."""
    flat = _flat(told.name, data)
    if len(flat) != told.count:
        raise invalid(f"input {told.name}: data has {len(flat)} elements; expected: {told.count}")
    if told.datatype == BYTES:
        if not all(each is None or isinstance(each, str) for each in flat):
            raise invalid(f"input {told.name}: data of BYTES; allowed: texts, or null for a missing one")
        return [b"" if each is None else each.encode("utf-8", "surrogatepass") for each in flat]
    dtype = NUMBERS[told.datatype]
    allowed = {"b": (bool,), "f": (int, float)}.get(dtype.kind, (int,))
    if dtype.kind == "f":
        flat = [np.nan if each is None else each for each in flat]
    if wrong := [each for each in flat if type(each) not in allowed]:
        kinds = " or ".join(kind.__name__ for kind in allowed)
        raise invalid(f"input {told.name}: {_shown(wrong[0])} in data of {told.datatype}; allowed: {kinds}")
    try:
        with np.errstate(over="ignore"):
            return np.array(flat, dtype)
    except OverflowError as error:
        raise invalid(f"input {told.name}: holds a number that {told.datatype} does not") from error


def _flat(name: str, data: Any) -> list[Any]:
    """The elements of lists in lists, row-major."""
    if not isinstance(data, list):
        raise invalid(f"input {name}: data is {_shown(data)}; allowed: a list, or binary_data_size in parameters")
    flat: list[Any] = data
    for _ in range(MOST_DIMENSIONS):
        if not any(isinstance(each, list) for each in flat):
            return flat
        flat = [element for each in flat for element in (each if isinstance(each, list) else [each])]
    raise invalid(f"input {name}: data is nested too deep")


def _output(told: Mapping[str, Any]) -> RequestedOutput:
    name = told.get("name")
    if not isinstance(name, str):
        raise invalid(f"an output has the name {_shown(name)}; allowed: a text")
    parameters = _parameters(f"output {name}", told)
    for other in ("classification", "shared_memory_region"):
        if other in parameters:
            raise invalid(f"output {name}: {other} is not supported; allowed: the values")
    return RequestedOutput(name, _flag(f"output {name}: binary_data", parameters.get("binary_data")))


def _length(text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) <= most):
        raise invalid(f"{HEADER_LENGTH}: {_shown(text)}; the body has {most} bytes")
    return int(text)


def _parameters(what: str, told: Mapping[str, Any]) -> Mapping[str, Any]:
    return _object(f"parameters of {what}", told.get("parameters", {}))


def _object(what: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise invalid(f"{what}: {_shown(value)}; allowed: a JSON object")
    return value


def _list(what: str, value: Any) -> list[Any]:
    if value is None:
        raise invalid(f"{what}: is missing; allowed: a JSON list")
    if not isinstance(value, list):
        raise invalid(f"{what}: {_shown(value)}; allowed: a JSON list")
    return value


def _flag(what: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{what}: {_shown(value)}; allowed: true or false")
    return value


def _listed(values: Values) -> list[Any]:
    if isinstance(values, list):
        return [text.decode("utf-8", "replace") for text in values]
    numbers: list[Any] = values.tolist()
    return numbers


def _shown(value: Any) -> str:
    text = {list: "a list", dict: "an object", type(None): "null"}.get(type(value)) or repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
