"""The user's own code, `module:name`: the folders that are searched for it, last of all, and its import.

Last, because a file `random.py` beside a config must not hide Python's own, in any process; and only where nobody
else could have put a file there.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from shardkeep.base.errors import ConfigError
from shardkeep.base.machine.owners import check_unshared, why_distrusted


def search_last(folder: Path) -> None:
    """Puts a folder of the user's modules at the end of the import path, once. Raises ConfigError where others could
    change the folder or a module in it."""
    if str(folder) in sys.path:
        return
    check_unshared(folder, what="folder of your modules")
    for module in folder.glob("*.py"):
        if (why := why_distrusted(module)) is not None:
            raise ConfigError(f"folder of your modules {folder}: {why}; chmod go-w {module}")
    sys.path.append(str(folder))


def load_named(name: str, *, setting: str, folder: Path | None = None) -> Any:
    """What `module:name` names; modules stay loaded.

    Args:
        name: As the config has it.
        setting: Whose value it is, as `model.name`.
        folder: Searched after the import path; it stays at the path's end if the module is there.

    Raises:
        ConfigError: There is no such module or name, importing it fails, or another module of its name comes first.
    """
    module_name, _, attribute = name.partition(":")
    top = module_name.partition(".")[0]
    folder = None if folder is None else folder.resolve()
    try:
        if top not in sys.modules and folder is not None and importlib.util.find_spec(top) is None:
            search_last(folder)
        if top != "shardkeep":  # an example of ours
            _check_not_hidden(top, [*sys.path, *([str(folder)] if folder is not None else [])])
        module = importlib.import_module(module_name)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {name} cannot be loaded: {error}") from error
    except Exception as error:
        where = f" (looked in {folder} last)" if folder is not None else ""
        why = f"{type(error).__name__}: {error}"
        if where and isinstance(error, ModuleNotFoundError) and error.name == top:
            why += f"; put {top}.py there, or set data.root to its folder"
        raise ConfigError(f"{setting}: module {module_name!r} cannot be imported{where}: {why}") from error
    if not hasattr(module, attribute):
        own = "; roles do not see a script's own classes: move it to a file" if module_name == "__main__" else ""
        raise ConfigError(f"{setting}: module {module_name!r} has no {attribute!r}{own}")
    return getattr(module, attribute)


def check_found(names: Iterable[str], folders: Iterable[Path | str | None]) -> None:
    """Raises ConfigError for a `module:name` whose module is neither on the import path nor in a folder. Imports
    nothing, so that a launcher can call it before its processes start."""
    searched = list(dict.fromkeys(str(Path(each).resolve()) for each in folders if each))
    for name in names:
        top = name.partition(":")[0].partition(".")[0]
        if top in sys.modules or importlib.util.find_spec(top) or PathFinder.find_spec(top, searched):
            continue
        places = " or in ".join(["on the import path", *searched])
        raise ConfigError(f"{name}: there is no module {top!r} {places}; set data.root to the folder of {top}.py")


def _check_not_hidden(top: str, path: list[str]) -> None:
    """Raises ConfigError where a file of the user's would be meant but another module of its name is found."""
    loaded = sys.modules.get(top)
    spec = importlib.util.find_spec(top) if loaded is None else loaded.__spec__
    if spec is None or top == __name__.partition(".")[0]:  # an example of ours
        return
    for folder in path:
        own = None if is_installed(folder) else PathFinder.find_spec(top, [folder])
        if own is not None and own.has_location and _origin(own) != _origin(spec):
            found = "Python's own module" if top in sys.stdlib_module_names else f"the module {spec.origin}"
            raise ConfigError(f"{found} comes before {own.origin}, which has the same name; rename your file")


def is_installed(folder: str) -> bool:
    """Whether it is a folder of this installation of Python."""
    place = Path(folder).resolve()
    return any(place.is_relative_to(Path(prefix).resolve()) for prefix in (sys.prefix, sys.base_prefix))


def _origin(spec: ModuleSpec) -> Path | None:
    return None if spec.origin is None else Path(spec.origin).resolve()
