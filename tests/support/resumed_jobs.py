"""Small jobs that are resumed, and the data that they read."""

from __future__ import annotations

from dataclasses import replace

from shardkeep.config import JobConfig, parse_config
from shardkeep.workers.data.samples import Data
from tests.support.samples import as_data, draw

TOWERS = {"sgd": "{name: sgd, lr: 0.01, momentum: 0.9}", "adam": "{name: adam, lr: 0.01, schedule: {warmup_steps: 12}}"}


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


def drawn_data() -> Data:
    return as_data(draw(100, pooling="mean"), draw(30, seed=1, pooling="mean"))


def marked(fingerprint: str) -> Data:
    return replace(drawn_data(), fingerprint=fingerprint)
