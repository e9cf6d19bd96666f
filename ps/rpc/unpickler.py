"""Reads the pickles of torch RPC: admits two functions of this package and torch's own envelope, nothing else.

Defence in depth only: see docs/guide/security.md. Replaces private functions of torch, once per process.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

from torch.distributed.rpc import internal as rpc_internal

from shardkeep.base.errors import ProtocolError, first_line
from shardkeep.base.logs.log import EventLog
from shardkeep.ps.rpc.calls import arrive, handle

_log = EventLog("transport")

_PLAIN_OPCODES = {
    "PROTO", "FRAME", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1",
    "BININT2", "BINFLOAT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS",
    "EMPTY_DICT", "SETITEM", "SETITEMS", "STACK_GLOBAL", "REDUCE", "NEWOBJ",
}  # fmt: skip
"""What calls and answers are pickled into, besides texts, long numbers and STOP. BUILD is not there:
it sets attributes of everything admitted, classes and functions too, for all later calls of the process."""
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


def _tensor_receiver(owner: object, name: str) -> Any:
    """Replaces `getattr` in a pickle. Admits the one attribute that torch's own envelope reads."""
    if owner is rpc_internal._InternalRPCPickler and name == "_tensor_receiver":
        return rpc_internal._InternalRPCPickler._tensor_receiver
    raise AttributeError(f"shardkeep refuses {name} of {owner!r} in an RPC")


_ADMITTED: dict[tuple[str, str], Any] = {
    (handle.__module__, "handle"): handle,
    (arrive.__module__, "arrive"): arrive,
    ("builtins", "getattr"): _tensor_receiver,
    ("builtins", "RuntimeError"): RuntimeError,
    ("torch.distributed.rpc.internal", "PythonUDF"): rpc_internal.PythonUDF,
    ("torch.distributed.rpc.internal", "RemoteException"): rpc_internal.RemoteException,
    ("torch.distributed.rpc.internal", "_InternalRPCPickler"): rpc_internal._InternalRPCPickler,
}


def _run(call: Any) -> Any:
    """Runs a call that was unpickled, or refuses one that was not. An exception becomes one line for the caller.

    Replaces torch's `_run_function`, which prints a traceback for every call that fails."""
    try:
        if isinstance(call, AttributeError):
            raise ProtocolError(str(call.__cause__ or call))
        return call.func(*call.args, **call.kwargs)
    except Exception as error:
        _log.warning("call refused", once=type(error).__name__, why=first_line(error))
        return rpc_internal.RemoteException(first_line(error), RuntimeError)


class RestrictedUnpickler(pickle.Unpickler):
    """Raises AttributeError for every name and opcode that calls and replies do not need."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._call = file.getvalue()

    def load(self) -> Any:
        # torch turns an AttributeError into an answer; any other exception makes it print an error of its own.
        try:
            check_opcodes(self._call)
            return super().load()
        except AttributeError:
            raise
        except Exception as error:
            raise AttributeError(f"shardkeep refuses an RPC that cannot be read: {first_line(error)}") from None

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise AttributeError(f"shardkeep refuses {module}.{name} in an RPC") from None


def install() -> None:
    """Makes torch RPC of this process read calls with RestrictedUnpickler."""
    rpc_internal._unpickler = RestrictedUnpickler  # type: ignore[assignment]  # torch gives it a BytesIO alone
    rpc_internal._run_function = _run
