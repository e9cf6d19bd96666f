"""Blocks of docs/guide/compression.md, as written."""

from __future__ import annotations

import re

from tests.support.import_path import ROOT


def block_of(kind: str) -> str:
    """The last block that begins with this line, as `python mine.py`."""
    guide = (ROOT / "docs" / "guide" / "compression.md").read_text(encoding="utf-8")
    return re.findall(rf"```{kind}\n(.*?)```", guide, re.DOTALL)[-1]
