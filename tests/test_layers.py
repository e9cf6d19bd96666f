"""The rooms and the direction of imports between them, as ARCHITECTURE.md draws them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("ps", "workers", "compression", "proto")
BELOW = {  # what a room may import besides itself
    "base": set(),
    "proto": {"base"},
    "compression": {"base"},
    "ps": {"base", "proto", "compression"},
    "workers": {"base", "compression", "ps"},
}
ONLY_IN = {  # a foreign module -> the only places that may import it
    "torch.distributed.rpc": ("ps/transport",),
    "google.protobuf": ("proto/", "ps/control/"),
    "grpc": ("proto/", "ps/control/"),
    "shardkeep.proto": ("proto/", "ps/control/"),
}


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module a file imports, wherever the import stands; `from a import b` gives a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{name.name}" for name in node.names)


def faults(path: str, source: str) -> list[str]:
    """What is wrong with the imports of the file at `path`, relative to the repository's root."""
    room = path.removeprefix("shardkeep/").split("/")[0]
    return [f"{path}: {fault}" for name in imported(ast.parse(source)) if (fault := _fault(path, room, name))]


def _fault(path: str, room: str, name: str) -> str | None:
    parts = name.split(".")
    if name.startswith("."):
        return f"relative import {name}"
    if parts[0] in ROOMS:
        return f"bare import of a room: {name}"
    for module, places in ONLY_IN.items():
        if room in BELOW and f"{name}.".startswith(f"{module}.") and not path.startswith(places):
            return f"{name} belongs to {' and '.join(places)}"
    if room in BELOW and parts[0] == "shardkeep" and len(parts) > 1 and parts[1] not in BELOW[room] | {room}:
        return f"{room} may not import {name}"
    return None


def sources() -> list[Path]:
    found = [p for top in ("shardkeep", *ROOMS, "tests", "examples", "benchmarks") for p in (ROOT / top).rglob("*.py")]
    return sorted({p.resolve() for p in found})


def test_every_import_goes_down_and_is_absolute() -> None:
    found = [
        fault
        for path in sources()
        for fault in faults(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ps/client.py", "import ps.message"),
        ("tests/ps/test_client.py", "from workers.step import Step"),
        ("ps/client.py", "from . import message"),
        ("ps/client.py", "from shardkeep.workers.step import Step"),
        ("ps/client.py", "from shardkeep import workers"),
        ("workers/step.py", "def f():\n    from shardkeep.config import JobConfig"),
        ("compression/topk.py", "from shardkeep.proto import control_pb2"),
        ("shardkeep/base/log.py", "from shardkeep.ps.message import pack"),
        ("workers/step.py", "from torch.distributed import rpc"),
        ("workers/step.py", "import grpc"),
    ],
    ids=lambda value: value.replace("\n", " ")[:40],
)
def test_a_wrong_import_is_found(path: str, source: str) -> None:
    assert faults(path, source)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_a_relative_link_in_the_package(room: str) -> None:
    link = ROOT / "shardkeep" / room
    assert link.is_symlink(), f"shardkeep/{room} is missing or no link; it must point to ../{room}"
    assert link.readlink() == Path("..") / room


@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_what_the_command_line_runs_is_linked_into_the_package(folder: str) -> None:
    assert (ROOT / "shardkeep" / folder).readlink() == Path("..") / folder


def test_rooms_have_no_init_files_and_folders_of_tests_have_one() -> None:
    stray = [str(p.relative_to(ROOT)) for room in ROOMS for p in (ROOT / room).rglob("__init__.py")]
    assert not stray, f"{stray}: in Python 3.14 `compression` is in the standard library; delete them"
    folders = {p.parent for p in (ROOT / "tests").rglob("*.py")}
    assert not [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()]
