"""Signature: which tensors a model takes and returns, and a request's tensors as its columns."""

# N = rows of a request, V = values of a column that has several in a row

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardkeep.base.arrays import Floats, Ints
from shardkeep.inference.columns import InputColumn, input_columns
from shardkeep.inference.protocol.datatypes import BYTES, Values
from shardkeep.inference.protocol.status import invalid
from shardkeep.inference.protocol.tensors import (
    MOST_HEADINGS,
    Description,
    Heading,
    InferRequest,
    Output,
    RequestedOutput,
    TensorMetadata,
)
from shardkeep.inference.recent import Recent
from shardkeep.inference.server.item_names import ItemNames
from shardkeep.workers.data.fitting.inputs import Inputs
from shardkeep.workers.retrieval.ranking import Best

VALUES, LENGTHS = ".values", ".lengths"
"""Ends of the names of two tensors that are one column of several values a row."""


@dataclass(frozen=True, slots=True)
class Jagged:
    """Several values in a row: all values, row after row, and how many each row has."""

    values_V: Values
    lengths_N: Ints


Column = Values | Jagged
Answer = Floats | Best
"""Of the rows of a request: scores (N, T), or of a retrieval model the best items (N, K)."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a request: its columns in the order of the signature."""

    count: int
    columns: Sequence[Column]
    top: int = 0
    """The items that each row is to have, of a retrieval model."""
    absent: frozenset[str] = frozenset()
    """The columns that the request lacks: missing values, and empty in `columns`."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where each column is among a request's inputs: values, and lengths or -1; and the width of vectors or 0. Values
    of -1 = it is one of `absent`."""

    count: int
    places: tuple[tuple[int, int, int], ...]
    absent: frozenset[str]


class Signature:
    """The tensors of a model. Any thread may call: plans are kept by single steps of a dict.

    Args:
        items: Of a retrieval model.
    """

    def __init__(self, inputs: Inputs, outputs: Sequence[str], items: ItemNames | None = None) -> None:
        self._fills = inputs.fills
        self._described = {column.name: column for column in input_columns(inputs)}
        self.columns = tuple(self._described)
        self.inputs = tuple(tensor for column in self._described.values() for tensor in _tensors_of(column))
        self._items = items
        kinds = {} if items is None else {"items": items.datatype}
        shape = (-1,) if items is None else (-1, -1)
        self.outputs = tuple(TensorMetadata(name, kinds.get(name, "FP32"), shape) for name in outputs)
        self._output_index = {name: t for t, name in enumerate(outputs)}
        self._plans = Recent(self._plan, MOST_HEADINGS)

    def same(self, other: Signature) -> bool:
        """Whether a request for one is a request for the other."""
        return self.inputs == other.inputs and self.outputs == other.outputs

    def rows(self, request: InferRequest) -> Rows:
        """The request's columns. Raises Refusal: one is missing, unknown, or not of the request's rows."""
        plan = self._plans[request.heading]
        columns: list[Column] = []
        values = request.values
        for at, lengths_at, width in plan.places:
            if width:
                columns.append(Jagged(values[at], np.full(plan.count, width)))
            elif lengths_at < 0:
                columns.append(values[at] if at >= 0 else [])
            else:
                name = request.heading.inputs[lengths_at].name
                columns.append(Jagged(values[at], _lengths(name, values[lengths_at], len(values[at]))))
        return Rows(plan.count, columns, self._top(request.top), plan.absent)

    def _top(self, top: int | None) -> int:
        if self._items is not None:
            return self._items.checked(top)
        if top is not None:
            raise invalid(f"parameter top: {top}; the model scores rows and finds no items")
        return 0

    def check_outputs(self, outputs: Sequence[RequestedOutput]) -> None:
        """Raises Refusal for an output that the model does not have, or that is requested twice: a small request could
        ask for a reply of any size."""
        if len({output.name for output in outputs}) < len(outputs):
            raise invalid(f"output {_shown(_twice([output.name for output in outputs]))}: is requested twice")
        for output in outputs:
            if output.name not in self._output_index:
                raise invalid(f"output {_shown(output.name)}: unknown; the model has {', '.join(self._output_index)}")

    def tensors(self, answer: Answer, outputs: Sequence[RequestedOutput]) -> tuple[Output, ...]:
        """The scores as tensors of shape [N], or items and scores of shape [N, K]: the requested ones, or all."""
        names = [output.name for output in outputs] or list(self._output_index)
        if isinstance(answer, Best):
            assert self._items is not None
            return tuple(self._items.tensor(name, answer) for name in names)
        return tuple(
            Output(name, "FP32", (len(answer),), np.ascontiguousarray(answer[:, self._output_index[name]]))
            for name in names
        )

    def _plan(self, heading: Heading) -> _Plan:
        inputs = heading.inputs
        index = {each.name: i for i, each in enumerate(inputs)}
        if len(index) != len(inputs):
            raise invalid(f"input {_shown(_twice([each.name for each in inputs]))}: is in the request twice")
        places, described = [], []
        for name, column in self._described.items():
            if name in index:
                at, width = index.pop(name), column.width
                places.append((at, -1, width if width and len(inputs[at].shape) == 2 else 0))
                described.append((inputs[at], width or 1))
            elif name + VALUES in index and name + LENGTHS in index and column.several:
                places.append((index.pop(name + VALUES), index.pop(name + LENGTHS), 0))
                described.append((inputs[places[-1][1]], 1))
            elif self._fills:
                places.append((-1, -1, 0))
            else:
                raise invalid(self._missing(name, index))
        if index:
            raise invalid(self._unknown(next(iter(index))))
        absent = frozenset(name for name, (at, *_) in zip(self.columns, places, strict=True) if at < 0)
        return _Plan(_rows_of(described), tuple(places), absent)

    def _missing(self, name: str, index: dict[str, int]) -> str:
        also = f", or {name}{VALUES} and {name}{LENGTHS}" if self._described[name].several else ""
        near = difflib.get_close_matches(name, [n for n in index if len(n) < 200][:1000], n=1, cutoff=0.6)
        hint = f"; {near[0]} is no input, did you mean {name}?" if near else ""
        return f"input {name}{also}: is missing{hint}"

    def _unknown(self, name: str) -> str:
        stem = next((name.removesuffix(end) for end in (VALUES, LENGTHS) if name.endswith(end)), name)
        if (column := self._described.get(stem)) is not None:
            why = "needs values and lengths, and not the column too" if column.several else "has one value a row"
            return f"input {name}: {stem} {why}"
        near = difflib.get_close_matches(name[:200], self.columns, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"input {_shown(name)}: unknown; {hint}the model reads {', '.join(self.columns[:30])}"


def _tensors_of(column: InputColumn) -> list[TensorMetadata]:
    """The tensors of a column in its usual form."""
    name, role = column.name, column.role
    if role == "dense":
        return [TensorMetadata(name, "FP64", (-1,) if column.width is None else (-1, column.width))]
    datatype = {"weights": "FP32", "numbers": "FP64"}.get(role, "INT64" if column.kind == "numbers" else BYTES)
    if not column.several:
        return [TensorMetadata(name, datatype)]
    if column.separator is not None:
        return [TensorMetadata(name, BYTES)]
    return [TensorMetadata(name + VALUES, datatype), TensorMetadata(name + LENGTHS, "INT32")]


def _twice(names: Sequence[str]) -> str:
    """The first name that is there more than once."""
    return next(name for name, times in Counter(names).items() if times > 1)


def _rows_of(inputs: Sequence[tuple[Description, int]]) -> int:
    """The number of rows that all inputs have; with each the number of values that its rows may have in a tensor."""
    if not inputs:
        raise invalid("the request has no inputs")
    first, _ = inputs[0]
    for each, width in inputs:
        if each.shape[1:] not in ((), (width,)):
            raise invalid(f"input {each.name}: shape {list(each.shape)}; allowed: [N] or [N, {width}]")
        if each.shape[0] != first.shape[0]:
            raise invalid(f"input {each.name}: has {each.shape[0]} rows, and {first.name} has {first.shape[0]}")
    return first.shape[0]


def _lengths(name: str, values: Values, total: int) -> Ints:
    if isinstance(values, list) or values.dtype.kind not in "iu":
        raise invalid(f"input {name}: lengths are whole numbers; allowed: INT32 or INT64")
    lengths_N = values.astype(np.int64)
    if lengths_N.size and (lengths_N.min() < 0 or lengths_N.max() > total):
        wrong = lengths_N.min() if lengths_N.min() < 0 else lengths_N.max()
        raise invalid(f"input {name}: a length is {wrong}; allowed: 0 to {total}")
    if int(lengths_N.sum()) != total:
        raise invalid(f"input {name}: lengths sum to {int(lengths_N.sum())}, and there are {total} values")
    return lengths_N


def _shown(text: str) -> str:
    return text if text.isprintable() and len(text) <= 60 else repr(text[:57]) + "..."
