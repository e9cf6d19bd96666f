"""Frames as data of a job: they are files of its run folder, where roles, a resume and an evaluation find them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

from shardkeep.base.errors import ConfigError, UserError
from shardkeep.config import JobConfig, load_config, unused


class Frames(TypedDict, total=False):
    """Data of a job in memory, by the key of `data` whose files each replaces; None = there is none. See `table_of`."""

    train: object
    eval: object
    test: object


def with_frames(config: JobConfig, frames: Frames, run_dir: Path) -> JobConfig:
    """The job with the frames in place of the files that it names, written to RUN/data/NAME.feather.

    Raises UserError for a folder that holds a run, ConfigError for a job that names such files itself, DataError.
    """
    if unknown := frames.keys() - Frames.__annotations__.keys():
        raise TypeError(f"train() got an unexpected keyword argument {min(unknown)!r}")
    given = {name: frame for name, frame in frames.items() if frame is not None}
    if not given:
        return config
    from shardkeep.run.new_folder import refuse_taken
    from shardkeep.workers.data.conversion.chunk import plain
    from shardkeep.workers.data.frames import table_of

    if both := [name for name in given if getattr(config.data, name)]:
        raise ConfigError(f"data.{both[0]}: is set, and {both[0]}= is given too; leave one of them out")
    refuse_taken(run_dir)
    tables = {name: table_of(frame, f"{name}=") for name, frame in given.items()}
    paths = {name: (run_dir / "data" / f"{name}.feather").absolute() for name in given}
    files = ["data.source=arrow", *(f"data.{name}={json.dumps([str(path)])}" for name, path in paths.items())]
    job = load_config(config.model_dump(mode="json", exclude_unset=True), files, judged="nothing")
    if idle := sorted(unused(job).keys() - unused(config).keys()):
        raise ConfigError(f"{idle[0]}: {unused(job)[idle[0]]}")

    from pyarrow import feather  # type: ignore[import-untyped]

    try:
        (run_dir / "data").mkdir(parents=True, exist_ok=True)
        for table, path in zip(tables.values(), paths.values(), strict=True):
            feather.write_feather(
                table.from_arrays([plain(values) for values in table.columns], table.column_names), path
            )
    except OSError as error:
        raise UserError(f"{run_dir / 'data'}: cannot be written ({error.strerror or error})") from error
    return job
