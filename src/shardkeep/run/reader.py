"""Reads the run folder, for people's commands and for processes that look for the coordinator. Writes nothing."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from shardkeep.base.errors import ConfigError, UserError
from shardkeep.base.files import local
from shardkeep.base.machine.owners import check_unshared
from shardkeep.base.net.descriptors import when_free
from shardkeep.run.json_files import CLAIM, number_of, numbered, read_json
from shardkeep.run.state_files import NAMES as STANDING_NAMES, StandingFiles
from shardkeep.trust.endpoint import Endpoint, read_token
from shardkeep.trust.tokens import token_of, token_path


class RunReader:
    """Reads the files of one run. `src/shardkeep/run/folder.py` lists them."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(local(path)).absolute()
        self.logs = self.path / "logs"
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.telemetry_path = self.path / "telemetry.jsonl"
        self.catalogue_path = self.path / "catalogue.arrow"

    def log_path(self, role: str, index: int) -> Path:
        return self.logs / f"{role}-{index}.log"

    @property
    def code_folder(self) -> Path | None:
        """Where the user's own modules are."""
        found = (read_json(self.path / "code.json") or {}).get("folder")
        return None if found is None else Path(str(found))

    @property
    def code(self) -> dict[str, str]:
        """Digests of the code that the run began with (code.py); {} = none are stored."""
        return dict((read_json(self.path / "code.json") or {}).get("digests", {}))

    @property
    def token_path(self) -> Path:
        """What every call to the coordinator must carry lies elsewhere (tokens.py)."""
        return token_path(self.path)

    def number(self) -> int:
        """The highest number that a coordinator has claimed; 0 = none has."""
        return self._highest(CLAIM)

    @property
    def has_standing(self) -> bool:
        """Whether a coordinator has kept anything, damaged or not."""
        return any(name in STANDING_NAMES or number_of(name, *STANDING_NAMES) for name in self.names())

    def take_over(self) -> dict[str, Any]:
        """Returns the persisted state of the last coordinator that kept one. Raises UserError if there is none."""
        try:
            if (kept := self._standing().read()) is not None:
                return kept
            lacks = f"{' and '.join(STANDING_NAMES)} are gone from {self.path}"
        except UserError as error:
            lacks = str(error)
        raise UserError(f"no coordinator can take over, for its members are known to nobody: {lacks}")

    def summary(self) -> dict[str, Any] | None:
        """The summary by the coordinator with the highest number, or None while the job runs."""
        return read_json(numbered(self.path, "summary.json", self.number()))

    def last_summary(self) -> dict[str, Any] | None:
        """That of the last start, also once another coordinator has claimed a number; None = it ended without one."""
        number = self._highest("summary.json")
        late = number < self._highest(*STANDING_NAMES)  # by one whose successor led the job by then
        return None if late else read_json(numbered(self.path, "summary.json", number))

    def address(self) -> str | None:
        """The coordinator's address, or None before it listens."""
        found = self._coordinator().get("address")
        return None if found is None else str(found)

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
        """What a person types after the coordinator's end, as arguments; None = a program starts it again."""
        found = self._coordinator().get("continue")
        return None if found is None else [str(part) for part in found]

    @property
    def by_hand(self) -> bool:
        """Whether a person started the roles one by one."""
        return (self.coordinator_command() or ["", ""])[1] == "coordinator"

    def tls_option(self) -> str | None:
        """The `--tls` folder of a coordinator that a person starts; None = it has none."""
        command = self.coordinator_command() or []
        return command[command.index("--tls") + 1] if "--tls" in command else None

    def coordinator_pids(self) -> set[int]:
        """The coordinator's process, where one has listened."""
        return {int(found["pid"])} if (found := self._coordinator()) else set()

    def coordinator_fact(self, key: str) -> str:
        """`pid_space` or `started` of the coordinator; "" = none has listened."""
        return str(self._coordinator().get(key, ""))

    def member_list(self) -> list[dict[str, Any]]:
        """The members of the current generation; empty before the first."""
        return list((read_json(self.path / "members.json") or {}).get("members", ()))

    def _coordinator(self) -> dict[str, Any]:
        """What the coordinator with the highest number says of itself; {} = it does not listen yet."""
        path = numbered(self.path, CLAIM, self.number())
        with contextlib.suppress(FileNotFoundError):
            return (read_json(path) or {}) if path.stat().st_size or path.name == CLAIM else {}
        return {}

    def _standing(self) -> StandingFiles:
        """What the last coordinator kept that kept anything."""
        return StandingFiles(self.path, self._highest(*STANDING_NAMES))

    def names(self) -> list[str]:
        """What is in the folder, as far as this machine sees it."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return [path.name for path in when_free(lambda: list(self.path.iterdir()))]
        return []

    def _highest(self, *names: str) -> int:
        return max((number_of(entry, *names) for entry in self.names()), default=0)


def check_ours(run: Path, *, what: str = "run folder") -> None:
    """Raises ConfigError where others could have put something into a run folder that is acted upon: an address, a
    config, the folder of modules. Also where nobody may look. `what`: how the message begins."""
    try:
        there = {path.name for path in run.iterdir()} if run.is_dir() else set()
    except OSError as error:
        raise ConfigError(f"{what} {run}: cannot be read ({error.strerror or error})") from error
    named = {"config.yaml", "code.json", CLAIM, *STANDING_NAMES}
    used = sorted(name for name in there if name in named or number_of(name, CLAIM, *STANDING_NAMES))
    for path in (run, *(run / name for name in used)):
        check_unshared(path, what=what)


def latest_run(root: Path = Path("runs")) -> Path | None:
    """The run folder under `root` that was started last, or None."""
    found = [p.parent for p in root.glob("*/config.yaml")]
    return max(found, key=lambda p: (p / "config.yaml").stat().st_mtime, default=None)
