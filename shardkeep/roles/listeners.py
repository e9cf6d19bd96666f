"""Checks of the addresses where people look at a job: metrics and the page. For the start, before data are prepared."""

from __future__ import annotations

import contextlib

from shardkeep.base.errors import ConfigError
from shardkeep.config import JobConfig
from shardkeep.page.of_job import check_installed
from shardkeep.ps.control.grpc.addresses import split_address
from shardkeep.ps.control.grpc.listening import listening_socket


def check_extras(config: JobConfig) -> None:
    """Raises UserError for a setting whose packages are not installed here."""
    if config.metrics.on:
        from shardkeep.metrics.serving import check_client  # loads asyncio, which a job without metrics need not

        check_client()
    check_installed(config.page)


def check_listeners(config: JobConfig) -> None:
    """Raises UserError if metrics or the page could not be served here now. Leaves nothing open.

    The sockets are open together, so that one port for both is refused."""
    check_extras(config)
    settings = {"metrics.listen": config.metrics.listen if config.metrics.on else None}
    settings["page.listen"] = config.page.listen if config.page.required else None
    with contextlib.ExitStack() as opened:
        for setting, address in settings.items():
            if address is None:
                continue
            try:
                opened.enter_context(listening_socket(*split_address(address, lowest_port=0), backlog=1))
            except ConfigError as error:
                raise ConfigError(f"{setting}: {error}") from error
