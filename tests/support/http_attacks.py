"""Requests that no browser makes: raw targets, long heads, garbage, readers that do not read. On loopback only."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Address = tuple[str, int]
LIMIT_S = 90.0
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Reply:
    """Status 0: the connection was closed without a reply."""

    status: int
    head: str
    body: bytes


def request(
    address: Address,
    target: str = "/",
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    limit_s: float = LIMIT_S,
) -> Reply:
    """Sends one request as it is, with no normalization of `target`, and reads to the end."""
    fields = {"Host": f"{address[0]}:{address[1]}", "Connection": "close", **(headers or {})}
    if body:
        fields["Content-Length"] = str(len(body))
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return send(address, f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + body, limit_s=limit_s)


def send(address: Address, sent: bytes, *, limit_s: float = LIMIT_S) -> Reply:
    """Sends bytes and reads until the other side closes, or until the limit, which is an error."""
    end = time.monotonic() + limit_s
    received = bytearray()
    with socket.create_connection(address, timeout=limit_s) as connection:
        with contextlib.suppress(OSError):  # it may close before it has read everything
            connection.sendall(sent)
        with contextlib.suppress(ConnectionError):
            while len(received) < MOST_BYTES:
                connection.settimeout(max(0.01, end - time.monotonic()))
                if not (piece := connection.recv(1 << 16)):
                    break
                received += piece
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    status = int(words[1]) if len(words) > 1 and words[1][:3].isdigit() else 0
    return Reply(status, head.decode("latin-1"), body)


def garbage(seed: int, count: int) -> Iterator[bytes]:
    """Bytes that are no request: noise, half requests, wrong lengths, other protocols."""
    random_ = random.Random(seed)
    heads = (
        b"",
        b"GET",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\nx",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"\x00" * 64 + b"\r\n\r\n",
    )
    for number in range(count):
        yield heads[number % len(heads)] + random_.randbytes(random_.randrange(2000)) + b"\r\n\r\n"


def throw(address: Address, sent: bytes) -> None:
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=LIMIT_S) as connection:
        connection.sendall(sent)
