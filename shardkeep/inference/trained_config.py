"""The config of a trained run. Loads no torch and no kernel."""

from __future__ import annotations

from pathlib import Path

from shardkeep.base.errors import UserError
from shardkeep.base.modules import search_last
from shardkeep.config import JobConfig, load_config
from shardkeep.run.reader import RunReader, check_ours


def config_of(run: Path) -> JobConfig:
    """The config of a run; its own modules can be imported from then on. Raises UserError: it is no run folder."""
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run}: is not a run folder; it has no config.yaml")
    check_ours(run)
    config = load_config(run / "config.yaml")
    folder = RunReader(run).code_folder
    if config.own_modules and folder is not None:
        search_last(folder)
    return config
