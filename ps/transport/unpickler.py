"""What a pickle that comes from another process may be made of, beside the names that its reader admits.

docs/security.md tells what that is worth.
"""

from __future__ import annotations

import pickle
import pickletools

_PLAIN_OPCODES = {
    "PROTO", "FRAME", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1",
    "BININT2", "BINFLOAT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS",
    "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_SET", "ADDITEMS", "STACK_GLOBAL", "REDUCE", "NEWOBJ",
}  # fmt: skip
"""What calls, answers and torch's meeting are pickled into, besides texts, long numbers and STOP. BUILD is not there:
it sets attributes of whatever is admitted, classes and functions too, for all later calls of the process."""
_STEPS = {
    ord(opcode.code): 1 + (0 if opcode.arg is None else opcode.arg.n)
    for opcode in pickletools.opcodes
    if opcode.name in _PLAIN_OPCODES
}
"""Bytes from an opcode to the next."""
_COUNTS = {ord(pickle.SHORT_BINUNICODE): 1, ord(pickle.BINUNICODE): 4, ord(pickle.LONG1): 1}
"""Bytes that say how many more follow."""
_STOP = ord(pickle.STOP)


def check_opcodes(call: bytes) -> None:
    """Raises AttributeError if a pickle has others than the plain opcodes, before any is carried out; 7 us a call."""
    position, end = 0, len(call)
    while position < end:
        code = call[position]
        if (step := _STEPS.get(code)) is not None:
            position += step
        elif (width := _COUNTS.get(code)) is not None:
            begin = position + 1 + width
            position = begin + int.from_bytes(call[position + 1 : begin], "little")
        elif code == _STOP:
            return
        else:
            known = pickletools.code2op.get(chr(code))  # type: ignore[attr-defined]
            raise AttributeError(f"shardkeep refuses the opcode {known.name if known else code} in an RPC")
