"""Reports as one HTML file without a script, for any browser and without network: sections, tables and pictures."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from shardkeep.page.files import text_of

STYLE = """
main { max-width: 76rem; margin: 1rem auto 3rem; padding: 0 1.2rem; } .lead { font-size: 1.05rem; }
.scroll table { width: auto; } .scroll :is(th, td):not(:first-child) { text-align: right; white-space: nowrap; }
.scroll + figure, figure + figure { margin-top: 2rem; } img { max-width: 100%; background: #fff; border-radius: 6px; }
figcaption { max-width: 75ch; font-size: .85rem; color: var(--muted); }
"""
"""Over the styles of the page."""

Row = Sequence[str]


def document(title: str, parts: Iterable[str]) -> str:
    """The file of the parts that are not empty."""
    width = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    style = text_of("theme.css") + text_of("page.css") + STYLE
    head = f'<meta charset="utf-8">{width}<title>{escape(title)}</title><style>{style}</style>'
    body = "\n".join(filter(None, parts))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><main>\n{body}\n</main></body></html>\n'


def figure(words: str, png: bytes) -> str:
    """A picture with its caption."""
    data = base64.b64encode(png).decode("ascii")
    image = f'<img alt="{escape(words)}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{escape(words)}</figcaption></figure>"


def section(title: str, *parts: str) -> str:
    return "\n".join((f"<section><h2>{escape(title)}</h2>", *parts, "</section>"))


def table(head: Row, rows: Sequence[Row]) -> str:
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{first}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def wide_table(head: Row, rows: Sequence[Row]) -> str:
    """A table that may be wider than its box."""
    return f'<div class="scroll">{table(head, rows)}</div>'
