"""Kernels of delimited text: whether quotes close as the dialect says. N = bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardkeep.base.compiling.kernels import kernel

WRONG, START, TEXT, CLOSED, BLANK, ESCAPED, QUOTED, ESCAPED_QUOTED = range(-1, 7)
"""A quote does not close at the end of its field; or the place is at a field's start, in one without quotes, behind the
last quote of one, in blanks behind that, behind an escape character, and in quotes, there too behind one."""


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64, int64, int64, int64, boolean)")
def quote_state(text_N: NDArray[np.uint8], state: int, delimiter: int, quote: int, escape: int, at_end: bool) -> int:
    """The state behind a part of a text, from that before it; a character that there is not is -1.

    As Arrow reads: a quote opens at the start of a field alone, and means nothing later in a field without quotes."""
    at = 0
    while at < len(text_N) and state != WRONG:
        begin = at
        if state <= TEXT or state == QUOTED:  # to the next character that can mean something
            while at < len(text_N) and text_N[at] != quote and text_N[at] != escape:
                at += 1
        if state <= TEXT and at > begin:
            before = text_N[at - 1]
            state = START if before == delimiter or before == 10 or before == 13 else TEXT
        if at == len(text_N):
            break
        byte = text_N[at]
        if state <= TEXT:
            state = ESCAPED if byte == escape else QUOTED if state == START else TEXT
        elif state == QUOTED:
            state = CLOSED if byte == quote else ESCAPED_QUOTED
        elif state <= BLANK:
            if byte == quote and state == CLOSED:  # a doubled one
                state = QUOTED
            elif byte == delimiter or byte == 10 or byte == 13:
                state = START
            else:
                state = BLANK if byte == 32 or byte == 9 else WRONG
        else:
            state = TEXT if state == ESCAPED else QUOTED
        at += 1
    return WRONG if at_end and state >= QUOTED else state
