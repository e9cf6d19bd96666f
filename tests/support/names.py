"""Names whose addresses a test decides, in this process."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def know_names(monkeypatch: pytest.MonkeyPatch, names: Mapping[str, Sequence[str]]) -> None:
    """Resolves these names to their addresses, none = nobody knows it; others as ever. `names` may change later."""
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in names:
            return real(host, *args, **kwargs)
        if not names[host]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [one for address in names[host] for one in real(address, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
