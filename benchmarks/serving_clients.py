"""Clients of `serving.py`: many connections in one thread, each with one request at a time, over ready-made bytes.

They read no more of a reply than its end, so that one core can load a server that has another one: HTTP/1.1, and gRPC
as frames of HTTP/2 (RFC 9113), whose headers are written once.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LIMIT_S = 20.0


class HttpClient:
    """One HTTP/1.1 connection."""

    def __init__(
        self, host: str, port: int, path: str, headers: Mapping[str, str], bodies: Sequence[bytes], *, start: int
    ) -> None:
        self.socket = socket.create_connection((host, port), LIMIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lines = [f"POST {path} HTTP/1.1", f"host: {host}:{port}", *(f"{k}: {v}" for k, v in headers.items())]
        head = "\r\n".join(lines)
        self._requests = [f"{head}\r\ncontent-length: {len(b)}\r\n\r\n".encode() + b for b in bodies]
        self._next = start
        self._buffer = b""

    def send(self) -> None:
        self.socket.sendall(self._requests[self._next % len(self._requests)])
        self._next += 1

    def receive(self) -> bytes | None:
        """Reads what is there; the body once it is whole."""
        self._buffer += self.socket.recv(1 << 18)
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return None
        at = head.lower().index(b"content-length:") + 15
        if len(body) < int(head[at:].split(b"\r\n", 1)[0]):
            return None
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"{head[:40]!r} {body[:300]!r}")
        self._buffer = b""
        return body

    def first(self) -> bytes:
        return _first(self)


class GrpcClient:
    """One HTTP/2 connection with one stream after the other."""

    def __init__(self, host: str, port: int, messages: Sequence[bytes], *, start: int) -> None:
        self.socket = socket.create_connection((host, port), LIMIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        names = {
            ":method": "POST",
            ":scheme": "http",
            ":path": "/inference.GRPCInferenceService/ModelInfer",
            ":authority": f"{host}:{port}",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        # HPACK (RFC 7541, 6.2.2): a literal without indexing, with a new name
        pairs = [(name.encode(), value.encode()) for name, value in names.items()]
        self._headers = b"".join(b"\0" + _literal(name) + _literal(value) for name, value in pairs)
        self._data = [b"\0" + struct.pack(">I", len(m)) + m for m in messages]
        self._next, self._stream, self._buffer, self._received = start, 1, b"", b""
        self._unsent = b""
        self._window = 65_535  # of the connection, for what is sent
        self._initial = self._stream_window = 65_535
        # settings: the server may send 16 MB a stream, and as much on the connection
        settings = struct.pack(">HI", 4, 1 << 24)
        update = struct.pack(">I", (1 << 30))
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, settings) + _frame(8, 0, 0, update))

    def send(self) -> None:
        self._unsent = self._data[self._next % len(self._data)]
        self._next += 1
        self._stream_window = self._initial
        self._received = b""
        self._push(_frame(1, 4, self._stream, self._headers))

    def receive(self) -> bytes | None:
        self._buffer += self.socket.recv(1 << 18)
        done = None
        while len(self._buffer) >= 9:
            size = int.from_bytes(self._buffer[:3], "big")
            if len(self._buffer) < 9 + size:
                break
            kind, flags = self._buffer[3], self._buffer[4]
            stream = int.from_bytes(self._buffer[5:9], "big")
            payload, self._buffer = self._buffer[9 : 9 + size], self._buffer[9 + size :]
            done = self._take(kind, flags, stream, payload) or done
        return done

    def first(self) -> bytes:
        return _first(self)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> bytes | None:
        if kind == 0 and stream == self._stream:
            self._received += payload
        elif kind == 4 and not flags & 1:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[at : at + 6])
                if name == 4:
                    self._stream_window += value - self._initial
                    self._initial = value
            self._push(_frame(4, 1, 0, b""))
        elif kind == 6 and not flags & 1:
            self._push(_frame(6, 1, 0, payload))
        elif kind == 8:
            more = int.from_bytes(payload, "big")
            if stream == 0:
                self._window += more
            elif stream == self._stream:
                self._stream_window += more
            self._push(b"")
        elif kind in (3, 7):
            raise SystemExit(f"the server closed the stream: {payload!r}")
        if kind in (0, 1) and flags & 1 and stream == self._stream:
            self._stream += 2
            if not self._received:
                raise SystemExit(f"the server answered with an error: {payload!r}")
            return self._received
        return None

    def _push(self, before: bytes) -> None:
        """Sends frames, and as much of the message as the windows let through."""
        parts = [before]
        while self._unsent and (size := min(len(self._unsent), self._window, self._stream_window, 16_384)) > 0:
            part, self._unsent = self._unsent[:size], self._unsent[size:]
            self._window -= size
            self._stream_window -= size
            parts.append(_frame(0, 0 if self._unsent else 1, self._stream, part))
        self.socket.sendall(b"".join(parts))


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _literal(text: bytes) -> bytes:
    return bytes((len(text),)) + text


def _first(client: Any) -> bytes:
    """The reply to the first request."""
    client.send()
    while (reply := client.receive()) is None:
        pass
    return bytes(reply)


def run(clients: Sequence[Any], seconds: float) -> dict[str, float]:
    """All clients at the same time: requests/s, and percentiles of the time to a reply."""
    selector = selectors.DefaultSelector()
    for client in clients:
        selector.register(client.socket, selectors.EVENT_READ, client)
    times, sent = list[float](), dict[int, float]()
    began, cpu_began = time.perf_counter(), time.process_time()
    for client in clients:
        client.send()
        sent[id(client)] = time.perf_counter()
    end, waiting = began + seconds, len(clients)
    while waiting:
        ready = selector.select(LIMIT_S)
        if not ready:
            raise SystemExit(f"no reply within {LIMIT_S} s")
        for key, _ in ready:
            client = key.data
            if client.receive() is None:
                continue
            now = time.perf_counter()
            times.append(now - sent[id(client)])
            if now < end:
                sent[id(client)] = now
                client.send()
            else:
                waiting -= 1
    took, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    selector.close()
    p50, p99 = np.percentile(times, [50, 99]) * 1000
    figures = {"requests_per_s": len(times) / took, "p50_ms": float(p50), "p99_ms": float(p99)}
    return figures | {"client_cpu": cpu / took, "all_requests": len(times)}
