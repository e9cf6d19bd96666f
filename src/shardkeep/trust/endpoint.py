"""Where a coordinator listens and what it wants to see: the job's token, and where asked for, TLS. No gRPC."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shardkeep.base.errors import ConfigError, UserError
from shardkeep.base.files import read_private
from shardkeep.trust.tls import Tls

TOKEN_BYTES = 32
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{32,512}")  # one word (RFC 6750), too long to guess


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One coordinator, for those who are let in. Its text is the address alone."""

    address: str
    """HOST:PORT"""
    token: str = field(repr=False)
    tls: Tls | None = field(default=None, repr=False)
    look: Callable[[], str | None] | None = field(default=None, repr=False, compare=False)
    """Reads where it is now; None = it stays."""

    def now(self) -> str:
        """HOST:PORT at this moment, as far as known."""
        with contextlib.suppress(UserError, OSError):
            return (self.look and self.look()) or self.address
        return self.address

    def __str__(self) -> str:
        return self.address


def make_token() -> str:
    """A new token: 256 random bits as hex."""
    return secrets.token_hex(TOKEN_BYTES)


def read_token(path: Path) -> str:
    """The token in a file. Raises ConfigError: it cannot be read, others can read it, or it holds no token."""
    text = read_private(path).decode("ascii", errors="replace").strip()
    if not _TOKEN.fullmatch(text):
        raise ConfigError(f"{path}: holds no token; allowed: one line of 32 to 512 letters, digits or ._~+/=-")
    return text
