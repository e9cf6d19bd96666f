"""Standing files: what a coordinator keeps for the one that takes over, in two files with a checksum each.

standing.N.json        {"checksum": xxh3 of the value after it, "standing": {...}}, of coordinator N
standing-copy.N.json   the same, written after it

One of them is whole whenever a crash, a full disk or somebody's hand spoils the other. Both hold secrets: for this user
only. What is in them is ps/control/persisted_state.py's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from shardkeep.base.errors import UserError
from shardkeep.base.files import atomic_write, sync_folder
from shardkeep.run.json_files import number_of, numbered

NAMES = ("standing.json", "standing-copy.json")
_HEAD, _END = b'{"checksum": "%b", "standing": ', b"}\n"


class StandingFiles:
    """The two files of one coordinator below a run folder. `number`: its number; 0 = it has claimed none."""

    def __init__(self, folder: Path, number: int) -> None:
        self._paths = [numbered(folder, name, number) for name in NAMES]
        self.path = self._paths[0]

    def write(self, text: str) -> None:
        """Keeps a JSON object instead of the one before. On return it outlives the machine. Raises OSError."""
        for path in self._paths:
            atomic_write(path, _framed(text.encode("utf-8")), private=True)
        sync_folder(self.path.parent)

    def read(self) -> dict[str, Any] | None:
        """What was kept last; None = nothing. Raises UserError where neither file is whole."""
        damaged = []
        for path in self._paths:
            try:
                return _read(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                damaged.append(f"{path} cannot be read ({error.strerror or error})")
            except ValueError as error:
                damaged.append(f"{path} is {error}")
        if damaged:
            raise UserError(" and ".join(damaged))
        return None


def forget_standing(folder: Path, below: int) -> None:
    """Deletes what coordinators with lower numbers kept. Raises OSError."""
    for path in folder.iterdir():
        number = number_of(path.name, *NAMES)
        if (number or path.name in NAMES) and number < below:
            path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    """Raises OSError, or ValueError where the file is not what `write` wrote."""
    content = path.read_bytes()
    kept = content[len(_framed(b"")) - len(_END) : -len(_END)]
    if content != _framed(kept):
        raise ValueError("cut or changed" if content else "empty")
    return dict(json.loads(kept))


def _framed(kept: bytes) -> bytes:
    return _HEAD % xxhash.xxh3_128_hexdigest(kept).encode("ascii") + kept + _END
