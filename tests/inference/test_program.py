"""Archives of programs: what torch would read by pickle is refused by name, before torch reads it."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkeep.base.errors import CheckpointError
from shardkeep.inference.export.program import read_program, write_program
from tests.support import histories
from tests.support.cases import every

DATA = "archive/data"
WEIGHTS, CONSTANTS = f"{DATA}/weights/model_weights_config.json", f"{DATA}/constants/model_constants_config.json"


class Net(nn.Module):
    """Has a parameter, a buffer and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("shift", torch.tensor(0.25))
        self.fixed = torch.tensor([1.0, 2.0])

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        logits_BT: torch.Tensor = self.layer(torch.cat([dense_BI, *embeddings.values()], dim=1))
        return logits_BT + self.shift + self.fixed.sum()


class Trap:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "tower.pt2"
    write_program(path, Net(), 2, {"user": 2})
    return path


def test_a_program_takes_any_number_of_entries_of_sequences(tmp_path: Path) -> None:
    model = histories.model()
    write_program(tmp_path / "tower.pt2", model, 1, histories.DIMS, histories.SHAPES)
    read = read_program(tmp_path / "tower.pt2")
    for lengths in ([0, 0], [0, 1, 0], [20] * 50, list(range(21))):
        dense_BI, inputs = histories.inputs(lengths)
        torch.testing.assert_close(read(dense_BI, inputs), model(dense_BI, inputs), rtol=0, atol=1e-6)


Entries = dict[str, bytes]


def changed(program: Path, to: Path, change: Callable[[Entries], Any], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(program) as source:
        entries = {name: source.read(name) for name in source.namelist()}
    change(entries)
    with zipfile.ZipFile(to, "w", method) as target:
        for name, content in entries.items():
            target.writestr(name, content)
    return to


def marked(config: str, weight: str, trap: bytes, **fields: Any) -> Callable[[Entries], None]:
    """The settings of a weight are changed, and its bytes are a pickle."""

    def change(entries: Entries) -> None:
        record = json.loads(entries[config])
        told = record["config"][weight]
        entries[f"{Path(config).parent}/{told['path_name']}"] = trap
        told.update(fields)
        entries[config] = json.dumps(record).encode()

    return change


MARKS = [{"use_pickle": mark} for mark in (True, 1, "no", [0], {"a": 0}, 0.5)]
NAMES = [{"path_name": n} for n in ("custom_obj_0", "opaque_obj_0", "../weights/weight_0", "tensor_0x", "", 7, None)]


@every(
    ("config", "weight", "fields"),
    [(WEIGHTS, "shift", mark) for mark in MARKS] + [(CONSTANTS, "fixed", fields) for fields in (*MARKS, *NAMES)],
)
def test_an_entry_with_any_mark_of_a_pickle_or_of_another_kind_than_numbers_is_refused(
    program: Path, tmp_path: Path, config: str, weight: str, fields: dict[str, Any]
) -> None:
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    crafted = changed(program, tmp_path / "crafted.pt2", marked(config, weight, trap, **fields))
    with pytest.raises(CheckpointError, match=rf"{Path(config).name} marks an entry as a pickle, which is not read$"):
        read_program(crafted)
    assert not (tmp_path / "sprung").exists()


@every(
    "name",
    [f"{DATA}/{entry}" for entry in (
        "weights/model.pt", "constants/model.pt", "sample_inputs/model.pt", "sample_inputs/other.pt",
        "constants/custom_obj_0", "aotinductor/model/model.so",
    )] + ["archive/extra/notes", "serialized_state_dict.pt", "version"],
)  # fmt: skip
def test_an_entry_of_an_older_or_another_form_is_refused_by_name(program: Path, tmp_path: Path, name: str) -> None:
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    crafted = changed(program, tmp_path / "crafted.pt2", lambda entries: entries.update({name: trap}))
    with pytest.raises(CheckpointError) as raised:
        read_program(crafted)
    assert str(raised.value) == f"{crafted}: has an entry that is not read ({name})"
    assert not (tmp_path / "sprung").exists()


def test_an_archive_that_is_written_again_is_neither_compressed_nor_encrypted(program: Path, tmp_path: Path) -> None:
    again = changed(program, tmp_path / "again.pt2", lambda _: None)
    inputs = (torch.rand(5, 2), {"user": torch.rand(5, 2)})
    assert torch.equal(read_program(again)(*inputs), read_program(program)(*inputs))
    compressed = changed(program, tmp_path / "small.pt2", lambda _: None, zipfile.ZIP_DEFLATED)
    encrypted = tmp_path / "secret.pt2"
    content = bytearray(program.read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = -1
        while (at := content.find(signature, at + 1)) >= 0:
            content[at + flags] |= 1
    encrypted.write_bytes(content)
    for crafted in (compressed, encrypted):
        with pytest.raises(CheckpointError, match="is compressed or encrypted, which is not read"):
            read_program(crafted)


@every("content", [b"", b"PK", b"{" * 5000, json.dumps({"config": 7}).encode(), b"[" * 200_000, b"\xff", b"{}"])
def test_settings_of_weights_that_are_none_give_one_line(program: Path, tmp_path: Path, content: bytes) -> None:
    crafted = changed(program, tmp_path / "crafted.pt2", lambda entries: entries.update({WEIGHTS: content}))
    with pytest.raises(CheckpointError, match=r"^\S+crafted\.pt2: [^\n]+$"):
        read_program(crafted)


def test_a_damaged_archive_gives_one_line(program: Path, tmp_path: Path) -> None:
    content, crafted = program.read_bytes(), tmp_path / "crafted.pt2"
    for keep in (0, 1, 100, len(content) // 2, len(content) - 1):
        crafted.write_bytes(content[:keep])
        with pytest.raises(CheckpointError, match=r"^\S+crafted\.pt2: [^\n]+$"):
            read_program(crafted)
    with pytest.raises(CheckpointError, match=r"none\.pt2: is no archive of torch\.export"):
        read_program(tmp_path / "none.pt2")
