"""What `init` shows: a table of the columns, and of each its role and why."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shardkeep.automl.init import Plan
from shardkeep.view.text_tables import Trimmed

LONGEST = 16
"""Characters of an example."""


def show(plan: Plan, console: Console) -> None:
    """Prints the table."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("column", "kind", "distinct", "missing", "examples", "role", "why"):
        table.add_column(name, overflow="fold", justify="right" if name in ("distinct", "missing") else "left")
    about = "" if plan.excerpt.whole else "~"
    for role in plan.roles:
        facts = role.facts
        shown = ", ".join(text if len(text) <= LONGEST else text[: LONGEST - 3] + "..." for text in facts.examples())
        distinct = f"{about}{facts.distinct_of_all(plan.excerpt.num_rows):,}"
        use = "dense, sparse" if role.both else role.use
        style = "dim" if role.use == "left out" else None
        table.add_row(role.name, facts.kind, distinct, f"{facts.missing:.1%}", shown, use, role.why, style=style)
    console.print(f"{about}{plan.excerpt.num_rows:,} rows, {len(plan.roles)} columns")
    console.print(Trimmed(table), markup=False)
