"""What fresh processes import and compile: `python -m tests.support.kernel_loads FOLDER CONFIGS COMMANDS ROLE...`.

Each role's module, job and command gets a process of its own, forked from this one, which has imported no kernel: for
roles torch and numba alone, for the others also PRELOADED.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardkeep.base.compiling.sources import kernel_modules

PRELOADED = (
    "torch._dynamo",
    "torch.export",
    "torch.testing",
    "numpy.ma",
    "pyarrow.parquet",
    "grpc",
    "rich.console",
    "shardkeep.cli.main",
    "shardkeep.config",
    "shardkeep.launch.train_job",
)


@dataclass(frozen=True)
class Loads:
    modules: list[str]
    """All that are imported."""
    kernels_too_early: list[str]
    """Compiled in a step, or loaded by a command before it looked which are compiled."""

    @property
    def kernels(self) -> list[str]:
        return [name for name in kernel_modules() if name in self.modules]

    def loaded(self, *suspects: str) -> list[str]:
        """Which of the suspects are imported; one that ends in . represents a package."""
        return [m for m in self.modules for s in suspects if m == s or (s[-1] == "." and m.startswith(s))]


def read(folder: Path, name: str, errors: str) -> Loads:
    """What the process `name` wrote. `errors`: shown if it wrote nothing."""
    path = folder / f"{name}.json"
    assert path.exists(), f"{name} wrote nothing\n{errors[-4000:]}"
    return Loads(**json.loads(path.read_text(encoding="utf-8")))


def load_role(role: str) -> list[str]:
    """Imports the module of a role; nothing is compiled in steps, because there are none."""
    importlib.import_module(f"shardkeep.roles.{role}")
    return []


def run_job(text: str, folder: Path) -> list[str]:
    """Trains in this process; the kernels that were compiled after the job's own had been loaded."""
    from numba.core import event

    from shardkeep.assembly.kernel_needs import needed_kernels
    from shardkeep.base.compiling.kernels import load_kernels
    from shardkeep.config import parse_config
    from shardkeep.roles.in_process import run_in_process

    compiled: list[str] = []

    class Compiled(event.Listener):
        def on_start(self, found: Any) -> None:
            compiled.append(str(found.data["dispatcher"]))

        def on_end(self, found: Any) -> None:
            pass

    class Sink:
        def progress(self, record: dict[str, Any]) -> None:
            pass

        def event(self, record: dict[str, Any]) -> None:
            pass

        def telemetry(self, record: dict[str, Any]) -> None:
            pass

    config = parse_config(text)
    load_kernels(needed_kernels(config, "server", "worker"))
    with event.install_listener("numba:compile", Compiled()):  # type: ignore[no-untyped-call]
        run_in_process(config, Sink(), folder=folder)
    return compiled


def run_command(arguments: list[str]) -> list[str]:
    """Runs a command of `shardkeep`. Returns the modules of kernels that it imports before it looks whether they are
    compiled, which is when it can say that it compiles them."""
    from shardkeep.cli.main import app

    kernels, early, looked = set(kernel_modules()), list[str](), set[str]()

    def watch(event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and str(given[0]).endswith("/compiled.json"):
            looked.add(Path(given[0]).parent.name.rpartition("-")[0])
        elif event == "import" and given[0] in kernels - looked:
            early.append(given[0])

    sys.addaudithook(watch)
    with contextlib.suppress(SystemExit):
        app(arguments)
    return early


def in_fork(path: Path, act: Callable[[], list[str]]) -> None:
    """Runs `act` in a fork, which writes `path`; waits for it."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    try:
        compiled = act()
        path.write_text(json.dumps(asdict(Loads(list(sys.modules), compiled))), encoding="utf-8")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def main() -> None:
    import torch  # noqa: F401
    from numba.core.registry import cpu_target

    folder, jobs, commands = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    for role in sys.argv[4:]:
        in_fork(folder / f"{role}.json", lambda role=role: load_role(role))  # type: ignore[misc]
    for name in PRELOADED:
        importlib.import_module(name)
    cpu_target.typing_context.refresh()  # as the first kernel does: 1 CPU s a process
    cpu_target.target_context.refresh()
    assert not sys.modules.keys() & set(kernel_modules()), "a kernel is loaded before any process looks"
    for name, arguments in commands.items():
        in_fork(folder / f"{name}.json", lambda arguments=arguments: run_command(arguments))  # type: ignore[misc]
    for name, text in jobs.items():
        (folder / name).mkdir()
        in_fork(folder / f"{name}.json", lambda text=text, name=name: run_job(text, folder / name))  # type: ignore[misc]


if __name__ == "__main__":
    main()
