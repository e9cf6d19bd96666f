"""`shardkeep bench`: runs the scripts of benchmarks/, each in its own process. Measures nothing itself."""

from __future__ import annotations

import ast
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from shardkeep.base.errors import UserError

FOLDER = (Path(__file__).parents[1] / "benchmarks").resolve()


@dataclass(frozen=True)
class Benchmark:
    """One script."""

    name: str
    path: Path
    question: str
    """The first line of its docstring."""
    options: frozenset[str]
    """The common options that it accepts."""


@dataclass(frozen=True)
class Ended:
    """How one script ended."""

    benchmark: Benchmark
    code: int
    seconds: float
    json: Path | None
    """The file it wrote; None = no file."""


CLEAN_UP_S = 30.0
"""Seconds a script gets after Ctrl-C to end its processes."""
COMMON = ("--smoke", "--rounds", "--seconds", "--json", "--device")
"""The options that `harness.arguments` adds. A script with its own parser may call the JSON file --out."""


def benchmarks(folder: Path = FOLDER) -> dict[str, Benchmark]:
    """Every script with a `main`, by name. Imports none of them."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            # A script gets all options from harness.arguments, or some from its own parser.
            options = (
                COMMON if "harness.arguments(" in source else [o for o in (*COMMON, "--out") if f'"{o}"' in source]
            )
            found[path.stem] = Benchmark(
                path.stem, path, (ast.get_docstring(tree) or "").partition("\n")[0], frozenset(options)
            )
    return found


def chosen(names: Sequence[str], folder: Path = FOLDER) -> list[Benchmark]:
    """The benchmarks with these names; all of them for an empty list. Raises UserError."""
    known = benchmarks(folder)
    for name in names:
        if name not in known:
            raise UserError(f"bench {name}: is not a benchmark; the benchmarks are {', '.join(known)}")
    return [known[name] for name in names] or list(known.values())


def run(benchmark: Benchmark, *, options: Mapping[str, str | None], out: Path) -> Ended:
    """Runs a script in this terminal. The script prints its result and writes OUT/NAME.json.

    Args:
        benchmark: The script.
        options: Common options and their values; None for a flag. Options that the script lacks are left out.
        out: A folder, created if missing.

    Raises:
        UserError: The folder cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror or error})") from error
    target = out.absolute() / f"{benchmark.name}.json"
    before = target.stat().st_mtime_ns if target.exists() else None
    given = {**options, "--json": str(target), "--out": str(target)}
    taken = [(name, value) for name, value in given.items() if name in benchmark.options]
    arguments = [part for name, value in taken for part in ((name,) if value is None else (name, value))]
    began = time.monotonic()
    code = _wait(subprocess.Popen([sys.executable, str(benchmark.path), *arguments], env=_environment()))
    written = target.exists() and target.stat().st_mtime_ns != before
    return Ended(benchmark, code, time.monotonic() - began, target if written else None)


def bench_all(benchmarks: Sequence[Benchmark], *, options: Mapping[str, str], smoke: bool, out: Path | None) -> int:
    """Runs benchmarks one after the other and reports how each ended; returns 1 if one failed, else 0."""
    folder = out or Path("runs") / f"bench-{datetime.now():%Y%m%d-%H%M%S}"
    given = {**options, **({"--smoke": None} if smoke else {})}
    ended = []
    for benchmark in benchmarks:
        print(f"== {benchmark.name}: {benchmark.question}", flush=True)
        ended.append(run(benchmark, options=given, out=folder))
    print("==")
    for each in ended:
        result = each.json or "nothing written"
        how = "done" if each.code == 0 else f"failed with exit code {each.code}"
        print(f"{each.benchmark.name}: {how} after {each.seconds:.0f} s; {result}", flush=True)
    return 1 if any(each.code for each in ended) else 0


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait()
    except KeyboardInterrupt:  # the script received the same Ctrl-C; killing it would leave its jobs behind
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CLEAN_UP_S)
        process.kill()
        raise


def _environment() -> dict[str, str]:
    """Puts this package first on the path, so that it is measured from any folder."""
    path = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in path if part), "PYTHONUNBUFFERED": "1"}
