"""How long do kernels take to compile? The built-in job's and all, by one process and by two, and each module alone.

Seconds of CPU by module, and seconds and CPU seconds of a first start's kernels, always into an empty cache folder.
`--seconds` has no effect; `--smoke` compiles the built-in job's kernels once.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

import harness

ALONE, JOB, ALL = "each module", "the built-in job", "all kernels"

BY_MODULE = """
import importlib, json, os, sys
from shardkeep.base.compiling.sources import kernel_modules, with_imports
import numba
found = {}
for module in with_imports(kernel_modules()):
    before = os.times()
    importlib.import_module(module)
    after = os.times()
    found[module] = after.user + after.system - before.user - before.system
print(json.dumps(found))
"""

COMPILE = """
import pathlib, sys
from shardkeep.base.compiling import kernels
from shardkeep.config import load_config
from shardkeep.assembly.kernel_needs import needed_kernels
import shardkeep
which, processes = sys.argv[1], int(sys.argv[2])
kernels.usable_cores = lambda: range(processes)
demo = pathlib.Path(shardkeep.__file__).parent / "examples" / "demo.yaml"
job = needed_kernels(load_config(demo), "server", "worker")
print(kernels.compile_kernels(kernels.kernel_modules() if which == "all" else job))
"""


def compiled(_seconds: float, *, which: str, processes: int) -> harness.Figures:
    """Compiles kernels into an empty cache folder."""
    before, began = os.times(), time.perf_counter()
    count = int(in_empty_cache(COMPILE, which, str(processes)))
    seconds, after = time.perf_counter() - began, os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return {"modules": float(count), "seconds": seconds, "cpu_s": cpu_s}


def by_module(_seconds: float) -> harness.Figures:
    """CPU seconds of each module, its imports left out."""
    return dict(json.loads(in_empty_cache(BY_MODULE)))


def in_empty_cache(code: str, *arguments: str) -> str:
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        command = [sys.executable, "-c", code, *arguments]
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def show(found: Mapping[str, Sequence[harness.Figures]]) -> None:
    print(f"\n{'median of the rounds':<46} {'modules':>8} {'seconds':>8} {'CPU s':>8}")
    for name, rounds in found.items():
        middle = {key: harness.spread([figures[key] for figures in rounds])["median"] for key in rounds[0]}
        if name != ALONE:
            print(f"{name:<46} {middle['modules']:8.0f} {middle['seconds']:8.1f} {middle['cpu_s']:8.1f}")
            continue
        for module, cpu_s in middle.items():
            print(f"{module.removeprefix('shardkeep.'):<64} {cpu_s:8.2f}")
        print(f"{'sum':<64} {sum(middle.values()):8.2f}")


def main() -> None:
    parser = harness.arguments(__doc__)
    options = harness.parse(parser)
    contestants: dict[str, harness.Contestant] = {
        f"{name}, {processes} process{'es' if processes > 1 else ''}": functools.partial(
            compiled, which=which, processes=processes
        )
        for which, name in (("job", JOB), ("all", ALL))
        for processes in (1, 2)
    }
    contestants[ALONE] = by_module
    if options.smoke:
        contestants = dict([next(iter(contestants.items()))])
    found = harness.alternate(contestants, rounds=options.rounds, seconds=options.seconds)
    show(found)
    harness.write(options.json, "kernel_compiling", {"rounds": found})


if __name__ == "__main__":
    main()
