"""The site: `make site` builds it from the documents as they are, and pages of the public names from their docstrings.

Sphinx reads this file. The result is in build/site, which is not committed.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import shardkeep  # noqa: E402
from shardkeep.base.settings import Settings  # noqa: E402

project, release = "shardkeep", shardkeep.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
root_doc, html_theme, html_title = "README", "furo", f"shardkeep {release}"
include_patterns = ["*.md", "docs/**", "benchmarks/README.md", "build/api/*.rst"]
myst_heading_anchors, myst_fence_as_directive = 4, ["mermaid"]
autodoc_member_order, add_module_names = "bysource", False
suppress_warnings = ["ref.python"]  # a field's name is that of several classes
MODULES = ("config", "errors", "nn", "torchrec", "callbacks")
CONTENTS = """
```{toctree}
:hidden:
:caption: %s
:glob:

%s
```
"""
SECTIONS = {
    "Documentation": "docs/README\ndocs/scale",
    "Guide": "docs/guide/*",
    "Reference": "docs/reference/*",
    "Python": "build/api/*",
    "Project": "docs/research/*\nARCHITECTURE\nCONTRIBUTING\nCHANGELOG\nbenchmarks/README",
}


def write_api_pages(_app: Any) -> None:
    """A page of the package, and one of each public module with the names that the package itself has not."""
    folder = ROOT / "build" / "api"
    folder.mkdir(parents=True, exist_ok=True)
    for module in (shardkeep, *(getattr(shardkeep, name) for name in MODULES)):
        name = module.__name__
        lines = [name, "=" * len(name), "", f".. automodule:: {name}", ""]
        for part in _names(module):
            what = getattr(module, part)
            if inspect.isclass(what):
                lines += [f".. autoclass:: {name}.{part}", "   :members:", "   :exclude-members: model_config", ""]
            elif inspect.isroutine(what):
                lines += [f".. autofunction:: {name}.{part}", ""]
        (folder / f"{name}.rst").write_text("\n".join(lines), encoding="utf-8")


def _names(module: Any) -> list[str]:
    names = getattr(module, "__all__", None) or dir(module)
    above = (
        []
        if module is shardkeep
        else [*dir(shardkeep), *(() if module is shardkeep.errors else shardkeep.errors.__all__)]
    )
    ours = [each for each in names if str(getattr(getattr(module, each), "__module__", "")).startswith("shardkeep")]
    return [each for each in ours if each[0] != "_" and each not in above]


def as_rst(_app: Any, _what: str, _name: str, _part: Any, _options: Any, lines: list[str]) -> None:
    """Docstrings have code in single backticks, and stars that mean no emphasis."""
    parts = re.split(r"`+([^`]+)`+", "\n".join(lines))
    text = "".join(f"``{part}``" if n % 2 else part.replace("*", r"\*") for n, part in enumerate(parts))
    lines[:] = text.split("\n")


def shorter(_app: Any, _what: str, _name: str, part: Any, _options: Any, _arguments: str, _result: str) -> Any:
    """Settings are called with any of their fields, which follow: no list of all of them."""
    return ("", None) if inspect.isclass(part) and issubclass(part, Settings) else None


def add_contents(_app: Any, name: str, source: list[str]) -> None:
    """The tree of pages, which only the site needs."""
    if name == root_doc:
        source[0] += "".join(CONTENTS % section for section in SECTIONS.items())


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", write_api_pages)
    app.connect("autodoc-process-docstring", as_rst, priority=100)  # before napoleon reads it
    app.connect("autodoc-process-signature", shorter)
    app.connect("source-read", add_contents)
