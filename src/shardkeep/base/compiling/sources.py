"""The sources of kernels: the modules in the package, the other modules that each one imports, and their fingerprints.

Reads sources and imports nothing, so that a launcher needs neither numba nor the kernels to see what is compiled.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
_DECORATOR = "shardkeep.base.compiling.kernels"  # named like a module of kernels, and none
_IMPORT = re.compile(r"^(?:from ([\w.]+) )?import (\([^)]*\)|.*)", re.MULTILINE)
"""A regular expression, because parsing all sources takes 0.1 s of each start."""
_FUNCTION = re.compile(r"^(?:@|def |class )", re.MULTILINE)
_NAME = re.compile(r"[\w.]+")


def kernel_sources() -> list[Path]:
    """Every file of kernels in the package, in a fixed order."""
    rooms = [entry for entry in PACKAGE.iterdir() if entry.is_dir()]  # links too: rglob does not follow them
    found = [path for room in rooms for pattern in ("kernels.py", "*_kernels.py") for path in room.rglob(pattern)]
    return sorted(set(found), key=lambda path: str(path.relative_to(PACKAGE)))


def kernel_modules() -> list[str]:
    """The import names of all modules of kernels."""
    names = [".".join(("shardkeep", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in kernel_sources()]
    return [name for name in names if name != _DECORATOR]


def with_imports(modules: Iterable[str]) -> list[str]:
    """The modules and all modules of kernels that they import, each once, after the modules that it imports."""
    found: dict[str, None] = {}
    for module in modules:
        found.update(dict.fromkeys((*with_imports(imports_of(module)), module)))
    return list(found)


@functools.cache
def imports_of(module: str) -> tuple[str, ...]:
    """The modules of kernels that a module of kernels imports at its top.

    Raises ModuleNotFoundError for a module that does not exist."""
    source = _source_of(module).read_text(encoding="utf-8")
    return tuple(dict.fromkeys(name for name in _imported_names(source) if _has_kernels(name)))


@functools.cache
def fingerprint(module: str) -> str:
    """64 bits of the source of a module of kernels and of the modules of kernels that it imports, all in hex.

    Machine code of a kernel contains the code of every kernel that it calls. So it is stale when any of these sources
    changes, and numba itself looks at one only. Raises ModuleNotFoundError for a module that does not exist."""
    digest = hashlib.sha256(_source_of(module).read_bytes())
    for name in sorted(imports_of(module)):
        digest.update(f" {name} {fingerprint(name)}".encode())
    return digest.hexdigest()[:16]


def source_size(module: str) -> int:
    """Bytes of the source of a module, a measure of the time that it takes to compile."""
    return _source_of(module).stat().st_size


def _source_of(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module of kernels named {module!r}", name=module)
    return Path(spec.origin)


def _imported_names(source: str) -> Iterator[str]:
    head = _FUNCTION.split(source, maxsplit=1)[0]  # all imports are there
    for package, names in _IMPORT.findall(head):
        yield package
        yield from (f"{package}.{name}".lstrip(".") for name in _NAME.findall(names))


def _has_kernels(name: str) -> bool:
    last = name.rpartition(".")[2]
    return name != _DECORATOR and (last == "kernels" or last.endswith("_kernels"))
