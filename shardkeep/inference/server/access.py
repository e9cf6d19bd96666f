"""Access: who may call a server: anybody on this machine, or who shows a token or a certificate."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from shardkeep.base.errors import ConfigError
from shardkeep.ps.control.grpc.addresses import is_loopback
from shardkeep.ps.control.grpc.endpoint import read_token
from shardkeep.ps.control.grpc.tls import Tls, read_tls
from shardkeep.trust.view import shows_token


@dataclass(frozen=True, slots=True)
class Access:
    """`token`: that every call shows; None = no token. `tls`: mutual TLS; None = plain."""

    token: str | None = field(default=None, repr=False)
    tls: Tls | None = field(default=None, repr=False)
    folder: Path | None = None
    """Of the certificates."""

    WHERE: ClassVar[str] = "no token, or a wrong one; send the header authorization: Bearer TOKEN"

    @classmethod
    def read(cls, token_file: Path | None, tls: Path | None) -> Access:
        """Raises ConfigError for files that cannot be used."""
        token = None if token_file is None else read_token(token_file)
        return cls(token, None if tls is None else read_tls(tls), tls)

    def check_host(self, option: str, host: str) -> None:
        """Raises ConfigError for an address that other machines may reach, where anybody could call."""
        if self.token is None and self.tls is None and not is_loopback(host):
            raise ConfigError(
                f"{option} {host}: other machines may reach it; allowed: 127.0.0.1, or any address with "
                "--token-file FILE or --tls DIR (docs/guide/security.md)"
            )

    def admits(self, header: bytes | None) -> bool:
        """Whether the value of an HTTP header `authorization` shows the token."""
        return self.token is None or shows_token(header, self.token)

    def ssl_context(self) -> ssl.SSLContext | None:
        """For a listener that takes only peers whose certificate the same authority signed."""
        if self.folder is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "cert.pem", self.folder / "key.pem")
        context.load_verify_locations(self.folder / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        return context
