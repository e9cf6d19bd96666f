"""Access: who may call a listener: anybody on this machine, or who shows a token or a certificate."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from shardkeep.base.net.addresses import check_exposed
from shardkeep.trust.endpoint import read_token
from shardkeep.trust.tls import Tls, read_tls
from shardkeep.trust.view import shows_token


@dataclass(frozen=True, slots=True)
class Access:
    """`token`: that every call shows; None = no token. `tls`: None = plain. `of_peers`: with TLS, peers show a
    certificate of the same authority, too."""

    token: str | None = field(default=None, repr=False)
    tls: Tls | None = field(default=None, repr=False)
    of_peers: bool = True

    WHERE: ClassVar[str] = "no token, or a wrong one; send the header authorization: Bearer TOKEN"

    @classmethod
    def read(cls, token_file: Path | None, tls: Path | None) -> Access:
        """Raises ConfigError for files that cannot be used."""
        token = None if token_file is None else read_token(token_file)
        return cls(token, None if tls is None else read_tls(tls))

    def check_host(self, option: str, host: str) -> None:
        """Raises ConfigError for an address that other machines may reach, where anybody could call."""
        kept = self.token is not None or self.tls is not None
        check_exposed(option, host, accepted=kept, by="--token-file FILE or --tls DIR")

    def admits(self, header: bytes | None) -> bool:
        """Whether the value of an HTTP header `authorization` shows the token."""
        return self.token is None or shows_token(header, self.token)

    def context(self) -> ssl.SSLContext | None:
        """For a listener of HTTPS; None = HTTP."""
        return None if self.tls is None else self.tls.server_context(of_peers=self.of_peers)
