"""The shape of the library: lines by room, crowded folders, long files and functions, wide classes."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("ps", "workers", "compression", "src/shardkeep")
MOST_FILES, MOST_FILE_LINES, MOST_LINES, MOST_ARGUMENTS, MOST_FIELDS, MOST_METHODS = 15, 400, 40, 8, 12, 15
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Shape:
    """What is large in these sources, by path. Functions and classes are named `path name`; kernels are left out."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        lines = {path: len(text.splitlines()) for path, text in sources.items()}
        self.lines = {room: sum(n for path, n in lines.items() if path.startswith(f"{room}/")) for room in ROOMS}
        files = Counter(path.rpartition("/")[0] for path in sources)
        self.crowded_folders = {folder: n for folder, n in files.items() if n > MOST_FILES}
        self.long_files = {path for path, n in lines.items() if n > MOST_FILE_LINES}
        self.long_functions: set[str] = set()
        self.long_signatures: set[str] = set()
        self.wide_classes: set[str] = set()
        for path, text in sources.items():
            for node in _statements(ast.parse(text)):
                if isinstance(node, Function):
                    self._look_at_function(path, node)
                elif isinstance(node, ast.ClassDef):
                    self._look_at_class(path, node)

    def _look_at_function(self, path: str, node: Function) -> None:
        if any("kernel" in ast.unparse(decorator) for decorator in node.decorator_list):
            return
        given = [*node.args.args, *node.args.kwonlyargs]
        own = bool(node.args.args) and node.args.args[0].arg in ("self", "cls")
        if len(given) - own > MOST_ARGUMENTS:
            self.long_signatures.add(f"{path} {node.name}")
        if (node.end_lineno or 0) - node.lineno >= MOST_LINES:
            self.long_functions.add(f"{path} {node.name}")

    def _look_at_class(self, path: str, node: ast.ClassDef) -> None:
        methods = sum(isinstance(each, Function) for each in node.body)
        if len(_fields(node)) > MOST_FIELDS or methods > MOST_METHODS:
            self.wide_classes.add(f"{path} {node.name}")


@cache
def library() -> Shape:
    """The library's, without generated files. A room is linked into the package, and counted once."""
    sources = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            inside = path.relative_to(ROOT)
            linked = any((ROOT / above).is_symlink() for above in inside.parents)
            if "_pb2" not in path.name and not linked:
                sources[inside.as_posix()] = path.read_text(encoding="utf-8")
    return Shape(sources)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, part, ()):
            if isinstance(each, ast.stmt):
                yield each
            yield from _statements(each)


def _fields(node: ast.ClassDef) -> set[str]:
    """The names that are declared in the class or assigned to `self`."""
    declared = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
    found = {target.id for target in declared if isinstance(target, ast.Name)}
    for each in _statements(node):
        targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self":
                    found.add(one.attr)
    return found
