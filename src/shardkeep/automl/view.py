"""What `init` shows: a table of the columns, with each one's role and why."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from rich.table import Table

from shardkeep.automl.init import Plan
from shardkeep.automl.job_file import flow
from shardkeep.base.printable import printable
from shardkeep.view.screen import console
from shardkeep.view.text_tables import Trimmed

HELD_OUT = re.compile(r"(?i)(^|[_.-])(test|eval|val|valid|validation|holdout)([_.-]|$)")
"""Names of files that are not for training."""


def show(plan: Plan) -> None:
    """Prints the table."""
    table = Table("column", "kind", "distinct", "missing", "examples", "role", "why", box=None, padding=(0, 2, 0, 0))
    about = "" if plan.excerpt.whole else "~"
    for role in plan.roles:
        facts = role.facts
        examples = ", ".join(text if len(text) <= 16 else f"{text[:13]}..." for text in facts.examples())
        distinct = f"{about}{facts.distinct_of_all(plan.excerpt.num_rows):,}"
        use = "dense, sparse" if role.both else role.use
        style = "dim" if role.use == "left out" else None
        cells = (role.name, facts.kind, distinct, f"{facts.missing:.1%}", examples, use, role.why)
        table.add_row(*map(printable, cells), style=style)
    console().print(f"{about}{plan.excerpt.num_rows:,} rows, {len(plan.roles)} columns")
    console().print(Trimmed(table))
    for line in (*(f"labels    {line}" for line in plan.sides[:1]), *(f"question  {each}" for each in plan.questions)):
        console().print(printable(line))
    if foreign := [role.name for role in plan.roles if not (role.facts.entries or role.facts).utf8]:
        what = f"{', '.join(foreign)}: some texts are Windows-1252 or Latin-1, not UTF-8; score such files, or convert"
        console().print(f"note      {what} all before (iconv -f WINDOWS-1252 -t UTF-8)")
    held = [entry for entry in plan.entries if HELD_OUT.search(Path(entry).stem)]
    if 0 < len(held) < len(plan.entries):
        others = shlex.join(entry for entry in plan.entries if entry not in held)
        parts = ((f"data.{'eval' if 'val' in entry.lower() else 'test'}", flow([entry])) for entry in held)
        sets = "".join(f" --set {shlex.quote('='.join(part))}" for part in parts)
        console().print(f"note      the job also trains on {', '.join(held)}; instead: init {others}{sets}")
