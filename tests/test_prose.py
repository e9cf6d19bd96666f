"""scripts/check-prose: it finds long lines, long sentences and retired words, and finds none in the repository."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    """The script, as a module."""
    loader = importlib.machinery.SourceFileLoader("check_prose", str(ROOT / "scripts" / "check-prose"))
    spec = importlib.util.spec_from_loader("check_prose", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


LONG = "Word " + "word " * 30 + "end."
BAD = [
    ("README.md", "x" * 161, "line over 160"),
    ("docs/guide/start.md", f"A sentence. {LONG}", "sentence of 32 words"),
    ("docs/guide/start.md", f"- {LONG}", "sentence of 32 words"),
    ("docs/guide/start.md", f"| key | {LONG} |", "sentence of 32 words"),
    ("ARCHITECTURE.md", "A worker goes on.", "retired 'goes on'"),
    ("ps/a.py", '"""The coordinator is told."""', "retired 'is told'"),
    ("ps/a.py", "x = 1  # it begins anew", "retired 'anew'"),
    ("ps/a.py", 'raise E(f"{name} stands in the way")', "retired 'stands in'"),
    ("examples/a.yaml", "key: 1  # whatever you like", "retired 'whatever'"),
]
GOOD = [
    ("docs/guide/start.md", "Short. " * 20),
    ("docs/guide/start.md", f"```text\n{LONG} goes on anew\n{'x' * 200}\n```"),
    ("docs/guide/start.md", "The key `anew` and [a link](whatever.md)."),
    ("docs/reference/config.md", LONG),
    ("README.md", f"| {'x' * 200} |"),
    ("ps/a.py", 'told = {"anew": whatever}'),
    ("ps/a.py", '"""Continues with `anew`."""'),
]


@pytest.mark.parametrize(("path", "text", "what"), BAD)
def test_what_a_reader_stumbles_over_is_found(prose: ModuleType, path: str, text: str, what: str) -> None:
    assert [found for _, found, _ in prose.findings(path, text) if found.startswith(what)]


@pytest.mark.parametrize(("path", "text"), GOOD)
def test_plain_text_and_code_pass(prose: ModuleType, path: str, text: str) -> None:
    assert not list(prose.findings(path, text))


def test_the_repository_passes(prose: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main([]) == 0, capsys.readouterr().out
