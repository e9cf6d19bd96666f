"""The HTTP form: JSON, with the values of tensors in it or, by the binary data extension, as bytes behind it."""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardkeep.inference.protocol.datatypes import BYTES, NUMBERS, Values, pack, unpack
from shardkeep.inference.protocol.status import Refusal, invalid
from shardkeep.inference.protocol.tensors import (
    MOST_DIMENSIONS,
    MOST_HEADING_BYTES,
    MOST_HEADINGS,
    Description,
    Heading,
    InferReply,
    InferRequest,
    ModelMetadata,
    RequestedOutput,
    ServerMetadata,
    TensorMetadata,
)
from shardkeep.inference.recent import Recent

HEADER_LENGTH = "Inference-Header-Content-Length"
"""The HTTP header with the length of the JSON, where bytes are behind it."""


@dataclass(frozen=True, slots=True)
class _Head:
    """The JSON of a request. `places`: of each input behind it, start and end; None = values are in `told`. `behind`:
    bytes."""

    heading: Heading
    places: tuple[tuple[int, int] | None, ...]
    behind: int
    told: Sequence[Mapping[str, Any]]
    outputs: tuple[RequestedOutput, ...]
    binary: bool
    id: str
    top: int | None

    @property
    def kept(self) -> bool:
        """Whether all values are behind it, so that it says the same of other requests."""
        return None not in self.places


class RequestReader:
    """Reads infer requests. A client whose texts keep their lengths sends the same JSON in front of its bytes again and
    again, so a few are kept. Any thread may read."""

    def __init__(self) -> None:
        for encoding in ("utf-8-sig", "utf-16-le", "utf-16-be", "utf-16", "utf-32-le", "utf-32-be", "utf-32"):
            codecs.lookup(encoding)  # imports what json.loads would import in a request
        self._heads = Recent(
            _read_head, MOST_HEADINGS, lambda text, head: len(text) <= MOST_HEADING_BYTES and head.kept
        )

    def read(self, body: bytes, header_length: str | None, *, model: str, version: str) -> InferRequest:
        """A request.

        Args:
            header_length: The value of that HTTP header; None = the body is JSON alone.

        Raises Refusal for a body that is no request."""
        size = len(body) if header_length is None else _length(header_length, len(body))
        head = self._heads[body[:size]]
        if head.behind != len(body) - size:
            raise _wrong_length(head, len(body) - size)
        values = _values(head, body, size)
        return InferRequest(
            model, version, head.heading, values, head.id, head.outputs, head.binary, len(body), head.top
        )


def _wrong_length(head: _Head, behind: int) -> Refusal:
    for described, place in zip(head.heading.inputs, head.places, strict=True):
        if place is not None and place[1] > behind:
            left = f"{behind - place[0]} bytes are left"
            return invalid(f"input {described.name}: binary_data_size {place[1] - place[0]}; {left}")
    return invalid(f"{behind - head.behind} bytes behind the JSON belong to no input; see binary_data_size")


def _values(head: _Head, body: bytes, at: int) -> list[Values]:
    """The values of all inputs. The JSON ends at `at`. Raises Refusal."""
    values = list[Values]()
    for described, place, told in zip(head.heading.inputs, head.places, head.told, strict=True):
        if place is None:
            values.append(_from_json(described, told.get("data")))
        else:
            raw = body[at + place[0] : at + place[1]]
            values.append(unpack(described.name, described.datatype, raw, described.count))
    return values


def _read_head(text: bytes) -> _Head:
    head = _object("the body", _parsed(text))
    inputs = [_object("an input", each) for each in _list("inputs", head.get("inputs"))]
    described = tuple(map(_described, inputs))
    sizes = [_size(each, told) for each, told in zip(described, inputs, strict=True)]
    ends = list(itertools.accumulate(size or 0 for size in sizes))
    places = tuple(None if size is None else (end - size, end) for size, end in zip(sizes, ends, strict=True))
    outputs = tuple(_output(_object("an output", each)) for each in _list("outputs", head.get("outputs", [])))
    parameters = _parameters("the request", head)
    binary, top = _flag("binary_data_output", parameters.get("binary_data_output", False)), parameters.get("top")
    if top is not None and type(top) is not int:
        raise invalid(f"parameter top: {_shown(top)}; allowed: a whole number")
    number = head.get("id", "")
    if not isinstance(number, str):
        raise invalid(f"id: {_shown(number)}; allowed: a text")
    return _Head(Heading(described), places, ends[-1] if ends else 0, inputs, outputs, bool(binary), number, top)


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
    if not isinstance(value, list):
        raise invalid(f"{what}: {'is missing' if value is None else _shown(value)}; allowed: a JSON list")
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
