"""The rooms and the direction of imports between them, as ARCHITECTURE.md draws them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.cases import every

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


ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("ps", "workers", "compression", "proto")
BELOW = {  # what a room may import besides itself
    "base": set(),
    "proto": {"base"},
    "compression": {"base"},
    "ps": {"base", "proto", "compression", "trust", "records"},
    "workers": {"base", "compression", "ps", "records"},
}
ONLY_IN = {  # a foreign module -> the only places that may import it
    "torch.distributed.rpc": ("ps/rpc/",),
    "google.protobuf": ("proto/", "ps/control/", "src/shardkeep/inference/protocol/"),
    "grpc": ("proto/", "ps/control/", "src/shardkeep/inference/server/"),
    "shardkeep.proto": ("proto/", "ps/control/", "src/shardkeep/inference/protocol/"),
    "starlette": ("src/shardkeep/inference/server/", "src/shardkeep/page/", "src/shardkeep/web/"),
    "uvicorn": ("src/shardkeep/web/",),
    "uvloop": ("src/shardkeep/inference/server/",),
    "ray": ("src/shardkeep/engines/",),
    "prometheus_client": ("src/shardkeep/inference/server/", "src/shardkeep/metrics/"),
}


PACKAGE = "src/shardkeep/"
LIBRARY = (PACKAGE, *(f"{room}/" for room in ROOMS))
FOLDERS = (  # of the package, lowest first
    "base/config", "base/logs", "base/net", "base/machine", "base/plugging", "base/compiling", "base",
    "trust", "records", "proto",
    "compression/ids", "compression/values", "compression/selection", "compression", "compression/tower",
    "ps/server/table/optimizers", "ps/server/table/initializers", "ps/server/table/policies",
    "ps", "ps/wire", "ps/transport", "ps/rpc", "ps/control", "ps/control/grpc",
    "ps/server/journal", "ps/server/table/optimizers/kernels", "ps/server/table", "ps/checkpoints",
    "ps/server/snapshot", "ps/server", "ps/client",
    "workers/collectives", "workers/timing", "workers/metrics",
    "workers/data", "workers/data/columns", "workers/data/conversion", "workers/data/fitting", "workers/data/store",
    "workers/data/sources/synthetic", "workers/data/sources", "workers/embeddings",
    "workers/retrieval", "workers/dense", "workers/models/layers", "workers/models/encoders",
    "workers/models/tasks", "workers/models/retrieval", "workers/models",
    "workers/checkpoint",
    "workers/reporting", "workers/evaluation",
    "workers",
    "config", "",
    "row_files", "run", "run/origin", "assembly", "view", "web", "metrics", "page", "page/warnings", "member", "roles",
    "launch/processes", "launch/stopping", "launch",
    "loop", "nn", "torchrec", "callbacks", "testing",
    "inference/export", "inference", "inference/protocol", "inference/server",
    "tables", "estimate", "analysis", "automl", "experiments",
    "engines", "cli",
)  # fmt: skip
"""A module imports from folders that stand before its own, from its own, and from folders above or below its own. "" is
`shardkeep/` itself."""
TOPMOST = ("__init__.py", "__main__.py")
"""Modules of `shardkeep/` that import from any folder."""


def imported(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Every module a file imports, wherever the import stands; `from a import b` gives a and a.b."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{name.name}" for name in node.names)


def imported_at_runtime(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """As `imported`, without the imports that only type checkers read."""
    of_types = {
        id(below)
        for node in nodes
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for below in ast.walk(statement)
    }
    return imported([node for node in nodes if id(node) not in of_types])


def faults(path: str, names: Iterable[str]) -> list[str]:
    """What is wrong with the imports of the file at `path`, relative to the repository's root."""
    room = path.removeprefix(PACKAGE).split("/")[0]
    return [f"{path}: {fault}" for name in names if (fault := _fault(path, room, name))]


def _fault(path: str, room: str, name: str) -> str | None:
    parts = name.split(".")
    if name.startswith("."):
        return f"relative import {name}"
    if parts[0] in ROOMS:
        return f"bare import of a room: {name}"
    for module, places in ONLY_IN.items():
        if path.startswith(LIBRARY) and f"{name}.".startswith(f"{module}.") and not path.startswith(places):
            return f"{name} belongs to {' and '.join(places)}"
    if room in BELOW and parts[0] == "shardkeep" and len(parts) > 1 and parts[1] not in BELOW[room] | {room}:
        return f"{room} may not import {name}"
    return None


def folder_of(path: str) -> str:
    """The folder of a file of the library, below the package."""
    return path.removeprefix(PACKAGE).rpartition("/")[0]


def imports_between_files(names: Mapping[str, Mapping[str, set[str]]], kind: str = "imports") -> dict[str, set[str]]:
    """For every file of the library, the files of the library that it imports."""
    library = [path for path in names if path.startswith(LIBRARY)]
    modules = {
        f"shardkeep.{path.removeprefix(PACKAGE).removesuffix('.py').replace('/', '.')}": path for path in library
    }
    return {path: {modules[name] for name in names[path][kind] if name in modules} - {path} for path in library}


def upward(path: str, others: Iterable[str]) -> list[str]:
    """The imports of a file from folders that stand after its own."""
    folder = folder_of(path)
    allowed = {*FOLDERS[: FOLDERS.index(folder) + 1]}
    return [
        f"{path} imports {other}"
        for other in sorted(others)
        if (there := folder_of(other)) not in allowed
        and not f"{there}/".startswith(f"{folder}/")
        and not f"{folder}/".startswith(f"{there}/")
    ]


def cycle_in(graph: Mapping[str, set[str]]) -> list[str]:
    """The files of import cycles, and those between two cycles; empty if there is none."""
    left = {path: set(others) for path, others in graph.items()}
    while True:
        imported_ones = set().union(*left.values())
        free = {path for path, others in left.items() if not others or path not in imported_ones}
        if not free:
            return sorted(left)
        left = {path: others - free for path, others in left.items() if path not in free}


def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


OF_TESTS: dict[str, Callable[[Sequence[ast.AST]], Iterator[str]]] = {
    "underscore names": private_names,
    "helpers of other tests": imports_of_tests,
}


@functools.cache
def names_in_files() -> Mapping[str, Mapping[str, set[str]]]:
    """Names by kind, by file; every file is parsed once."""
    found = [p for top in (PACKAGE, *ROOMS, "tests", "examples", "benchmarks") for p in (ROOT / top).rglob("*.py")]
    names = {}
    for path in sorted({p.resolve() for p in found}):
        nodes = nodes_of(path.read_text(encoding="utf-8"))
        file = path.relative_to(ROOT).as_posix()
        kinds = {"imports": imported, "runtime imports": imported_at_runtime} | (
            OF_TESTS if file.startswith("tests/") else {}
        )
        names[file] = {kind: set(take(nodes)) for kind, take in kinds.items()}
    return names


def test_every_import_goes_down_and_is_absolute() -> None:
    found = [fault for path, names in names_in_files().items() for fault in faults(path, sorted(names["imports"]))]
    assert not found, "\n".join(found)


def test_every_folder_of_the_library_has_its_place_in_the_order() -> None:
    folders = {folder_of(path) for path in imports_between_files(names_in_files())}
    assert folders - set(FOLDERS) == set(), "add them to FOLDERS, after all that they import"
    assert set(FOLDERS) - folders == set(), "gone; take them off FOLDERS"


def test_no_module_imports_from_a_higher_folder() -> None:
    graph = imports_between_files(names_in_files())
    found = [
        fault for path, others in graph.items() if Path(path).name not in TOPMOST for fault in upward(path, others)
    ]
    assert not found, "\n".join(found)


def test_no_modules_import_each_other() -> None:
    assert not cycle_in(imports_between_files(names_in_files(), "runtime imports"))


def test_an_upward_import_and_a_cycle_are_found() -> None:
    assert upward(
        "src/shardkeep/roles/worker.py", ["src/shardkeep/launch/job.py", "ps/wire/ids.py", "src/shardkeep/core_plan.py"]
    ) == ["src/shardkeep/roles/worker.py imports src/shardkeep/launch/job.py"]
    assert not upward("ps/wire/ids.py", ["ps/placement.py"]) and upward("ps/wire/ids.py", ["ps/rpc/group.py"])
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@every(
    ("path", "source"),
    [
        ("ps/client/row_client.py", "import ps.message"),
        ("tests/ps/client/test_client.py", "from workers.step import Step"),
        ("ps/client/row_client.py", "from . import message"),
        ("ps/client/row_client.py", "from shardkeep.workers.step import Step"),
        ("ps/client/row_client.py", "from shardkeep import workers"),
        ("workers/step.py", "def f():\n    from shardkeep.config import JobConfig"),
        ("compression/selection/pool.py", "from shardkeep.proto import control_pb2"),
        ("src/shardkeep/base/logs/log.py", "from shardkeep.ps.wire.message import pack"),
        ("workers/step.py", "from torch.distributed import rpc"),
        ("workers/step.py", "import grpc"),
        ("src/shardkeep/inference/scoring.py", "import grpc"),
        ("src/shardkeep/inference/server/http_front.py", "from google.protobuf import message"),
        ("src/shardkeep/launch/job.py", "import starlette.routing"),
    ],
    ids=lambda value: value.replace("\n", " ")[:40],
)
def test_a_wrong_import_is_found(path: str, source: str) -> None:
    assert faults(path, imported(nodes_of(source)))


@every("room", [*ROOMS, "examples"])
def test_a_room_is_a_relative_link_in_the_package(room: str) -> None:
    link = ROOT / PACKAGE / room
    assert link.is_symlink(), f"{PACKAGE}{room} is missing or no link; it must point to ../../{room}"
    assert link.readlink() == Path("../..") / room


def test_rooms_have_no_init_files_and_folders_of_tests_have_one() -> None:
    stray = [str(p.relative_to(ROOT)) for room in ROOMS for p in (ROOT / room).rglob("__init__.py")]
    assert not stray, f"{stray}: in Python 3.14 `compression` is in the standard library; delete them"
    folders = {p.parent for p in (ROOT / "tests").rglob("*.py")}
    assert not [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()]


@every(
    ("kind", "instead"),
    [
        ("underscore names", "test what a user of the class sees, or add what is missing to the class"),
        ("helpers of other tests", "a helper of several tests is in tests/support"),
    ],
    ids=["underscore names", "helpers of other tests"],
)
def test_tests_take_nothing_that_is_not_for_them(kind: str, instead: str) -> None:
    tests = {path: names for path, names in names_in_files().items() if path.startswith("tests/")}
    assert not {f"{path}: {name}" for path, names in tests.items() for name in names[kind]}, instead


@every(
    "source",
    [
        "client._window",
        "job.run()._window.add(3)",
        "from shardkeep.ps import client\nclient._WINDOW",
        "from shardkeep.ps.client.row_client import _window",
        "monkeypatch.setattr(client, '_window', 3)",
        "monkeypatch.setattr('shardkeep.ps.client.row_client._window', 3)",
        "monkeypatch.setattr('shardkeep.ps.client._window.size', 3)",
        "patch.setattr(target=client, name='_window', value=3)",
        "mock.patch('shardkeep.ps.client.row_client._window')",
        "patch.object(client, '_window')",
        "mock.patch.multiple('shardkeep.ps.client', _window=3)",
        "operator.attrgetter('_window')(client)",
        "Command(main='tests.support.role_probe:_window')",
        "Point(f'{CLIENT}._window')",
        "getattr(client, '_window')",
        "client._window = 3",
    ],
)
def test_an_underscore_name_is_found(source: str) -> None:
    assert {name.lower() for name in private_names(nodes_of(source))} == {"_window"}


@every(
    "source",
    [
        "import torch\ntorch._dynamo.reset()",
        "from torch.distributed import rpc as r\nr.api._x",
        "self._x",
        "a.__dict__",
        "monkeypatch.setattr('os._exit', 3)",
        "monkeypatch.setattr('shardkeep.base.files.os.fsync', 3)",
        "import os\nmonkeypatch.setattr(os, '_exit', 3)",
        "run('shardkeep.__main__', 'says shardkeep._window')",
    ],
)
def test_names_of_others_and_of_the_test_itself_are_no_reaches(source: str) -> None:
    assert not list(private_names(nodes_of(source)))


def test_an_import_of_a_test_module_is_found() -> None:
    source = "import tests.ps.test_a\nfrom tests.ps.test_b import c\nfrom tests.support.d import e\nimport testsuite"
    assert sorted(imports_of_tests(nodes_of(source))) == ["tests.ps.test_a", "tests.ps.test_b"]
