"""GET requests as a person or a program sends them."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass

LIMIT_S = 90.0


@dataclass(frozen=True)
class Got:
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def text(self) -> str:
        return self.body.decode()


def get(url: str, token: str | None = None, *, tls: ssl.SSLContext | None = None, method: str = "GET") -> Got:
    """The reply, also one with the status of an error."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S, context=tls) as reply:
            return Got(reply.status, reply.read(), dict(reply.headers))
    except urllib.error.HTTPError as error:
        return Got(error.code, error.read(), dict(error.headers))
