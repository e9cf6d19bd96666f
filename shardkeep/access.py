"""How a process comes to the coordinator that a person named, and to its token. Prints none."""

from __future__ import annotations

from pathlib import Path

from shardkeep.base.errors import UserError
from shardkeep.ps.control.endpoint import Endpoint, read_token
from shardkeep.ps.control.tls import read_tls
from shardkeep.roles import coordinator_address
from shardkeep.tokens import token_of


def endpoint_of(coordinator: str, *, token_file: Path | None = None, tls: Path | None = None) -> Endpoint:
    """The coordinator that a person named, as HOST:PORT or by its run folder; blocks until that tells its address.

    Args:
        coordinator: HOST:PORT, or the run folder.
        token_file: The token; None = this user's own for that run folder.
        tls: Folder with ca.pem, cert.pem and key.pem; None = the coordinator speaks no TLS.

    Raises:
        UserError: There is no token, or it or the TLS files are not fit for use.
        DeadlineExceeded: The run folder never said where the coordinator listens.
    """
    run = Path(coordinator)
    if token_file is None and not run.is_dir():
        raise UserError(
            f"--coordinator {coordinator}: the job's token is needed; give --token-file FILE (the coordinator said "
            "where it lies), or, as its user and where you can read its run folder, --coordinator RUN"
        )
    known = None if tls is None else read_tls(tls)
    token = None if token_file is None else read_token(token_file)
    address = coordinator_address(coordinator)
    return Endpoint(address, token or token_of(run), known)
