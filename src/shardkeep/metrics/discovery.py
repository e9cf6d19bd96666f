"""The targets of a job in the form of Prometheus' `http_sd_configs`: JSON, one group per process."""

from __future__ import annotations

import json
from collections.abc import Iterable
from urllib.parse import urlsplit


def targets(addresses: Iterable[str], *, job: str, run: str) -> tuple[bytes, str]:
    """A body and its type: the targets at `addresses`, each an URL of metrics.

    `job`, `run`: the job's name, and its run folder's."""
    groups = []
    for address in dict.fromkeys(addresses):
        url = urlsplit(address)
        labels = {"__scheme__": url.scheme, "__metrics_path__": url.path, "shardkeep_job": job, "run": run}
        groups.append({"targets": [url.netloc], "labels": labels})
    return json.dumps(groups).encode(), "application/json"
