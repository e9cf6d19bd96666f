"""Reads the run folder, for people's commands and for processes that look for the coordinator. Writes nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from shardkeep.base.errors import ConfigError, UserError
from shardkeep.base.machine.owners import check_unshared
from shardkeep.ps.control.grpc.endpoint import Endpoint, read_token
from shardkeep.run.json_files import read_json
from shardkeep.run.state_files import NAMES as STANDING_NAMES
from shardkeep.run.state_files import StandingFiles
from shardkeep.trust.tokens import token_of, token_path


class RunReader:
    """Reads the files of one run. `shardkeep/run/folder.py` lists them."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.logs = self.path / "logs"
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.telemetry_path = self.path / "telemetry.jsonl"

    def log_path(self, role: str, index: int) -> Path:
        return self.logs / f"{role}-{index}.log"

    @property
    def code_folder(self) -> Path | None:
        """Where the user's own modules are."""
        found = (read_json(self.path / "code.json") or {}).get("folder")
        return None if found is None else Path(str(found))

    @property
    def code(self) -> dict[str, str]:
        """Digests of the code that the run began with (code.py); {} = of an earlier version, which wrote none."""
        return dict((read_json(self.path / "code.json") or {}).get("digests", {}))

    @property
    def token_path(self) -> Path:
        """What every call to the coordinator must carry lies elsewhere (tokens.py)."""
        return token_path(self.path)

    @property
    def has_standing(self) -> bool:
        """Whether a coordinator has kept anything, damaged or not."""
        return any((self.path / name).exists() for name in STANDING_NAMES)

    def take_over(self) -> dict[str, Any]:
        """Returns the persisted state of a coordinator that died. Raises UserError if there is none."""
        try:
            if (kept := StandingFiles(self.path).read()) is not None:
                return kept
            lacks = f"{' and '.join(STANDING_NAMES)} are gone from {self.path}"
        except UserError as error:
            lacks = str(error)
        raise UserError(f"no coordinator can take over, for its members are known to nobody: {lacks}")

    def summary(self) -> dict[str, Any] | None:
        """What summary.json holds, or None while the job runs."""
        return read_json(self.path / "summary.json")

    def address(self) -> str | None:
        """The coordinator's address, or None before it listens."""
        return coordinator_in(self.path)

    def endpoint(self, token_file: Path | None = None) -> Endpoint | None:
        """The coordinator, without TLS; None before it listens and after the job.

        `token_file`: None = this user's own for the folder; then others must not be able to change the folder. Raises
        ConfigError: they are, or there is no token for us."""
        address = self.address()
        if address is None or self.summary() is not None:
            return None
        if token_file is None:
            check_ours(self.path)
        return Endpoint(address, token_of(self.path) if token_file is None else read_token(token_file))

    def coordinator_command(self) -> list[str] | None:
        """What takes over from the coordinator, as arguments; None = it was not started by hand."""
        found = (read_json(self.path / "coordinator.json") or {}).get("take_over")
        return None if found is None else [str(part) for part in found]

    def tls_option(self) -> str | None:
        """The `--tls` folder of a coordinator that was started by hand; None = it has none."""
        command = self.coordinator_command() or []
        return command[command.index("--tls") + 1] if "--tls" in command else None

    def coordinator_pids(self) -> set[int]:
        """The coordinator's process, where one has listened."""
        found = read_json(self.path / "coordinator.json")
        return set() if found is None else {int(found["pid"])}

    def coordinator_fact(self, key: str) -> str:
        """`pid_space` or `started` of the coordinator; "" = none has listened, or one of an earlier version."""
        return str((read_json(self.path / "coordinator.json") or {}).get(key, ""))

    def member_list(self) -> list[dict[str, Any]]:
        """The members of the current generation; empty before the first."""
        return list((read_json(self.path / "members.json") or {}).get("members", ()))


class MetricsTail:
    """Reads what was added to a file of lines since the last look; a half-written line waits for its end.

    A file that was written again (`telemetry_file.py`) is read from the line after the last one that was read. If that
    is not there any more, the next look begins as the first one did, and `restarts` grows before it yields a record."""

    def __init__(self, path: Path, *, from_end: bool = False, most_bytes: int | None = None) -> None:
        """`from_end`: what is there already has been read. `most_bytes`: of a longer file, the first look reads so many
        bytes at its end."""
        self._path = path
        self._position = path.stat().st_size if from_end and path.exists() else 0
        self._most_bytes = most_bytes
        self._last = b""
        """The last line that was read."""
        self.restarts = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                whole = self._added(file)
        except FileNotFoundError:
            return
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):  # a coordinator was killed while it wrote the line
                yield json.loads(line)

    def _added(self, file: BinaryIO) -> bytes:
        """The whole lines that nobody has read."""
        rewritten = not self._has_last(file)
        if rewritten:
            self._position = 0
        if self._most_bytes is not None and not self._position:
            self._position = max(0, file.seek(0, 2) - self._most_bytes)  # in a line, which is no JSON then
        file.seek(self._position)
        added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._position += len(whole)
        if rewritten:
            at = (b"\n" + whole).rfind(b"\n" + self._last)
            self.restarts += at < 0
            whole = whole[at + len(self._last) :] if at >= 0 else whole
        if whole:
            self._last = whole[whole.rfind(b"\n", 0, -1) + 1 :]
        return whole

    def _has_last(self, file: BinaryIO) -> bool:
        """Whether the file has the last line where it was read."""
        file.seek(max(0, self._position - len(self._last)))
        return file.read(len(self._last)) == self._last


def check_ours(run: Path, *, what: str = "run folder") -> None:
    """Raises ConfigError where others could have put something into a run folder that is acted upon: an address, a
    config, the folder of modules. Also where nobody may look. `what`: how the message begins."""
    for path in (run, *(run / name for name in ("config.yaml", "code.json", "coordinator.json", *STANDING_NAMES))):
        try:
            there = path == run or path.exists()
        except OSError as error:
            raise ConfigError(f"{what} {run}: cannot be read ({error.strerror or error})") from error
        if there:
            check_unshared(path, what=what)


def coordinator_in(run: Path) -> str | None:
    """The address of the coordinator of a run folder, or None before it listens."""
    found = read_json(run / "coordinator.json")
    return None if found is None else str(found["address"])


def latest_run(root: Path = Path("runs")) -> Path | None:
    """The run folder under `root` that was started last, or None."""
    found = [p.parent for p in root.glob("*/config.yaml")]
    return max(found, key=lambda p: (p / "config.yaml").stat().st_mtime, default=None)
