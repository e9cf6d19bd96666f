"""Checks of the addresses where people look at a job: metrics and the page. For the start, before data are prepared."""

from __future__ import annotations

import contextlib

from shardkeep.base.errors import ConfigError
from shardkeep.base.net.addresses import listening_socket, split_address
from shardkeep.base.plugging.packages import METRICS, PAGE, missing
from shardkeep.config import JobConfig


def check_extras(config: JobConfig) -> None:
    """Raises UserError for a setting whose packages are not installed here."""
    if config.web.has_metrics and (need := missing(*METRICS)) is not None:
        raise ConfigError(f"web.metrics: {need}; or off")
    if config.web.needs_page and (need := missing(*PAGE)) is not None:
        raise ConfigError(f"web.page: {need}; or auto")


def check_listeners(config: JobConfig) -> None:
    """Raises UserError if metrics or the page could not be served here now. Leaves nothing open.

    The sockets are open together, so that one port for both is refused."""
    check_extras(config)
    settings = {"web.metrics": config.web.metrics if config.web.has_metrics else None}
    settings["web.page"] = config.web.page if config.web.needs_page else None
    with contextlib.ExitStack() as opened:
        for setting, address in settings.items():
            if address is None:
                continue
            try:
                opened.enter_context(listening_socket(*split_address(address, lowest_port=0), backlog=1))
            except ConfigError as error:
                raise ConfigError(f"{setting}: {error}") from error
