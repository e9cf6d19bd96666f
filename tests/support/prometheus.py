"""A real Prometheus that scrapes a job, and its answers. On loopback alone."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.support.cluster import listening_ports, within

PROGRAM = shutil.which("prometheus")
START_S = 60.0
LIMIT_S = 90.0
Labels = dict[str, str]


class Prometheus:
    """Scrapes what `targets` names, once a second. Use in a `with`.

    Args:
        folder: For its config, its data and its log.
        targets: URL of a job's /sd.
        credentials: File with the view token.
        rules: Files of alert rules.
    """

    def __init__(self, folder: Path, targets: str, credentials: Path, *rules: Path) -> None:
        assert PROGRAM is not None, "prometheus is not installed: scripts/install-all"
        folder.mkdir()
        access = {"authorization": {"type": "Bearer", "credentials_file": str(credentials)}}
        job = {
            "job_name": "shardkeep",
            **access,
            "http_sd_configs": [{"url": targets, "refresh_interval": "1s", **access}],
        }
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rule) for rule in rules],
            "scrape_configs": [job],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
        self._url = ""

    def __enter__(self) -> Prometheus:
        process = psutil.Process(self._process.pid)
        within(START_S, lambda: bool(listening_ports(process)), "prometheus does not listen", self._runs)
        self._url = f"http://127.0.0.1:{listening_ports(process)[0]}"
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            print(f"---- targets: {json.dumps(self._get('targets')['activeTargets'], indent=1)}")
            print(f"---- prometheus: {Path(self._log.name).read_text(errors='replace')[-4000:]}")
        self._process.kill()
        self._process.wait()
        self._log.close()

    def query(self, expression: str) -> list[tuple[Labels, float]]:
        """The values of an expression now that are numbers. Fails for an expression that is none."""
        reply = self._get("query", query=expression)
        assert reply["resultType"] in ("vector", "scalar"), expression
        found = [(one["metric"], float(one["value"][1])) for one in reply["result"]]
        return [(labels, value) for labels, value in found if not math.isnan(value)]

    def value(self, expression: str) -> float | None:
        """The only value of an expression; None = there is none."""
        found = self.query(expression)
        assert len(found) < 2, f"{expression}: {found}"
        return found[0][1] if found else None

    def rules(self) -> list[dict[str, Any]]:
        """The alert rules with their health and their alerts."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def until(self, expression: str, value: float, *, limit_s: float = 120.0) -> None:
        """Waits until the only value of an expression is this one."""
        within(limit_s, lambda: self.value(expression) == value, f"{expression} is not {value}", self._runs)

    def empty(self, expressions: list[str], *, limit_s: float) -> list[str]:
        """Waits until no expression is without a value; those that are after `limit_s`."""
        end = time.monotonic() + limit_s
        while (left := [one for one in expressions if not self.query(one)]) and time.monotonic() < end:
            time.sleep(0.5)
        return left

    def _runs(self) -> bool:
        return self._process.poll() is None

    def _get(self, what: str, **arguments: str) -> dict[str, Any]:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=LIMIT_S) as reply:
            return dict(json.load(reply)["data"])
