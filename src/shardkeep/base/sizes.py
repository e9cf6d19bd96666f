"""Sizes in bytes and numbers of things as a person reads them: decimal units, one digit behind the point."""

from __future__ import annotations


def size_text(size: float) -> str:
    """Returns such as `4,000.0 GB`, `1.2 kB` or `60 B`."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:,.0f} B"


def counted(number: int, noun: str) -> str:
    """Returns such as `1 seed` or `1,200 seeds`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
