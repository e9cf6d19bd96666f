"""How both ends of a control call prove that they know the job's token, which itself never travels. No gRPC.

A call carries a MAC (HMAC-SHA256, RFC 2104) over its method, a number used once, and its message; its answer one over
the call's own MAC and the answer. So a port that is not the coordinator's learns no secret and is not believed, and who
sits between can change neither call nor answer; who can listen in can read both and repeat a call: TLS is for that.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

HEADER = "authorization"
ANSWER_HEADER = "shardkeep-proof"
_SCHEME = "HMAC-SHA256"
Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """What one call shows."""

    nonce: str
    digest: str
    """Of the message."""
    mac: str

    @classmethod
    def make(cls, token: str, method: str, message: bytes) -> Call:
        nonce, digest = secrets.token_hex(16), _digest(message)
        return cls(nonce, digest, _mac(token, "call", method, nonce, digest))

    @classmethod
    def read(cls, value: str) -> Call | None:
        """A header's value; None = it is none of ours."""
        parts = value.split(" ")
        return cls(*parts[1:]) if len(parts) == 4 and parts[0] == _SCHEME else None

    def headers(self) -> Headers:
        return ((HEADER, f"{_SCHEME} {self.nonce} {self.digest} {self.mac}"),)

    def proves(self, token: str, method: str) -> bool:
        """Whether the caller knows the token; whether `message` is what it sent, `carries` says."""
        return _equal(self.mac, _mac(token, "call", method, self.nonce, self.digest))

    def carries(self, message: bytes) -> bool:
        return _equal(self.digest, _digest(message))


def answer_headers(token: str, call: Call, answer: bytes) -> Headers:
    """What goes with an answer: the packed message, or `error_bytes`."""
    return ((ANSWER_HEADER, _mac(token, "answer", call.mac, _digest(answer))),)


def proves_answer(token: str, call: Call, answer: bytes, shown: Sequence[tuple[str, str | bytes]]) -> bool:
    """Whether who made the answer knows the token and had just this call."""
    ((_, expected),) = answer_headers(token, call, answer)
    values = [value for key, value in shown if key == ANSWER_HEADER]
    return len(values) == 1 and isinstance(values[0], str) and _equal(values[0], expected)


def error_bytes(code: str, details: str) -> bytes:
    """A refusal, as answers are proven."""
    return f"error {code} {details}".encode(errors="replace")


def _mac(token: str, *parts: str) -> str:
    text = "\n".join(("shardkeep", *parts))  # no part has a line break: hex, and names of methods
    return hmac.new(token.encode(), text.encode(errors="replace"), hashlib.sha256).hexdigest()


def _digest(message: bytes) -> str:
    return hashlib.sha256(message).hexdigest()


def _equal(shown: str, expected: str) -> bool:
    return hmac.compare_digest(shown.encode(errors="replace"), expected.encode())
