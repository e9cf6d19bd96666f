"""connect: joins a job whose coordinator and servers run, as one of its trainers."""

from __future__ import annotations

import contextlib
from pathlib import Path

from shardkeep.base.files import local
from shardkeep.base.net.interfaces import check_advertised
from shardkeep.launch.machine import index_of, is_numbered, restarts_left, world_size
from shardkeep.loop.client import EmbeddingClient
from shardkeep.loop.joining import Tables, checked_tables, join, only_client, register, run_of, tables_of
from shardkeep.member.access import endpoint_of
from shardkeep.run.trained import config_of


def connect(
    coordinator: str | Path | None = None,
    *,
    index: int | None = None,
    tables: Tables | None = None,
    advertise: str = "127.0.0.1",
    token_file: str | Path | None = None,
    tls: str | Path | None = None,
    insecure_data_plane: bool = False,
    timeout_s: float = 10.0,
    restarted: bool | None = None,
) -> EmbeddingClient:
    """Joins a job, whose coordinator and servers you started, as its trainer `index`.

    Blocks until all servers and trainers of the job have joined. All trainers must take the same number of steps.

    Args:
        coordinator: The run folder, if this process can read it; or HOST:PORT, with `token_file`; None = the run
            folder in SHARDKEEP_RUN, which `shardkeep with` sets.
        index: The number of this trainer, from 0 to `workers` - 1 of the job's config; None = the number that a
            launcher set in this process's environment, or 0 where the run folder's job has one trainer.
        tables: The tables, the same in every trainer; None = the named `tables` of the job's config. Where that names
            none, `client.declare` and `shardkeep.torchrec.shard` declare them, and they block in place of this call.
        advertise: Address of this machine for the other members.
        token_file: File with the job's token, readable only by its owner; None = your token for the run folder.
        tls: Folder with ca.pem, cert.pem and key.pem, if the coordinator uses TLS; None = no TLS.
        insecure_data_plane: Accepts an `advertise` that other machines can reach; see docs/guide/security.md.
        timeout_s: Seconds to wait for the coordinator.
        restarted: Whether a launcher starts all trainers again after an error of this one. Then such an error does not
            end the job. None = what the launcher's variables say.

    Raises:
        UserError: The tables, the address, the token, the TLS files or the index are wrong.
        JobError: The job failed or was stopped before training.
        DeadlineExceeded: No coordinator answers at the address.
    """
    specs = None if tables is None else checked_tables(tables)
    host = check_advertised("advertise", advertise, accepted=insecure_data_plane)
    run = run_of(coordinator)
    lone = index is None and not is_numbered() and (Path(run) / "config.yaml").is_file()
    place = 0 if lone and config_of(Path(run)).workers == 1 else index_of(index)
    world = world_size() if index is None else None
    again = restarts_left() if restarted is None else restarted
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_client())
        endpoint = endpoint_of(str(run), token_file=_path(token_file), tls=_path(tls))
        ending = stack.pop_all()
    registered = register(endpoint, place, timeout_s, ending=ending, world=world, restarted=again, advertise=host)
    specs = tables_of(registered.config) if specs is None else specs
    return EmbeddingClient(join(registered, specs) if specs else registered)


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(local(given))
