"""What a checkpoint's manifest says of the job, and whether a job may resume from it. Loads no torch."""

from __future__ import annotations

from typing import Any

from shardkeep.base.errors import ConfigError
from shardkeep.base.machine.versions import versions
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints.folder import Checkpoint
from shardkeep.run.origin.warm_start import changed_columns
from shardkeep.workers.data.samples import Data


def checkpoint_facts(config: JobConfig, data: Data, samples: int) -> dict[str, Any]:
    """The data position, what the checkpoint is taken with, and how raw columns become inputs, as JSON types."""
    return {
        "samples": samples,
        "epoch_samples": len(data.train),
        "data": data.fingerprint,
        "servers": config.servers,
        "workers": config.workers,
        "seed": config.seed,
        "versions": versions(),
        "inputs": data.inputs,
        **({"label_means": means} if (means := data.means_of_numbers(config.train.loss)) else {}),
    }


def check_facts(checkpoint: Checkpoint, config: JobConfig, data: Data) -> str:
    """A remark for the user on evaluation data that are not those of the checkpoint; "" = none.

    Raises ConfigError when the training data or the seed are others: the data position would be one in another order.
    """
    facts = checkpoint.facts
    if facts.get("from"):
        changed_columns(facts.get("inputs"), data.inputs)
        return ""
    if facts.get("seed") != config.seed:
        raise ConfigError(f"seed: {config.seed}; the checkpoint {checkpoint.folder} was taken with {facts.get('seed')}")
    (train, held), (train_before, held_before) = _parts(data.fingerprint), _parts(str(facts.get("data", "")))
    known = bool(train and train_before)  # a source of your own may have no fingerprint
    same = len(data.train) == facts.get("epoch_samples") and (train == train_before or not known)
    if not same and not (train and config.data.accept == train):
        counts = f"{len(data.train):,} samples now, {facts.get('epoch_samples', 0):,} then"
        marks = f"fingerprint {train} now, {train_before} then; " if known else ""
        to_do = f", or --set data.accept={train} to train on with these" if train else ""
        raise ConfigError(
            f"data: the training data are not those of {checkpoint.folder} ({marks}{counts}); put those back{to_do}"
        )
    if known and held != held_before:
        return (
            f"the evaluation data are not those of {checkpoint.folder.name}; figures of evaluations before and after "
            "cannot be compared"
        )
    return ""


def _parts(fingerprint: str) -> tuple[str, str]:
    train, _, held = fingerprint.partition("-")
    return train, held
