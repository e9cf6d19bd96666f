"""Which test runs which line, by coverage's contexts: written once as a map, then read. For `scripts/mutate`."""

from __future__ import annotations

import ast
import json
import os
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import coverage
import pytest

SMALL = "not slow and not chaos and not gpu and not processes"


class Tests:
    """Which tests run a line, and how long they take."""

    def __init__(self, work: Path, tree: Path) -> None:
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.importers: dict[str, set[str]] = defaultdict(set)
        for part in (json.loads(path.read_text()) for path in work.glob("map-*.json")):
            self.seconds |= part["seconds"]
            for file, line, tests in part["lines"]:
                if not file.endswith("kernels.py"):  # machine code: only a test that imports the file has lines of it
                    self.lines[file][line].update(tests)
        for path in (path for top in ("ps", "compression", "workers") for path in (tree / top).rglob("*.py")):
            imports = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.ImportFrom)]
            for name in {
                name for node in imports for a in node.names for name in (node.module, f"{node.module}.{a.name}")
            }:
                imported = f"{name}.py".removeprefix("shardkeep.").replace(".", "/").replace("/py", ".py")
                self.importers[imported].add(str(path.relative_to(tree)))

    def of(self, file: str, line: int) -> list[str]:
        """Those of the same folder first, then the shortest first."""
        tests, files, seen = self.lines[file][line], {file}, set[str]()
        while files and not tests:
            tests = set().union(*(tests for name in files for tests in self.lines[name].values()))
            seen |= files
            files = set().union(*(self.importers[name] for name in files)) - seen
        folder = f"tests/{Path(file).parent}/"
        return sorted(tests, key=lambda test: (not test.startswith(folder), self.seconds.get(test, 0.0)))


class Contexts:
    """A plugin of pytest: names the running test to coverage, and sums the seconds of each test."""

    def __init__(self, cov: Any) -> None:
        self.cov, self.seconds = cov, Counter[str]()

    def pytest_runtest_setup(self, item: Any) -> None:
        self.cov.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration


def write_map(work: Path, tree: Path, tests: list[str]) -> None:
    os.chdir(tree)
    name = re.sub(r"\W", "-", " ".join(tests))[:60]
    cov = coverage.Coverage(data_file=None, include=["*/ps/*", "*/compression/*", "*/workers/*"])
    plugin = Contexts(cov)
    cov.start()
    pytest.main(["-q", "-m", SMALL, "-p", "no:cacheprovider", f"--basetemp={work}/{name}", *tests], plugins=[plugin])
    cov.stop()
    data = cov.get_data()
    found = [
        (str(Path(file).resolve().relative_to(tree)), line, [test for test in lines if test])
        for file in data.measured_files()
        for line, lines in data.contexts_by_lineno(file).items()
    ]
    (work / f"map-{name}.json").write_text(json.dumps({"seconds": plugin.seconds, "lines": found}))
