"""What `init` asks: nothing about thirty clean tables, and what would mislead it in their twins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardkeep.config import parse_config
from tests.support.cases import every
from tests.support.planted_schemas import FAULTS, TABLES, Planted, plan


def misled(planted: Planted, folder: Path) -> str:
    """Why `init` is silently misled by a table, or asks about a clean one; "" = it is right."""
    _, label, _, item, time, _, _, _, late, history = planted.names
    table, fault, path = planted.table(), planted.fault, folder / f"a.{'csv' if planted.number % 2 else 'parquet'}"
    made = plan(path, table, label)
    text, asked = made.yaml(folder), " ".join(made.questions)
    job = parse_config(text, folder=folder)
    split = "" if job.data.split is None else job.data.split.by
    right = made.sides[0].startswith(f"{label}: share ") and all(
        f"# question: {each}" in text for each in made.questions
    )
    right &= made.sides[0].endswith(f"split by time ({time})" if split == "time" else "not by time")
    if fault in ("", "month first", "day first", "history"):
        right &= not asked and split == "time" and bool(job.data.time_format) == fault.endswith("first")
    if fault == "outcome time":
        right &= split != "time"
    if fault in ("drift", "mixed dates", "unclear date", "unread date"):
        right &= f"{time} " in asked or f"{time}:" in asked
    if fault == "unclear date":
        found = plan(path, table, label, re.findall("--set '([^']*)'", asked)[0])
        right &= "split by time" in found.sides[0] and not found.questions
    if late in table.column_names:
        right &= f"{late}: " in asked or any(role.name == late and role.use == "left out" for role in made.roles)
    if fault == "history":
        encoder = getattr(job.model, "encoder", None)
        right &= job.data.sequences["history_1"].ids == {history: item} and getattr(encoder, "name", "") == "din"
    return "" if right else f"{planted.names[0]}, {fault or 'clean'}: split by {split}; {made.sides}; {asked}"


@pytest.mark.slow
def test_no_fault_of_thirty_tables_misleads_silently_and_no_clean_twin_is_asked_about(tmp_path: Path) -> None:
    assert len(TABLES) == 30
    wrong = [why for n in range(30) for fault in ("", *FAULTS) if (why := misled(Planted(n, fault), tmp_path))]
    assert wrong == []


@every("fault", ["", "drift", "not usual", "mixed dates", "unclear date"])
def test_faults_of_four_kinds_do_not_mislead(fault: str, tmp_path: Path) -> None:
    assert misled(Planted(3, fault, 600), tmp_path) == ""
