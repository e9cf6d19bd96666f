"""How a process comes to the coordinator that a person named, and to its token. Prints none."""

from __future__ import annotations

import time
from pathlib import Path

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import JobError, UserError
from shardkeep.base.files import local
from shardkeep.base.net.addresses import is_address
from shardkeep.member.membership import LISTEN_S
from shardkeep.run.reader import RunReader, check_ours
from shardkeep.trust.endpoint import Endpoint, read_token
from shardkeep.trust.tls import read_tls
from shardkeep.trust.tokens import token_of

ADDRESS_POLL_S = 0.02


def endpoint_of(
    coordinator: str, *, token_file: Path | None = None, tls: Path | None = None, launched: bool = False
) -> Endpoint:
    """The coordinator that a person named, as HOST:PORT or by its run folder; blocks until that tells its address.

    Args:
        coordinator: HOST:PORT, or the run folder.
        token_file: The token; None = this user's own for that run folder.
        tls: Folder with ca.pem, cert.pem and key.pem; None = the coordinator speaks no TLS.
        launched: The same launcher started both, and nobody resumes a job that is over.

    Raises:
        UserError: There is no token, or it or the TLS files are not fit for use; without `token_file`, others could
            change the run folder; as `check_coordinator`.
        JobError: The job is over, and `launched`.
        DeadlineExceeded: The run folder never said where the coordinator listens.
    """
    check_coordinator(coordinator, token_file=token_file)
    known = None if tls is None else read_tls(tls)
    token = None if token_file is None else read_token(token_file)
    if token is None:
        check_ours(Path(coordinator), what="--coordinator")
    address = coordinator_address(coordinator, launched=launched)
    if token is None:  # the folder may have been made meanwhile
        check_ours(Path(coordinator), what="--coordinator")
    look = None if address == coordinator else RunReader(coordinator).address
    return Endpoint(address, token or token_of(Path(coordinator)), known, look)


def check_coordinator(coordinator: str, *, token_file: Path | None = None) -> str | None:
    """Returns at once: what the coordinator's run folder still lacks, a line for the user; None = nothing.

    A missing run folder counts as one that the coordinator will make, if the folder above it is there and
    it is written with a `/`: anything else is misspelt. Raises UserError (neither an address nor a folder, no token)
    and ConfigError."""
    run, there = Path(local(coordinator)), _is_folder(coordinator)
    if not there and is_address(coordinator):
        if token_file is None:
            raise UserError(
                f"--coordinator {coordinator}: the job's token is needed; give --token-file FILE (the coordinator "
                "said where it lies), or, as its user and where you can read its run folder, --coordinator RUN"
            )
    elif not there:
        if run.exists():
            raise UserError(
                f"--coordinator {coordinator}: is a file; allowed: HOST:PORT, or the coordinator's run folder"
            )
        if "/" not in coordinator:
            raise UserError(
                f"--coordinator {coordinator}: is neither HOST:PORT nor a folder that is there; "
                f"for a run folder that the coordinator will make here: ./{coordinator}"
            )
        if not _is_folder(run.parent):
            raise UserError(f"--coordinator {coordinator}: there is no folder {run.parent}")
    if token_file is not None:
        read_token(token_file)
    if is_address(coordinator) and not there:
        return None
    lacks = "does not exist yet" if not there else "" if (run / "config.yaml").exists() else "holds no run yet"
    if RunReader(run).summary() is not None:
        lacks = "holds a job that is over"
    return (
        f"--coordinator {coordinator}: {lacks}; waiting up to {LISTEN_S:g} s for a coordinator there" if lacks else None
    )


def coordinator_address(given: str, *, launched: bool = False) -> str:
    """`--coordinator` as HOST:PORT, or a run folder: then what it says, once the coordinator listens.

    So a role can start before the coordinator does, also before one that resumes a job that is over. Not where a
    launcher started both: there, no other coordinator comes. Raises DeadlineExceeded, JobError."""
    run = Path(given)
    if is_address(given) and not run.is_dir():
        return given
    deadline = Deadline(LISTEN_S)
    while True:
        over, address = RunReader(run).summary(), RunReader(run).address()
        if address is not None and over is None:
            return address
        if over is not None and launched:
            raise JobError(f"{given}: the job is over")
        ended = {} if over is None else over
        lacks = (
            f"holds a job that is over: {ended.get('message') or ended['status']}" if ended else "does not say where"
        )
        deadline.check(f"the coordinator to listen; {given} {lacks}")
        time.sleep(ADDRESS_POLL_S)


def _is_folder(path: str | Path) -> bool:
    """Raises UserError where nobody may look."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError) as error:
        raise UserError(
            f"--coordinator {path}: cannot be read ({getattr(error, 'strerror', None) or error})"
        ) from error
