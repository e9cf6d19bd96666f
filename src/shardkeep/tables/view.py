"""How `shardkeep tables show` shows the rows of a run: all tables, or one in detail. Reads and counts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console

from shardkeep.base.sizes import size_text
from shardkeep.tables.counters import Bin
from shardkeep.tables.figures import TableFigures
from shardkeep.view.text_tables import Trimmed, bold, table_of, two_columns

Loads = Mapping[str, float]
"""The load factor of the servers' indexes by table, as far as it is known."""
_POLICY_COUNTS = {
    "admitted_rows": "admitted ids",
    "refused_rows": "refused rows",
    "candidates": "ids without a row",
    "evicted_rows": "evicted rows",
}
_BAR = 40
"""Characters of the longest bar."""


def show_tables(found: Sequence[TableFigures], loads: Loads, console: Console) -> None:
    """Prints a line for each table, and what policies did."""
    heads = ("table", "rows", "dim", "bytes", "optimizer state", "load", "mean norm", "1 %", "50 %", "99 %", "max")
    total = (f"{sum(one.rows for one in found):,}", "", *_sizes(found))
    console.print(table_of(heads, [*(_overview(one, loads) for one in found), bold("all", *total)]))
    if counted := [one for one in found if one.policy_counts]:
        console.print()
        of_policies = ("policies of table", "precision", *_POLICY_COUNTS.values())
        console.print(table_of(of_policies, [(one.spec.name, one.spec.dtype, *_counts(one)) for one in counted]))


def show_table(one: TableFigures, loads: Loads, console: Console) -> None:
    """Prints what is known of a table, with its top rows."""
    console.print(two_columns(list(_facts(one, loads))))
    for histogram in _histograms(one):
        console.print(histogram)
        console.print()
    by_squares = one.top_by == "squared_gradients"
    heads = ("top by squared gradients", "norm", "squared gradients") if by_squares else ("top by norm", "norm")
    rows = [
        (str(row.id), *(f"{n:#.4g}" for n in (row.norm, row.squared_gradients) if n is not None)) for row in one.top
    ]
    console.print(table_of(heads, rows))


def _overview(one: TableFigures, loads: Loads) -> list[str]:
    norms = ["-"] * 5 if one.norms is None else [f"{value:#.4g}" for value in one.norms.values()]
    load = f"{loads[one.spec.name]:.2f}" if one.spec.name in loads else "-"
    return [one.spec.name, f"{one.rows:,}", str(one.spec.dim), *_sizes([one]), load, *norms]


def _sizes(tables: Sequence[TableFigures]) -> list[str]:
    return [size_text(sum(one.row_bytes for one in tables)), size_text(sum(one.optimizer_bytes for one in tables))]


def _counts(one: TableFigures) -> list[str]:
    return [f"{one.policy_counts[key]:,}" if key in one.policy_counts else "-" for key in _POLICY_COUNTS]


def _facts(one: TableFigures, loads: Loads) -> Iterator[tuple[str, str]]:
    rows, slots = _sizes([one])
    yield "table", f"{one.spec.name}: dim {one.spec.dim}, {one.spec.optimizer.name}"
    yield "precision", f"rows {one.spec.dtype}, optimizer state {one.spec.state_dtype}"
    yield "rows", f"{one.rows:,}"
    yield "bytes", f"{rows} of ids and weights, {slots} of optimizer state"
    if one.spec.name in loads:
        yield "load", f"{loads[one.spec.name]:.2f} of the entries of the servers' indexes"
    if one.norms is not None:
        yield "norms", "  ".join(f"{_norm_name(name)} {value:#.4g}" for name, value in one.norms.items())
    if one.not_finite:
        yield "not finite", f"{one.not_finite:,} rows"
    yield from (
        (_POLICY_COUNTS[key], f"{one.policy_counts[key]:,}") for key in _POLICY_COUNTS if key in one.policy_counts
    )


def _norm_name(key: str) -> str:
    """`50 %` for `p50`, as the overview has it."""
    return f"{key[1:]} %" if key[1:].isdigit() else key


def _histograms(one: TableFigures) -> Iterator[Trimmed]:
    """Of ages and scores, a line for each bin."""
    clock = "steps" if one.spec.evict is None or one.spec.evict.ttl_s is None else "seconds"
    for title, bins in ((f"{clock} since the last push", one.ages), ("score", one.scores)):
        if bins:
            most, whole = max(bin.rows for bin in bins), bins is one.ages
            rows = [(_range(bin, whole=whole), f"{bin.rows:,}", "#" * (_BAR * bin.rows // most)) for bin in bins]
            yield table_of((title, "rows"), rows)  # the bar has no name, and is at the left


def _range(bin: Bin, *, whole: bool) -> str:
    """What is in a bin; `whole`: whole numbers."""
    if not whole:
        return f"{bin.first:,g} to {bin.end:,g}"
    first, last = int(bin.first), int(bin.end) - 1
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"
