"""What a stranger may send to a port."""

from __future__ import annotations

import random

GARBAGE = {
    "nothing": b"",
    "zeros": bytes(4096),
    "ones": b"\xff" * 65536,
    "noise": random.Random(1).randbytes(65536),
    "a long length": (1 << 40).to_bytes(8, "little") + bytes(100),
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "half of TLS": bytes.fromhex("16030100c8010000c40303"),
}
