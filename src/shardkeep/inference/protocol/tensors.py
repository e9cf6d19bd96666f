"""Tensors: a request and a reply as plain values, the same for gRPC and HTTP."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardkeep.inference.protocol.datatypes import BYTES, NUMBERS, Values
from shardkeep.inference.protocol.status import invalid

MOST_DIMENSIONS = 8
MOST_ELEMENTS = 2**31 - 1
MOST_HEADINGS, MOST_HEADING_BYTES = 512, 1 << 16
"""What a memory of headings holds, and how long the largest of them is."""


@dataclass(frozen=True, slots=True)
class Description:
    """Name, datatype and shape of an input."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    count: int
    """Elements."""

    @classmethod
    def of(cls, name: str, datatype: str, shape: Sequence[int]) -> Description:
        """Raises Refusal: no such datatype, or no shape."""
        sizes = tuple(shape)
        if datatype != BYTES and datatype not in NUMBERS:
            raise invalid(f"input {name}: datatype {datatype!r}; allowed: {BYTES}, {', '.join(NUMBERS)}")
        if not 0 < len(sizes) <= MOST_DIMENSIONS or min(sizes) < 0:
            raise invalid(f"input {name}: shape {list(sizes)[:20]}; allowed: [N] or [N, 1]")
        count = math.prod(sizes)
        if count > MOST_ELEMENTS:
            raise invalid(f"input {name}: shape {list(sizes)} is of {count} elements; allowed: {MOST_ELEMENTS}")
        return cls(name, datatype, sizes, count)


@dataclass(frozen=True)
class Heading:
    """The descriptions of a request's inputs. Requests of the same client may share one."""

    inputs: tuple[Description, ...]

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.inputs)

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """`binary`: over HTTP, whether its values are bytes behind the JSON; None = as the request says for all."""

    name: str
    binary: bool | None = None


@dataclass(frozen=True, slots=True)
class InferRequest:
    """Inputs by name, their values in the order of the heading."""

    model: str
    version: str
    heading: Heading
    values: Sequence[Values]
    id: str = ""
    outputs: tuple[RequestedOutput, ...] = ()
    """Empty = all."""
    raw: bool = True
    """Whether outputs are raw bytes, as inputs were (gRPC); whether outputs are binary by default (HTTP)."""
    size: int = 0
    """Bytes of the message."""
    top: int | None = None
    """The parameter `top`: how many items are asked for; None = it is missing."""


@dataclass(frozen=True, slots=True)
class Output:
    """`values`: as of the datatype's numpy type."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Values


@dataclass(frozen=True, slots=True)
class InferReply:
    model: str
    version: str
    outputs: tuple[Output, ...]
    id: str = ""


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """-1 in a shape = any number."""

    name: str
    datatype: str
    shape: tuple[int, ...] = (-1,)


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    name: str
    version: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    platform: str = "shardkeep"


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    version: str
    name: str = "shardkeep"
    extensions: tuple[str, ...] = field(default=("binary_tensor_data",))
