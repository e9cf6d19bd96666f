"""The files of the page, and the page as one file: state, style and scripts inside, without a request."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

from shardkeep.page.comparison import compared
from shardkeep.page.records import Json
from shardkeep.page.state import RunState
from shardkeep.records.json_text import to_json
from shardkeep.records.telemetry import ROLES

STATIC = Path(__file__).parent / "static"
STYLES = ("uPlot.min.css", "theme.css", "page.css")
MODULES = ("format.js", "dom.js", "plots.js", "sections.js", "page.js")
"""In the order of their imports."""
TYPES = {".css": "text/css", ".js": "text/javascript", ".txt": "text/plain"}
SERVED = {path.name: TYPES[path.suffix] for path in STATIC.glob("*") if path.suffix in TYPES}
MOST_LOGS, MOST_LOG_CHARACTERS = 200, 1_000_000
"""Of all logs of a run together, in a report."""
_IMPORT = re.compile(r"^import (?:\* as )?(.+) from \"\./(.+)\";$", re.MULTILINE)
_EXPORT = re.compile(r"^export (?:function|const) (\w+)", re.MULTILINE)
_EXPORT_WORD = re.compile(r"^export ", re.MULTILINE)
_LINKS = re.compile(r"^<(link rel=\"stylesheet\"|script src=).*\n", re.MULTILINE)


def text_of(name: str) -> str:
    """The text of one of the page's files."""
    return (STATIC / name).read_text(encoding="utf-8")


def whole_page(runs: Sequence[RunState], scored: Sequence[Json] = (), between: Json | None = None) -> str:
    """The page of some runs as one file. `scored`, `between`: more of each run and of all together."""
    sections = [run.sections() for run in runs]
    each = zip(runs, sections, scored or [{}] * len(runs), strict=True)
    state = {
        "at": time.time(),
        "runs": [{"name": run.name, **own, **more} for run, own, more in each],
        "compared": {**compared(runs, sections), **(between or {})},
        "logs": [_logs(run) for run in runs],
    }
    style = "".join(text_of(name) for name in STYLES)
    chart = f"/*\n{text_of('uPlot.LICENSE.txt')}*/\n{text_of('uPlot.iife.min.js')}".replace("</", "<\\/")
    script = _bundle()
    hashes = " ".join(f"'sha256-{_hash(text)}'" for text in (chart, script))
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes}"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    stored = f'<script type="application/json" id="stored">{_embedded(state)}</script>\n'
    page = _LINKS.sub("", text_of("index.html"))
    page = page.replace("<title>", f"{head}<title>", 1)
    return page.replace(
        "</body>", f'{stored}<script>{chart}</script>\n<script type="module">{script}</script>\n</body>'
    )


def _logs(run: RunState) -> dict[str, str]:
    """The ends of the logs of the processes."""
    paths = sorted(run.records.reader.logs.glob("*.log"))[:MOST_LOGS]
    keys = [path.stem.rpartition("-") for path in paths]
    texts = {f"{role}-{i}": run.log(role, int(i)) for role, _, i in keys if role in ROLES and i.isdecimal()}
    each = min(16_000, MOST_LOG_CHARACTERS // max(1, len(texts)))
    return {key: text[-each:] for key, text in texts.items() if text}


def _bundle() -> str:
    """The modules as one script: each is a function that returns what it exports."""
    parts = ["const modules = {};\n"]
    for name in MODULES:
        text = text_of(name)
        exports = ", ".join(_EXPORT.findall(text))
        body = _EXPORT_WORD.sub("", _IMPORT.sub(r"const \1 = modules['\2'];", text))
        parts.append(f"modules['{name}'] = (() => {{\n{body}return {{ {exports} }};\n}})();\n")
    return "".join(parts).replace("</", "<\\/")


def _embedded(state: Json) -> str:
    """JSON that cannot end the element that it is in."""
    plain = json.loads(to_json(state))
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", " ")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
