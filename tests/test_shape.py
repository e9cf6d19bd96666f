"""The library keeps its shape: these figures may fall, none may rise. ARCHITECTURE.md says why some parts are large."""

from __future__ import annotations

import re

import pytest

from tests.support.cases import every
from tests.support.shape import ROOT, Shape, library

LINES = 75_971
"""Of all rooms and the package: what moves between them is not new."""
CROWDED: dict[str, int] = {}
LONG_FILES = {
    "src/shardkeep/loop/client.py",
}
LONG_FUNCTIONS = {
    "ps": 3,
    "workers": 0,
    "compression": 0,
    "src/shardkeep": 9,
}
LONG_SIGNATURES, WIDE_CLASSES = 13, 16
TEST_LINES, DEFAULT_CASES, LONG_TESTS = 64_566, 2_093, 102
"""Of all files below tests/; of `make test`; functions marked slow, which CI runs besides."""


def explained() -> set[str]:
    """The names in the table of ARCHITECTURE.md of what is larger than the rest."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition("## Larger than the rest")[2].partition("\n## ")[0]
    return set(re.findall(r"`(\w+)`", section))


def test_the_library_has_no_more_lines_than_it_had() -> None:
    assert sum(library().lines.values()) <= LINES


def test_the_tests_have_no_more_lines_than_they_had() -> None:
    assert (
        sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "tests").rglob("*.py")) <= TEST_LINES
    )


def test_the_tests_have_no_more_cases_than_they_had(request: pytest.FixtureRequest) -> None:
    """Counts what this run collected, so it needs a run of all tests."""
    config = request.config
    if config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword:
        pytest.skip("only some tests were collected")
    slow = [item for item in request.session.items if item.get_closest_marker("slow")]
    assert len(request.session.items) - len(slow) <= DEFAULT_CASES
    assert len({item.nodeid.partition("[")[0] for item in slow}) <= LONG_TESTS


def test_no_folder_becomes_crowded() -> None:
    crowded = library().crowded_folders
    assert crowded.keys() <= CROWDED.keys()
    assert not {folder: n for folder, n in crowded.items() if n > CROWDED[folder]}


def test_no_file_becomes_long() -> None:
    assert library().long_files <= LONG_FILES


@every("room", LONG_FUNCTIONS)
def test_no_function_becomes_long(room: str) -> None:
    long = {name for name in library().long_functions if name.startswith(f"{room}/")}
    assert len(long) <= LONG_FUNCTIONS[room], sorted(long)


def test_no_function_takes_more_arguments() -> None:
    long = library().long_signatures
    assert len(long) <= LONG_SIGNATURES, sorted(long)


def test_no_class_becomes_wide_and_each_that_is_has_its_reason() -> None:
    wide = library().wide_classes
    assert len(wide) <= WIDE_CLASSES, sorted(wide)
    assert {name.split()[-1] for name in wide} <= explained()


def test_what_is_explained_is_still_large() -> None:
    assert explained() <= {name.split()[-1] for name in library().wide_classes | library().long_functions}


def test_the_figures_are_those_of_known_code() -> None:
    fields = "\n".join(f"        self.f{number} = self.g{number} = 0" for number in range(7))
    calls = "\n".join("    x = 1" for _ in range(40))
    source = f"class Wide:\n    def __init__(self, a, b, c, d, e, f, g, h, i):\n{fields}\n\ndef long():\n{calls}\n"
    found = Shape({"ps/one.py": source, **{f"ps/{n}.py": "" for n in range(15)}})
    assert (found.wide_classes, found.long_functions) == ({"ps/one.py Wide"}, {"ps/one.py long"})
    assert (found.long_signatures, found.long_files) == ({"ps/one.py __init__"}, set())
    assert (found.crowded_folders, found.lines["ps"]) == ({"ps": 16}, len(source.splitlines()))
