"""The folder of checkpoints: complete or not there at all, and never damaged unseen."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from shardkeep.base.errors import CheckpointError
from shardkeep.ps.checkpoints.folder import Checkpoints, FileRecord
from shardkeep.ps.checkpoints.probe import check_shared, check_token, write_token
from tests.support.cases import every


def written(checkpoints: Checkpoints, step: int, content: bytes = b"rows") -> FileRecord:
    """A part of a checkpoint, begun and not committed."""
    partial = checkpoints.begin(step)
    path = partial / "server-0" / "rows"
    path.parent.mkdir()
    path.write_bytes(content)
    return FileRecord.of(partial, path)


def saved(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.commit(step, [written(checkpoints, step)], {"samples": 10 * step})


def chained(checkpoints: Checkpoints, *steps: int, removes: bool = False) -> None:
    """Increments, each on the newest checkpoint."""
    for step in steps:
        base = checkpoints.latest()
        checkpoints.commit(step, [written(checkpoints, step)], {}, base=base, removes=removes)


def steps(checkpoints: Checkpoints) -> list[int]:
    return [step for step, _ in checkpoints.complete()]


def folders(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.glob("*step-*"))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


def test_the_newest_complete_checkpoint_is_the_latest(checkpoints: Checkpoints) -> None:
    assert checkpoints.latest() is None
    saved(checkpoints, 5, 100, 20)
    written(checkpoints, 300)
    latest = checkpoints.latest()
    assert latest is not None
    assert (latest.step, latest.facts) == (100, {"samples": 1000})
    assert latest.below("server-0")[0].check(latest.folder).read_bytes() == b"rows"
    assert latest.below("server-") == []
    record = written(checkpoints, 400)
    (checkpoints.partial(400) / record.path).unlink()
    with pytest.raises(CheckpointError, match="all members must share this folder"):
        checkpoints.commit(400, [record], {})
    assert steps(checkpoints) == [5, 20, 100]


def test_the_oldest_are_deleted_and_what_was_left_half_written_too_but_no_other_folders(
    checkpoints: Checkpoints,
) -> None:
    for step in range(1, 6):
        saved(checkpoints, step)
        checkpoints.prune(2)
    written(checkpoints, 6)
    written(checkpoints, 7)
    others = ["step-00000001-good", "step-4", "step-best"]
    for name in others:
        shutil.copytree(checkpoints.folder / "step-00000004", checkpoints.folder / name)
    checkpoints.prune(2)
    assert steps(checkpoints) == [4, 5]
    assert folders(checkpoints) == sorted([".step-00000007", "step-00000004", "step-00000005", *others])
    assert all((checkpoints.folder / name / "manifest.json").exists() for name in others)


def test_the_same_step_again_replaces_it(checkpoints: Checkpoints) -> None:
    saved(checkpoints, 3)
    for number in (2, 3):
        checkpoints.commit(3, [written(checkpoints, 3, b"other")], {"number": number})
        latest = checkpoints.latest()
        assert latest is not None and latest.files[0].size == 5
        assert (latest.folder.name, latest.facts) == (f"step-00000003.{number}", {"number": number})
    assert steps(checkpoints) == [3]
    checkpoints.prune(1)
    assert folders(checkpoints) == ["step-00000003.3"]


class Killed(BaseException):
    """Of a process that ends before one of its calls changes a file, and so before all that follow."""


def kill_after(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on only so many calls change anything on disk."""
    count = itertools.count()

    def limited(real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **more: Any) -> Any:
            if next(count) >= calls:
                raise Killed
            return real(*args, **more)

        return change

    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync"):
        monkeypatch.setattr(os, name, limited(getattr(os, name)))


def test_a_kill_at_any_moment_while_a_step_is_written_again_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for calls in itertools.count():
        checkpoints = Checkpoints(tmp_path / str(calls))
        saved(checkpoints, 2, 3)
        checkpoints.prune(1)
        with monkeypatch.context() as limited:
            kill_after(calls, limited)
            try:
                checkpoints.commit(3, [written(checkpoints, 3, b"other")], {})
                checkpoints.prune(1)
                killed = False
            except Killed:
                killed = True
        contents = []
        for _ in range(2):
            latest = checkpoints.latest()
            assert latest is not None and latest.step == 3, calls
            contents.append(latest.files[0].check(latest.folder).read_bytes())
            checkpoints.begin(4)  # by the process that continues
        assert contents[0] == contents[1]
        found.append(contents[0])
        for step in (3, 4):
            checkpoints.commit(step, [written(checkpoints, step)], {})
            checkpoints.prune(1)
            assert [path.name.split(".")[0] for path in checkpoints.folder.glob("*step-*")] == [f"step-{step:08d}"]
        if not killed:
            break
    assert found == sorted(found, reverse=True) and set(found) == {b"rows", b"other"} and len(found) > 10


def test_the_one_before_is_deleted_once_the_new_name_is_on_disk(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(checkpoints, 3)
    record = written(checkpoints, 3)
    synced: list[set[str]] = []

    def sync(folder: Path) -> None:
        if folder == checkpoints.folder:
            synced.append({path.name for path in folder.iterdir()})

    monkeypatch.setattr("shardkeep.ps.checkpoints.folder.sync_folder", sync)
    checkpoints.commit(3, [record], {})
    assert synced == [{"step-00000003", "step-00000003.2"}]


def test_a_damaged_file_is_named(checkpoints: Checkpoints) -> None:
    saved(checkpoints, 1)
    checkpoint = checkpoints.load(1)
    path = checkpoint.folder / "server-0" / "rows"
    for content, text in ((b"row", "damaged: 3 bytes, 4 were written"), (b"rowz", "damaged: its checksum is wrong")):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"server-0/rows: {text}"):
            checkpoint.files[0].check(checkpoint.folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="server-0/rows: cannot be read"):
        checkpoint.files[0].check(checkpoint.folder)


def test_a_file_system_that_refuses_modes_takes_checkpoints(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    saved(checkpoints, 1)
    assert checkpoints.load(1).files[0].size == 4


def test_a_truncated_manifest_and_one_of_another_step_are_one_line(checkpoints: Checkpoints) -> None:
    saved(checkpoints, 1)
    manifest = checkpoints.load(1).folder / "manifest.json"
    whole = manifest.read_bytes()
    for size in range(len(whole.rstrip())):
        manifest.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"manifest.json: damaged \([^\n]*\); delete step-00000001 to resume"):
            checkpoints.latest()
    manifest.write_bytes(whole)
    manifest.parent.rename(checkpoints.folder / "step-00000007")
    with pytest.raises(CheckpointError, match=r"step-00000007/manifest\.json: damaged \(it is of step 1\)"):
        checkpoints.latest()


WRONG = r"damaged \(its checksum is wrong\); delete step-00000002 to resume"
NO_BASE = r"damaged \([^\n]*\); delete step-00000002 to resume"
CHAINED = {"format": 4, "checksum": ""}
CHANGES: dict[str, tuple[dict[str, Any], str | None]] = {
    "the data position": ({"facts": {"samples": 13_001}}, WRONG),
    "a fact more": ({"facts": {"samples": 20, "seed": 1}}, WRONG),
    "no files": ({"files": []}, WRONG),
    "the step": ({"step": 3}, WRONG),
    "the checksum": ({"checksum": "0" * 32}, WRONG),
    "no checksum": ({"checksum": None}, WRONG),
    "a newer format": ({"format": 9}, "format 9; this version reads 3 to 5; use the version"),
    "a format of before": ({"format": 1, "checksum": None}, "format 1; this version reads 3 to 5; use the version"),
    "a base that is itself": (CHAINED | {"base": {"step": 2, "id": ""}}, NO_BASE),
    "a later base": (CHAINED | {"base": {"step": 7, "id": ""}}, NO_BASE),
    "a base without a step": (CHAINED | {"base": {"id": ""}}, NO_BASE),
    "a base of another type": (CHAINED | {"base": []}, NO_BASE),
    "another layout": ({}, None),
}


@every("name", CHANGES)
def test_a_manifest_that_was_changed_is_refused_by_name_not_another_layout(tmp_path: Path, name: str) -> None:
    checkpoints, (changes, text) = Checkpoints(tmp_path), CHANGES[name]
    saved(checkpoints, 2)
    path = checkpoints.load(2).folder / "manifest.json"
    fields = json.loads(path.read_text()) | changes
    if fields["checksum"] == "":  # sealed again
        del fields["checksum"]
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        fields["checksum"] = xxhash.xxh3_128_hexdigest(canonical)
    path.write_text(json.dumps({key: value for key, value in reversed(fields.items()) if value is not None}))
    if text is None:
        assert checkpoints.load(2).facts == {"samples": 20}
        return
    for read in (lambda: checkpoints.load(2), *([checkpoints.latest] if text is not NO_BASE else [])):
        with pytest.raises(CheckpointError, match=rf"step-00000002(/manifest\.json)?: {text}"):
            read()


def test_a_process_that_does_not_see_the_folder_is_told(checkpoints: Checkpoints, tmp_path: Path) -> None:
    token = write_token(checkpoints.folder)
    check_token(checkpoints.folder, token)
    for folder, wrong in ((tmp_path / "elsewhere", token), (checkpoints.folder, "0123")):
        with pytest.raises(CheckpointError, match="must be storage that all members share"):
            check_token(folder, wrong)
    (probe,) = checkpoints.folder.iterdir()
    probe.write_bytes(b"\xff" + token.encode())
    with pytest.raises(CheckpointError, match="is not the folder that worker 0 writes checkpoints to"):
        check_token(checkpoints.folder, token)
    with pytest.raises(CheckpointError, match="is another folder"):
        check_shared(checkpoints.folder, token, writes=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/below: cannot keep checkpoints: .* \(Not a directory\)"):
        write_token(tmp_path / "file" / "below")


# ---- increments ----


def test_an_increment_is_read_with_all_that_it_builds_on_and_has_a_format_that_older_versions_refuse(
    checkpoints: Checkpoints,
) -> None:
    saved(checkpoints, 1)
    chained(checkpoints, 2, removes=True)
    chained(checkpoints, 3)
    assert [link.step for link in checkpoints.load(3).chain] == [1, 2, 3]
    assert [link.step for link in checkpoints.load(1).chain] == [1]
    manifests = [json.loads((folder / "manifest.json").read_text()) for _, folder in checkpoints.complete()]
    # a version before 5, which may remove rows, reads 1 to 4 and loads whole chains
    assert [(m["format"], m.get("base", {}).get("step")) for m in manifests] == [(3, None), (5, 1), (4, 2)]


def test_a_base_that_a_kept_increment_needs_stays(checkpoints: Checkpoints) -> None:
    kept = []
    for step in range(1, 9):
        (saved if step % 3 == 1 else chained)(checkpoints, step)
        checkpoints.prune(2)
        kept.append(steps(checkpoints))
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [4, 5], [4, 5, 6], [4, 5, 6, 7], [7, 8]]
    assert len(folders(checkpoints)) == 2


def test_an_increment_that_lost_its_base_does_not_count_and_is_deleted_in_time(checkpoints: Checkpoints) -> None:
    saved(checkpoints, 1, 2)
    chained(checkpoints, 3, 4)
    checkpoints.load(4).check_sizes()
    (checkpoints.load(2).folder / "server-0" / "rows").unlink()
    text = "step-00000002/server-0/rows: missing; delete step-00000002 to resume from the checkpoint before it"
    with pytest.raises(CheckpointError, match=text):
        checkpoints.load(4).check_sizes()
    shutil.rmtree(checkpoints.load(2).folder)
    assert steps(checkpoints) == [1]
    with pytest.raises(CheckpointError, match="step-00000002: has no manifest"):
        checkpoints.load(4)
    checkpoints.prune(5)
    assert len(folders(checkpoints)) == 3
    saved(checkpoints, 5)
    checkpoints.prune(5)
    assert steps(checkpoints) == [1, 5] and len(folders(checkpoints)) == 2


def test_a_later_checkpoint_of_the_same_step_is_not_taken_for_the_base_and_what_one_builds_on_is_kept(
    checkpoints: Checkpoints,
) -> None:
    saved(checkpoints, 1, 2)
    chained(checkpoints, 3)
    checkpoints.commit(2, [written(checkpoints, 2, b"other")], {})
    assert steps(checkpoints) == [1, 2]
    text = r"step-00000002.2/manifest.json: is not what step-00000003 was written on; delete step-0+3 "
    with pytest.raises(CheckpointError, match=text):
        checkpoints.load(3)
    checkpoints.commit(2, [written(checkpoints, 2)], {}, base=checkpoints.load(1))
    chained(checkpoints, 3)
    checkpoints.prune(1)
    assert [link.folder.name[8:] for link in checkpoints.load(3).chain] == ["00001", "00002.3", "00003.2"]
    assert len(folders(checkpoints)) == 3


@every("change", ["lost", "written again"])
def test_an_increment_on_what_is_not_there_any_more_is_not_committed(tmp_path: Path, change: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    saved(checkpoints, 1)
    base = checkpoints.load(1)
    if change == "lost":
        (base.folder / "server-0" / "rows").unlink()
    else:
        checkpoints.commit(1, [written(checkpoints, 1, b"other")], {})
    record = written(checkpoints, 2)
    with pytest.raises(CheckpointError, match="rows: missing" if change == "lost" else "is not what step-0+2 was"):
        checkpoints.commit(2, [record], {}, base=base)
    assert steps(checkpoints) == [1]
