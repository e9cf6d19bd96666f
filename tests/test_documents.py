"""The paths that the documents name: each one exists, and the tree in README.md names every folder of the library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ("shardkeep", "ps", "workers", "compression", "proto")
TOPS = (*LIBRARY, "tests", "docs", "examples", "benchmarks", "scripts")
NOTEBOOK = "docs/log.md"  # its dated entries name files as they were on that day
DOCS = sorted({f"docs/{p.name}" for p in ROOT.glob("docs/*.md")} - {NOTEBOOK})
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", *DOCS)
YOURS = {  # examples of files that a reader would add
    "compression/selection/newest.py",
    "compression/values/int16.py",
    "shardkeep/tls",
}
PATH = re.compile(rf"(?<![\w./:-])(?:{'|'.join(TOPS)})/[\w./*-]*\w\*?/?")
LINK = re.compile(r"\]\(([^)#\s]+)")
INDENT = 2


def missing_paths(text: str, folder: Path) -> list[str]:
    """Paths from the repository's root that `text` names, and links from `folder`, that do not exist."""
    links = {link for link in LINK.findall(text) if "://" not in link}
    missing = {path for path in PATH.findall(text) if not any(ROOT.glob(path.rstrip("/")))}
    return sorted(missing - YOURS | {link for link in links if not (folder / link).exists()})


def tree_paths(text: str) -> Iterator[str]:
    """The paths of the tree in README.md: two spaces of indentation per level, then a description."""
    parents: list[str] = []
    for line in text.split("## The tree\n\n```\n", 1)[1].split("\n```", 1)[0].splitlines():
        level = (len(line) - len(line.lstrip())) // INDENT
        names = re.split(r"\s{2,}", line.strip())[0].split()
        yield from ("".join([*parents[:level], name]) for name in names)
        parents = [*parents[:level], names[0]]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_in_a_document_exists(document: str) -> None:
    path = ROOT / document
    assert not missing_paths(path.read_text(encoding="utf-8"), path.parent)


def test_every_path_of_the_tree_exists() -> None:
    paths = list(tree_paths((ROOT / "README.md").read_text(encoding="utf-8")))
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_tree_names_every_folder_of_the_library() -> None:
    files = [path for top in LIBRARY for path in (ROOT / top).rglob("*.py")]
    folders = {f"{path.resolve().parent.relative_to(ROOT).as_posix()}/" for path in files}
    outside = {"examples/", "examples/custom_model/", "examples/custom_source/", "benchmarks/", "benchmarks/peers/"}
    assert not folders - outside - set(tree_paths((ROOT / "README.md").read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "text",
    ["`ps/nowhere.py`", "see ps/nowhere/*.py.", "[the log](docs/nowhere.md)", "shardkeep/nowhere"],
)
def test_a_path_that_does_not_exist_is_found(text: str) -> None:
    assert missing_paths(text, ROOT)
