"""The form of calls and answers in torch RPC: a few bytes in place of torch's pickles. Both ends.

Replaces private names of torch, once per process. No byte that arrives names a function or a type. torch adds 127
bytes of its own, and some 260 for each tensor. Short messages are copied instead: a tensor also takes more CPU time.

    content                               kind, the last byte
    message (none with tensors)           CALL
    message, message, size of the first   CALL_OF_TWO; the size has 2 bytes
    rank, 4 bytes                         ARRIVAL; with a tensor
    message (none with a tensor)          ANSWER
    text                                  FAILURE, of a handler; REFUSAL, of what is no call
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed import rpc
from torch.distributed.rpc import internal as rpc_internal
from torch.distributed.rpc.internal import PythonUDF, RemoteException

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import ProtocolError, first_line
from shardkeep.base.logs.log import EventLog
from shardkeep.ps.rpc.calls import arrive, handle, in_flight
from shardkeep.ps.transport.transport import MAX_INLINE

_log = EventLog("transport")
_SIZE, _RANK = struct.Struct("<H"), struct.Struct("<I")


_CALL, _CALL_OF_TWO, _ARRIVAL, _ANSWER, _FAILURE, _REFUSAL = (bytes([kind]) for kind in range(1, 7))


class Envelope(rpc_internal._InternalRPCPickler):
    """Takes the place of torch's pickler; other parts of torch register types there."""

    def serialize(self, sent: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Encodes a call or its answer: bytes, and the tensors beside them."""
        if isinstance(sent, np.ndarray):
            return _of_messages([sent], _ANSWER)
        if isinstance(sent, torch.Tensor):  # of an arrival
            return _ANSWER, [sent]
        if isinstance(sent, PythonUDF):
            if sent.func is handle:
                return _of_messages(sent.args, _CALL)
            return _RANK.pack(sent.args[0]) + _ARRIVAL, [sent.args[1]]
        if isinstance(sent, RemoteException):
            return sent.msg.encode() + _REFUSAL, []
        return first_line(sent).encode() + _FAILURE, []

    def deserialize(self, content: bytes, tensors: list[torch.Tensor]) -> Any:
        """Decodes a call or its answer. Returns a ProtocolError for bytes that are neither: torch has no other way."""
        kind, body = content[-1:], np.frombuffer(content, np.uint8)[:-1]
        arrays = [tensor.numpy() for tensor in tensors] or [body]
        if kind == _CALL and len(arrays) <= 2:
            return PythonUDF(handle, tuple(arrays), {})
        if kind == _CALL_OF_TWO and body.size >= _SIZE.size:
            both, (size,) = body[: -_SIZE.size], _SIZE.unpack(body[-_SIZE.size :].data)
            if size <= both.size:
                return PythonUDF(handle, (both[:size], both[size:]), {})
        if kind == _ARRIVAL and body.size == _RANK.size and len(tensors) == 1:
            return PythonUDF(arrive, (*_RANK.unpack(body.data), tensors[0]), {})
        if kind == _ANSWER and len(arrays) == 1:
            return arrays[0]
        if kind == _FAILURE:
            return RuntimeError(content[:-1].decode(errors="replace"))
        if kind == _REFUSAL:
            return RemoteException(content[:-1].decode(errors="replace"), RuntimeError)
        return ProtocolError(f"shardkeep refuses an RPC that it did not send: {len(content)} bytes, kind {kind.hex()}")


def _of_messages(messages: Sequence[Bytes], kind: bytes) -> tuple[bytes, list[torch.Tensor]]:
    if sum(message.size for message in messages) > MAX_INLINE:
        for message in messages:
            in_flight.add(message)
        return kind, [torch.from_numpy(message) for message in messages]
    end = kind if len(messages) == 1 else _SIZE.pack(messages[0].size) + _CALL_OF_TWO
    return b"".join((*(message.data for message in messages), end)), []


def _run(call: Any) -> Any:
    """Runs a call, or refuses what is none. An exception becomes one line for the caller.

    Replaces torch's `_run_function`, which prints a traceback for every call that fails."""
    try:
        if not isinstance(call, PythonUDF):
            raise call if isinstance(call, ProtocolError) else ProtocolError("shardkeep refuses an answer as an RPC")
        return call.func(*call.args, **call.kwargs)
    except Exception as error:
        _log.warning("call refused", once=type(error).__name__, why=first_line(error))
        return RemoteException(first_line(error), RuntimeError)


def install() -> None:
    """Makes torch RPC of this process write and read calls as this module does."""
    envelope: Any = Envelope()  # type: ignore[no-untyped-call]
    rpc_internal._internal_rpc_pickler = rpc.api._default_pickler = envelope
    rpc_internal._run_function = _run
