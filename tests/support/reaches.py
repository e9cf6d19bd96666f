"""What a test file takes that is not for it: underscore names of our code, and helpers of other test modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

OURS = ("shardkeep", "tests")
_BY_TEXT = ("getattr", "setattr", "delattr", "hasattr", "object", "attrgetter", "methodcaller")
"""Functions and methods that take the name of an attribute as text: `monkeypatch.setattr`, `mock.patch.object`."""
_PATH = re.compile(r"(?:shardkeep|tests)(?:[.:]\w+)+")
"""A name of ours as text: `monkeypatch.setattr("shardkeep.ps.client.x")`, `mock.patch`, `module:function`."""
_END = re.compile(r"(?:[.:]\w+)+")
"""The end of such a name, as in f"{MODULE}.x"."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_names(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Underscore names of other objects, of modules and classes of ours, by attribute, import or text, also as a
    whole path. Those of other packages are not ours to mend, and `self` and `cls` are the test's own."""
    foreign = _foreign_names(nodes)
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if _root(node) not in foreign and not (
                isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            ):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            yield from (name.name for name in node.names if is_private(name.name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _PATH.fullmatch(node.value):
            yield from (part for part in re.split("[.:]", node.value) if is_private(part))
        elif isinstance(node, ast.JoinedStr):
            ends = [a.value for a in node.values if isinstance(a, ast.Constant) and _END.fullmatch(str(a.value))]
            yield from (part for end in ends for part in re.split("[.:]", str(end)) if is_private(part))
        elif isinstance(node, ast.Call) and _last(node.func) == "multiple":
            yield from (word.arg for word in node.keywords if word.arg is not None and is_private(word.arg))
        elif isinstance(node, ast.Call) and _last(node.func) in _BY_TEXT:
            values = [*node.args, *(word.value for word in node.keywords)]
            texts = [a.value for a in values[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from (text for text in texts if is_private(text) and _root(values[0]) not in foreign)


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


def _last(node: ast.AST) -> str:
    """The last name of a chain of attributes; empty where it ends with anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
