"""Where a replacement finds its predecessor's files, from any folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkeep.base.errors import PlaceRefused
from shardkeep.config import parse_config
from shardkeep.member.membership import Membership
from shardkeep.member.recovery_folder import kept_while_useful, replaced_folder
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.control.grpc.server import ControlServer
from shardkeep.ps.control.records import Formation
from shardkeep.run.storage import folder_to_keep_in, kept_at, missed, shared_folder, why_unseen, with_checkpoints
from tests.support.cases import every
from tests.support.control_job import VERSIONS
from tests.support.recovering import Recovering


class Trial:
    """A formed job whose server 0 was started in `first`, and has died."""

    def __init__(self, folder: Path) -> None:
        self.job = Recovering(restarts=1)
        self.server = ControlServer(self.job.coordinator)
        self.first, self.other = folder / "first", folder / "other"

    def form(self) -> Path:
        """What the server kept."""
        control = self.client()
        control.register()
        kept = self.first / "recovery" / control.job / "server-0"
        kept.mkdir(parents=True)
        for index in (0, 1):
            self.job.register("worker", index)
            self.job.join("worker", index)
        assert control.join(kept=kept_at(kept)).generation == 1
        self.job.kill("server", 0, pid=os.getpid())
        control.close()
        return kept

    def client(self) -> ControlClient:
        return ControlClient(self.server.endpoint, role="server", index=0, timeout_s=5.0, versions=VERSIONS)

    def replacement(self) -> ControlClient:
        control = self.client()
        control.register()
        return control


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    trial = Trial(tmp_path)
    with trial.server:
        yield trial


def test_a_replacement_started_elsewhere_on_the_host_goes_on_in_its_predecessors_folder(trial: Trial) -> None:
    kept = trial.form()
    with trial.replacement() as control:
        assert replaced_folder(control, trial.other) == kept
    assert not trial.other.exists()


def test_a_replacement_that_does_not_find_the_folder_keeps_in_its_own_and_names_the_other(trial: Trial) -> None:
    kept = trial.form()
    kept.rename(kept.with_name("moved"))
    with trial.replacement() as control:
        assert folder_to_keep_in(control, trial.other) == trial.other
        host = os.uname().nodename
        assert missed(control, "its journal") == (
            f"server 0 came back without its journal, which was kept in {kept} on {host}"
        )


def test_a_replacement_that_may_not_use_the_folder_is_refused_and_the_job_waits_for_another(trial: Trial) -> None:
    kept = trial.form()
    (kept / "owner").mkdir()  # no process can lock it
    control = trial.client()
    told = rf"server 0 cannot be replaced by this process: {kept}: cannot be used"
    with pytest.raises(PlaceRefused, match=told), kept_while_useful(control, trial.other), Membership(control):
        replaced_folder(control, trial.other)
    assert trial.job.state.state == "recovering" and kept.is_dir()
    (kept / "owner").rmdir()
    with trial.replacement() as another:
        assert replaced_folder(another, trial.other) == kept


def test_a_folder_of_another_user_is_named_with_what_to_do(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = trial.form()
    monkeypatch.setattr(os, "access", lambda path, _mode: str(path) != str(kept))  # root may do all
    with (
        trial.replacement() as control,
        pytest.raises(PlaceRefused, match=rf"{kept} has what the one before it kept.*; start it as the user of"),
    ):
        folder_to_keep_in(control, trial.other)


# ---- the coordinator's folder for checkpoints ----


@every(
    ("settings", "start_step", "needed_by"),
    [
        ("servers: 2", 0, ""),
        ("{checkpoint: {every_steps: 20}}", 0, "checkpoint.every_steps: 20"),
        ("{checkpoint: {every_steps: off}}", 30, "--start-step 30"),
        ("{checkpoint: {every_steps: off}}", 0, None),
        ("{checkpoint: {dir: /shared}}", 0, None),
    ],
    ids=["auto", "wanted", "resumed", "off", "named"],
)
def test_the_coordinator_offers_its_run_folder_where_the_config_names_none(
    settings: str, start_step: int, needed_by: str | None, tmp_path: Path
) -> None:
    shared = shared_folder(parse_config(settings), tmp_path, start_step=start_step)
    assert (None if shared is None else shared.needed_by) == needed_by
    assert why_unseen(shared, writes=True) == ""


def test_a_member_says_why_it_cannot_use_the_folder(tmp_path: Path) -> None:
    shared = shared_folder(parse_config("servers: 2"), tmp_path, start_step=0)
    assert shared is not None
    folder = Path(shared.folder)
    shared_folder(parse_config("servers: 2"), tmp_path, start_step=0)  # of another machine, at the same path
    assert f"{folder} is another folder" in why_unseen(shared, writes=False)
    folder.rename(tmp_path / "elsewhere")
    assert why_unseen(shared, writes=False).endswith(f"{folder}: no such file or directory")


def test_a_take_over_before_the_first_formation_offers_the_folder_that_members_know(tmp_path: Path) -> None:
    config = parse_config("servers: 2")
    before = shared_folder(config, tmp_path, start_step=0)
    assert shared_folder(config, tmp_path, start_step=0, standing={"formation": None}) == before
    assert why_unseen(before, writes=True) == ""
    assert shared_folder(config, tmp_path, start_step=0, standing={"formation": {}}) is None


@every(("origin", "needed_by"), [(30, "--start-step 30"), (0, None)], ids=["resumed", "new"])
def test_a_take_over_of_a_resumed_job_needs_the_folder_as_its_start_did(
    origin: int, needed_by: str | None, tmp_path: Path
) -> None:
    config = parse_config("{checkpoint: {every_steps: off}}")
    shared = shared_folder(config, tmp_path, start_step=0, standing={"formation": None, "origin": origin})
    assert (None if shared is None else shared.needed_by) == needed_by


@every("damage", [None, "", "x" * 16], ids=["gone", "empty", "no number"])
def test_a_take_over_signs_a_folder_whose_number_is_lost(damage: str | None, tmp_path: Path) -> None:
    config = parse_config("servers: 2")
    before = shared_folder(config, tmp_path, start_step=0)
    assert before is not None
    (probe,) = Path(before.folder).iterdir()
    probe.unlink() if damage is None else probe.write_text(damage)
    after = shared_folder(config, tmp_path, start_step=0, standing={"formation": None})
    assert after is not None and len(after.token) == 16
    assert why_unseen(after, writes=True) == ""


def test_members_use_what_the_formation_has_settled() -> None:
    config = parse_config("servers: 2")

    def settled(checkpoints: str | None) -> tuple[object, object]:
        formation = Formation(1, "127.0.0.1", 1, (), (), checkpoints=checkpoints)
        found = with_checkpoints(config, formation).checkpoint
        return found.dir, found.every_steps

    assert settled(None) == (None, "auto")
    assert settled("/run/checkpoints") == ("/run/checkpoints", "auto")
    assert settled("") == (None, "off")
