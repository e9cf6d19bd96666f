"""The mutants of a tree: one operator or constant changed, in an order that a seed gives. For `scripts/mutate`."""

from __future__ import annotations

import ast
import hashlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOMS = ("ps/shard", "compression", "workers")
OPERATOR = re.compile(rb"(?<!\w)(is\s+not|not\s+in|is|in|and|or)(?!\w)|<<|>>|\*\*|//|[<>=!]=|[-+*/%&|^<>]")
SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
SWAPS |= {"in": "not in", "not in": "in", "and": "or", "or": "and", "not": "", "True": "False", "False": "True"}
SWAPS |= {"+": "-", "-": "+", "*": "//", "//": "*", "/": "*", "%": "*", "**": "*", "<<": ">>", ">>": "<<"}
SWAPS |= {"&": "|", "|": "&", "^": "|"}
LEFT_OUT = re.compile(r"(_?log(ger)?|logging|warnings)\.|(cast|TypeVar|Literal|Annotated|Callable)[(\[]")


class Mutant(NamedTuple):
    name: str  # file:line:column old -> new
    file: str
    line: int
    begin: int  # bytes
    end: int
    new: str


def nodes(node: ast.AST) -> Iterator[Any]:
    """This node and those below, without annotations, decorators, raised errors, texts, log lines and types."""
    if isinstance(node, (ast.Call, ast.Subscript)) and LEFT_OUT.match(ast.unparse(node)):
        return
    yield node
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            visible = isinstance(child, ast.AST) and not isinstance(child, (ast.Raise, ast.JoinedStr))
            if visible and field not in ("annotation", "returns", "decorator_list"):
                yield from nodes(child)


def spans(source: bytes, starts: list[int]) -> Iterator[tuple[int, int]]:
    """The first and last byte of each operator and constant."""
    for node in nodes(ast.parse(source)):
        parts: list[Any] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            yield starts[node.lineno - 1] + node.col_offset, starts[node.lineno - 1] + node.end_col_offset
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield starts[node.lineno - 1] + node.col_offset, starts[node.lineno - 1] + node.col_offset + 3
        elif isinstance(node, (ast.Compare, ast.BoolOp)):
            parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else node.values
        elif isinstance(node, ast.BinOp) and not re.search("['\"]", ast.unparse(node)):
            parts = [node.left, node.right]
        elif isinstance(node, ast.AugAssign):
            parts = [node.target, node.value]
        for left, right in itertools.pairwise(parts):
            begin, end = starts[left.end_lineno - 1] + left.end_col_offset, starts[right.lineno - 1] + right.col_offset
            if match := OPERATOR.search(source, begin, end):
                yield match.span()


def draw(tree: Path, seed: int) -> list[Mutant]:
    """All mutants. Their order depends on the seed, the file and the text of the line, and on no other line."""
    turns: dict[Mutant, str] = {}
    for path in (path for room in ROOMS for path in (tree / room).rglob("*.py")):
        source, file = path.read_bytes(), str(path.relative_to(tree))
        lines = source.splitlines(keepends=True)
        starts = [sum(map(len, lines[:i])) for i in range(len(lines))]
        for begin, end in spans(source, starts):
            old, line = b" ".join(source[begin:end].split()).decode(), source.count(b"\n", 0, begin) + 1
            new = SWAPS[old] if old in SWAPS else f"{ast.literal_eval(old) + 1}"
            place = f"{begin - starts[line - 1]} {old} -> {new or 'nothing'}"
            mutant = Mutant(f"{file}:{line}:{place}", file, line, begin, end, new)
            turns[mutant] = hashlib.sha256(f"{seed} {file} {lines[line - 1]!r} {place}".encode()).hexdigest()
    return sorted(turns, key=lambda mutant: turns[mutant])
