"""What the bytes of a run are: ten kinds that a reader can tell apart, each with one colour in all plots."""

from __future__ import annotations

from collections.abc import Mapping

OTHER = "resent, flushed"
COLOURS = {
    "pull: values": "#0072b2",
    "pull: ids": "#56b4e9",
    "pull: headers": "#b5dcf4",
    "push: values": "#d55e00",
    "push: ids": "#e69f00",
    "push: headers": "#f7d58f",
    "tower: values": "#009e73",
    "tower: headers": "#9adbc6",
    OTHER: "#cc79a7",
    "control": "#777777",
}
"""Hues of Okabe and Ito, one for each direction: values the darkest, headers the palest."""
KINDS = {
    "values": "values",
    "scales": "values",
    "moments": "values",
    "ids": "ids",
    "masks": "ids",
    "indices": "ids",
    "framing": "headers",
    "rpc": "headers",
    "retries": OTHER,
    "flush": OTHER,
}
"""Kind of each part of the ledger (`PARTS`) that training has; scales and moments count as values, masks and indices as
ids. The tower has no ids: its indices count as values."""


def kind_of(direction: str, part: str) -> str:
    """The kind of a part of the ledger, a key of `COLOURS`."""
    if direction == "control":
        return direction
    kind = "values" if direction == "tower" and KINDS[part] == "ids" else KINDS[part]
    return kind if kind == OTHER else f"{direction}: {kind}"


def by_kind(parts: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Bytes by kind, in the order of `COLOURS`; kinds without bytes are left out."""
    found = dict.fromkeys(COLOURS, 0.0)
    for (direction, part), size in parts.items():
        found[kind_of(direction, part)] += size
    return {kind: size for kind, size in found.items() if size}
