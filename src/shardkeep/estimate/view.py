"""How `shardkeep estimate` shows what it found: a few tables of text. Computes nothing but sums and units."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from shardkeep.base.sizes import counted, size_text
from shardkeep.view.screen import PIPED_WIDTH, Screen
from shardkeep.view.text_tables import Trimmed, bold, table_of, two_columns

Part = Mapping[str, Any]
SHOWN_TABLES = 12
"""The largest tables are shown one by one."""
PARTS = ("weights", "slots", "ids", "index", "counters", "candidate_bytes", "bytes")
"""The parts of a table's memory. Only policies have counters and candidates."""
TOWER_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "exchanged": "sums and gathers, at most",
    "peak": "at most at once",
    "kept": "kept for recovery, in mapped files",
}
PART_NAMES = {"bytes": "in all", "candidate_bytes": "counted ids"}


@contextlib.contextmanager
def waiting() -> Iterator[Screen]:
    """Shows on stderr what takes long: kernels that are compiled, files that are converted."""
    screen = Screen(Console(stderr=True))
    try:
        yield screen
    finally:
        screen.end_bar()


def show_estimate(found: Part, console: Console) -> None:
    """Prints an estimate as `shardkeep.estimate.estimate.estimate` returns it."""
    console.print(two_columns(list(_job_rows(found))))
    console.print()
    console.print(_memory(found, console))
    for line in _policy_lines(found["tables"]):
        console.print(line, soft_wrap=True)
    if len(found["servers"]) > 1:
        console.print(_servers_line(found))
    if "note" in found:
        return
    if "memory" in found["tower"]:
        console.print()
        console.print(_tower_memory(found["tower"]))
        console.print(_tower_line(found["tower"]))
    if padding := found["tower"]["padding"]:
        gain = f"{padding['gain']:.2f} times as fast here"
        console.print(f"tower.pad_widths: {padding['multiple']} makes the tower's linear layers {gain}")
    console.print()
    console.print(_traffic(found))
    console.print(f"in {counted(round(found['step']['calls']), 'call')} to servers")
    if len(found["step"]["tables"]) > 1:
        console.print()
        console.print(_table_traffic(found))
    console.print()
    if found["links"]:
        console.print(_links(found))
        console.print(_bound_line(found))
        if (journal := found["journal"]) is not None:
            console.print(_journal_line(journal))
    else:
        console.print("servers: 0: nothing travels between processes")


def _job_rows(found: Part) -> Iterator[tuple[str, str]]:
    job = found["job"]
    accumulated = f" x {job['accumulate']} micro-batches" if job["accumulate"] > 1 else ""
    batch = f"batches of {job['batch_size']:,}{accumulated} a worker"
    yield "job", f"{job['name']}: {counted(job['servers'], 'server')}, {counted(job['workers'], 'worker')}, {batch}"
    if "note" in found:
        yield "no data", f"{found['note']}; memory for a million rows of each table, no traffic"
        return
    drawn, step, tower = found["drawn"], found["step"], found["tower"]
    yield "steps", f"{job['steps']:,} of {job['step_samples']:,} samples; the data has {job['samples']:,}"
    more = "" if _rows_counted(found) else "; the tables have at least the rows of these"
    yield "looked at", f"{drawn['samples']:,} samples in {counted(drawn['steps'], 'step')}{more}"
    yield "ids", f"{step['ids_per_worker']:,.0f} a step and worker, {step['distinct_per_worker']:,.0f} of them distinct"
    if (unpooled := step.get("unpooled")) is not None:
        size = size_text(unpooled["bytes"])
        yield (
            "sequences",
            f"{unpooled['ids']:,.0f} ids a micro-batch, whose rows take {size}, and their gradients as much",
        )
    yield "tower", f"{tower['parameters']:,} parameters, {size_text(tower['bytes'])}"


def _memory(found: Part, console: Console) -> Trimmed:
    """The tables' memory part by part, or as one sum where the terminal has no room for the parts."""
    whole = _memory_in(found, [part for part in PARTS if any(part in table for table in found["tables"])])
    needed = console.measure(whole, options=console.options.update(width=PIPED_WIDTH)).maximum
    return whole if needed <= console.width else _memory_in(found, PARTS[-1:])


def _memory_in(found: Part, parts: Sequence[str]) -> Trimmed:
    tables = sorted(found["tables"], key=lambda t: -t["bytes"])
    unit, factor = ("MB", 1e6) if _sum(tables)["bytes"] >= 1e7 else ("kB", 1e3)
    about = "" if _rows_counted(found) else ">="
    rows: list[Sequence[str | Text]] = [
        (table["name"], str(table["dim"]), *_sizes(table, about, factor, parts)) for table in tables[:SHOWN_TABLES]
    ]
    if rest := tables[SHOWN_TABLES:]:
        rows.append((f"{len(rest)} smaller", "", *_sizes(_sum(rest), about, factor, parts)))
    if len(tables) > 1:
        rows.append(bold("all", "", *_sizes(_sum(tables), about, factor, parts)))
    names = (PART_NAMES.get(part, part) for part in parts)
    return table_of((f"in {unit}: table", "dim", "rows", *names, "bytes\na row"), rows)


def _sizes(table: Part, about: str, factor: float, keys: Sequence[str]) -> list[str]:
    sizes = [table.get(key, 0) for key in keys]
    parts = [f"{size / factor:,.{2 if size < 10 * factor else 1}f}" for size in sizes]
    return [f"{about}{table['rows']:,}", *parts, f"{table['bytes'] / max(table['rows'], 1):,.0f}"]


def _sum(tables: Sequence[Part]) -> Part:
    return {key: sum(table.get(key, 0) for table in tables) for key in ("rows", *PARTS)}


def _tower_memory(tower: Part) -> Trimmed:
    """The dense model's memory of a worker by `tower.parallel`."""
    memory = tower["memory"]
    rows = {key: (text, *(size_text(part[key]) for part in memory.values())) for key, text in TOWER_PARTS.items()}
    return table_of(("of the tower in a worker", *memory), (rows | {"peak": bold(*rows["peak"])}).values())


def _tower_line(tower: Part) -> str:
    more = "more" if tower["parameters"] >= (least := tower["fsdp_pays_from"]) else "fewer"
    return f"tower.parallel: fsdp pays from some {least // 1_000_000} million parameters on; this tower has {more}"


def _policy_lines(tables: Sequence[Part]) -> Iterator[str]:
    """What policies say of each table's rows."""
    for table in tables:
        if "candidates" in table:
            yield f"{table['name']}: about {table['candidates']:,} ids are counted and get no row"
        if "capacity" in table:
            yield f"{table['name']}: at most {table['capacity']:,} rows"


def _servers_line(found: Part) -> str:
    low, high = (size_text(pick(server["bytes"] for server in found["servers"])) for pick in (min, max))
    about = "" if _rows_counted(found) else "at least "
    return f"each server: {about}{low if low == high else f'{low} to {high}'}, without the process itself"


def _rows_counted(found: Part) -> bool:
    """Whether the job has no other rows than those that were seen."""
    return bool(found.get("drawn", {}).get("rows_counted", True))


def _traffic(found: Part) -> Trimmed:
    samples = found["job"]["step_samples"]
    parts = found["step"]["traffic"]
    rows = [(part["text"], size_text(part["bytes"]), f"{part['bytes'] / samples:,.1f}") for part in parts]
    total = bold("all", size_text(found["bytes_per_step"]), f"{found['bytes_per_sample']:,.1f}")
    return table_of(("a step of all workers", "bytes", "bytes a sample"), [*rows, total])


def _table_traffic(found: Part) -> Trimmed:
    tables = sorted(found["step"]["tables"], key=lambda t: -t["pull_bytes"] - t["push_bytes"])
    shown = [(table["name"], [table]) for table in tables[:SHOWN_TABLES]]
    if rest := tables[SHOWN_TABLES:]:
        shown.append((f"{len(rest)} with less", rest))
    sums = ("pull_bytes", "push_bytes")
    rows = [(name, *(size_text(sum(table[key] for table in group)) for key in sums)) for name, group in shown]
    return table_of(("of a table", "pulled", "pushed"), rows)


def _links(found: Part) -> Trimmed:
    heads = (f"a link of {found['gbit_per_s']:g} Gbit/s each way", "in", "out", "at least")
    sizes = ((link, size_text(link["in_bytes"]), size_text(link["out_bytes"])) for link in found["links"])
    return table_of(heads, [(link["process"], *both, f"{link['bound_ms']:,.3f} ms") for link, *both in sizes])


def _bound_line(found: Part) -> str:
    rate = found["bound_samples_per_s"]
    return f"no step is shorter than {found['bound_ms']:,.3f} ms: at most {rate:,.0f} samples/s over these links"


def _journal_line(journal: Part) -> str:
    rate = journal["most_bytes_per_s"]
    most = "" if rate is None else f", at most {size_text(rate)} a second over these links"
    return f"the busiest server's journal grows by {size_text(journal['bytes_per_step'])} a step{most}"
