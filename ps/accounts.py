"""What a worker's messages to and from servers are made of, told to the ledger: each byte once.

Knows steps, so that what is trained again counts as such; holds no row.
"""

from __future__ import annotations

from shardkeep.compression.ledger import Ledger
from shardkeep.ps import envelope
from shardkeep.ps.message import REFERENCE, Packed
from shardkeep.ps.values import ELEMENTS, RowFormat, elements_of


class Accounts:
    """Counts one worker's pulls, reads and pushes."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._counted_until = {"push": 0, "pull": 0}
        self._again_until = {"push": 0, "pull": 0}

    def regroup(self) -> None:
        """A generation was lost: what was counted of steps to come counts as retries from now on."""
        self._again_until = dict(self._counted_until)

    def repeats(self, step: int) -> bool:
        """Whether this step was pushed before, in another generation."""
        return step < self._again_until["push"]

    def message(self, direction: str, message: Packed, *, answer: bool = False, flush: bool = False) -> None:
        """A message, and what brings it where it is an answer. `flush`: it holds what was left for later."""
        parts = _parts(message)
        if answer:
            parts["rpc"] = envelope.answer_bytes(message.buffer.size)
        self._add(direction, message.step, {"flush": sum(parts.values())} if flush else parts, answer=answer)

    def call(self, direction: str, step: int, num_bytes: int) -> None:
        """What carries a message, or several."""
        self._add(direction, step, {"rpc": num_bytes}, answer=False)

    def question(self, asked: int, answered: int) -> None:
        """A question to a server and its answer, with what carries them."""
        self.ledger.add("control", "questions", asked)
        self.ledger.add("control", "questions", answered, answer=True)

    def _add(self, direction: str, step: int, parts: dict[str, int], *, answer: bool) -> None:
        if direction in self._counted_until:
            self._counted_until[direction] = max(self._counted_until[direction], step + 1)
            if step < self._again_until[direction]:
                parts = {"retries": sum(parts.values())}
        for part, num_bytes in parts.items():
            self.ledger.add(direction, part, num_bytes, answer=answer)


def _parts(message: Packed) -> dict[str, int]:
    """What the bytes of a message are."""
    id_bytes, value_bytes = message.ids_area.size, message.values_area.size
    parts = {"ids": id_bytes, "values": value_bytes, "framing": message.overhead}
    if id_bytes and int(message.id_formats_S[0]) >= REFERENCE:  # these sections come first
        parts["masks"] = int(message.id_bytes_S[message.id_formats_S >= REFERENCE].sum())
        parts["ids"] -= parts["masks"]
    if value_bytes and int(message.value_formats_S[0]) == ELEMENTS:
        parts["indices"] = value_bytes - 4 * elements_of(message)
        parts["values"] -= parts["indices"]
    elif value_bytes and int(message.value_formats_S[0]):
        row_format = RowFormat.of_tag(int(message.value_formats_S[0]))
        rows = int(message.rows_S.sum())
        beside = {"scales": rows * row_format.codec.scale_bytes, "moments": rows * row_format.moments}
        parts |= {part: size for part, size in beside.items() if size}
        parts["values"] -= sum(beside.values())
    return parts
