"""What a test file takes that is not for it: underscore names of our code, and helpers of other test modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

OURS = ("shardkeep", "tests")
_BY_TEXT = (
    "getattr",
    "setattr",
    "delattr",
    "hasattr",
    "monkeypatch.setattr",
    "monkeypatch.delattr",
    "mock.patch.object",
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_names(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Underscore names of other objects, of modules and classes of ours, by attribute, import or text. Those of other
    packages are not ours to mend, and `self` and `cls` are the test's own."""
    foreign = _foreign_names(nodes)
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if _root(node) not in foreign and not (
                isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            ):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            yield from (name.name for name in node.names if is_private(name.name))
        elif isinstance(node, ast.Call) and _dotted(node.func) in _BY_TEXT:
            texts = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from (text for text in texts if is_private(text) and _root(node.args[0]) not in foreign)


def imports_of_tests(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Modules below `tests` that are imported, `tests.support` apart."""
    for node in nodes:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
        yield from (n for n in names if n.startswith("tests.") and not f"{n}.".startswith("tests.support."))


def _foreign_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Names of this file that an import of another package binds."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {n.asname or n.name.split(".")[0] for n in node.names if n.name.split(".")[0] not in OURS}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in OURS:
            found |= {name.asname or name.name for name in node.names}
    return found


def _root(node: ast.AST) -> str:
    """The name that a chain of attributes, calls and indices begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _dotted(node: ast.AST) -> str:
    """A chain of attributes as it is written; empty where anything else is in it."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
