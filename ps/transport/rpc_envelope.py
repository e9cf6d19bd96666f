"""How many bytes torch RPC puts on its sockets beside the messages it carries. Sends nothing.

TensorPipe over `uv` and `basic`, as `transport.same_host: sockets` and other hosts have it, torch 2.13: for each call
a descriptor, the pickled call, and the pickled shapes of its tensors; for each tensor its length before it. All have
fixed sizes, except the name of the target and the numbers, which are written as short as they can be. Nobody publishes
these sizes: tests/ps/rpc/test_envelope.py compares them with the kernel's counters and fails when torch changes them.
"""

from __future__ import annotations

_CALL = 395
"""A call without tensors and without its target's name."""
_ANSWER = 330
"""An answer without its tensor."""
_TENSOR = 88
"""A tensor of up to 127 bytes."""


def call_bytes(server: int, generation: int, *sizes: int) -> int:
    """Of a call that carries messages of these sizes to a server."""
    name = f"server{server}-g{generation}-01234567"  # RpcGroup.server_name; the digits are the group's own
    return _CALL + len(name) + sum(_TENSOR + _number_bytes(size) for size in sizes)


def next_message_bytes(size: int) -> int:
    """Of one more message in a call."""
    return _TENSOR + _number_bytes(size)


def answer_bytes(size: int) -> int:
    """Of an answer of this size."""
    return _ANSWER + _TENSOR + _number_bytes(size)


def _number_bytes(size: int) -> int:
    """A tensor's size stands once in the descriptor (libnop: 1, 2, 3 or 5 bytes) and twice in its pickled shape (2, 3
    or 5 bytes); here what that is beyond the shortest form."""
    descriptor = 0 if size < 1 << 7 else 1 if size < 1 << 8 else 2 if size < 1 << 16 else 4
    pickled = 0 if size < 1 << 8 else 1 if size < 1 << 16 else 3
    return descriptor + 2 * pickled
