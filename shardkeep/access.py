"""How a process comes to the job's token: the coordinator makes or reads it, the others find it. Prints none."""

from __future__ import annotations

from pathlib import Path

from shardkeep.base.errors import UserError
from shardkeep.base.files import atomic_write
from shardkeep.ps.control.endpoint import Endpoint, make_token, read_token
from shardkeep.ps.control.tls import read_tls
from shardkeep.report import RunFolder, token_in
from shardkeep.roles import coordinator_address


def keep_token(folder: RunFolder, given: str | None) -> str:
    """The token of the job in this run folder, kept there for those who may read it.

    `given`, else that of a coordinator that was here before (its members still have it), else a new one.
    Raises ConfigError where the one that is there is not this user's own, UserError where none can be written."""
    path = folder.token_path
    if given is None and path.exists():
        return read_token(path)
    token = given or make_token()
    try:
        atomic_write(path, token + "\n", private=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error
    return token


def endpoint_of(coordinator: str, *, token_file: Path | None = None, tls: Path | None = None) -> Endpoint:
    """The coordinator that a person named, as HOST:PORT or by its run folder; blocks until that tells its address.

    Args:
        coordinator: HOST:PORT, or the run folder.
        token_file: The token; None = in the run folder.
        tls: Folder with ca.pem, cert.pem and key.pem; None = the coordinator speaks no TLS.

    Raises:
        UserError: There is no token, or it or the TLS files are not fit for use.
        DeadlineExceeded: The run folder never said where the coordinator listens.
    """
    run = Path(coordinator)
    if token_file is None and not run.is_dir():
        raise UserError(
            f"--coordinator {coordinator}: the job's token is needed; give --token-file FILE (the coordinator keeps it "
            "as `token` in its run folder), or, where you can read that folder, --coordinator RUN"
        )
    known = None if tls is None else read_tls(tls)
    token = None if token_file is None else read_token(token_file)
    address = coordinator_address(coordinator)
    return Endpoint(address, token or token_in(run), known)
