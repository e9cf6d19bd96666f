"""Small jobs that are resumed or lose members, and the data that they read."""

from __future__ import annotations

from dataclasses import replace

from shardkeep.config import JobConfig, parse_config
from shardkeep.workers.data.samples import Data
from tests.support.samples import as_data, draw

TOWERS = {"sgd": "{name: sgd, lr: 0.01, momentum: 0.9}", "adam": "{name: adam, lr: 0.01, schedule: {warmup_steps: 12}}"}
COMPRESSION = (
    "{ids: coded, push: {values: int4, keep: 0.3, pool_rows: 500, second_moment: true}, pull: {values: int8},"
    " tower: {name: %s}}"
)
"""Of all messages; `%` the form of the tower's sums."""


def job_config(servers: int, workers: int, *, tower: str = "adam", mode: str = "sync", **more: object) -> JobConfig:
    return parse_config(
        f"""
        seed: 3
        servers: {servers}
        workers: {workers}
        consistency: {{mode: {mode}}}
        model: {{name: dlrm, bottom: [8], hidden: [8]}}
        tables: {{default: {{dim: 4, optimizer: {{name: adam, lr: 0.01}}}}, b: {{dim: 6}}}}
        tower: {{compile: off, optimizer: {TOWERS[tower]}}}
        train: {{batch_size: 8, epochs: 2}}
        checkpoint: {{every_steps: 3, keep: 100}}
        """,
        [f"{key.replace('__', '.')}={value}" for key, value in more.items()],
    )


def drawn_data(fingerprint: str = "aaaa-eeee") -> Data:
    """Of 100 samples. `fingerprint`: of the training data and the evaluation data."""
    return replace(as_data(draw(100, pooling="mean"), draw(30, seed=1, pooling="mean")), fingerprint=fingerprint)
