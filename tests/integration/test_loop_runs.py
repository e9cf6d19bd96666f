"""The run of a loop of the user's own: what can be made of its folder, and what cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardkeep
from shardkeep import EmbeddingClient, TableSpec, UserError
from shardkeep.base.errors import CheckpointError
from shardkeep.inference.export.writing import export_run
from shardkeep.inference.scoring import evaluate_run
from tests.support.cases import every

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(300)]
TABLES = [TableSpec(name="item", dim=4)]


def steps(client: EmbeddingClient, count: int) -> None:
    for _ in range(count):
        rows = client.lookup({"item": torch.arange(5)})
        rows["item"].square().sum().backward()
        client.apply(rows)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop") / "run"
    with EmbeddingClient.serve(TABLES, servers=1, consistency="sync", run_dir=folder, quiet=True) as client:
        for _ in range(2):
            steps(client, 2)
            client.checkpoint({"step": client.step})
    return folder


@every(
    ("below", "step"),
    [("", 4), ("checkpoints", 4), ("checkpoints/step-00000004", 4), ("checkpoints/step-00000002", 2)],
)
def test_a_loop_loads_a_run_its_checkpoints_and_a_step(run: Path, below: str, step: int) -> None:
    with EmbeddingClient.local(TABLES, consistency="sync") as plain, EmbeddingClient.local(TABLES) as client:
        steps(plain, step)
        assert client.restore(run / below) == {"step": step} and client.step == step
        ids = {"item": torch.arange(9)}
        assert torch.equal(client.read(ids)["item"], plain.read(ids)["item"])


def test_a_folder_without_a_checkpoint_and_a_step_that_does_not_count_are_refused(run: Path, tmp_path: Path) -> None:
    with EmbeddingClient.local(TABLES) as client:
        for folder in (tmp_path, tmp_path / "nothing", run / "logs"):
            with pytest.raises(
                UserError, match=r"has no checkpoint; allowed: a run, its checkpoints, or the folder of"
            ):
                client.restore(folder)
        client.save(tmp_path / "saved")
        client.save(tmp_path / "saved")
    old, new = (tmp_path / "saved" / name for name in ("step-00000000", "step-00000000.2"))
    with EmbeddingClient.local(TABLES) as client:
        with pytest.raises(CheckpointError, match=r"step-00000000: does not count, because step 0 was written again"):
            client.restore(old)
        client.restore(new)


USES: dict[str, Callable[[Path], object]] = {
    "export": lambda run: export_run(run, run / "out"),
    "evaluate": evaluate_run,
    "evaluate files": lambda run: evaluate_run(run, files=[run / "config.yaml"]),
    "load": shardkeep.load,
}


@every("use", USES.values(), ids=USES)
def test_what_needs_the_dense_model_says_what_the_run_is_for(run: Path, use: Callable[[Path], object]) -> None:
    with pytest.raises(UserError) as told:
        use(run)
    text = str(told.value)
    assert "\n" not in text and "is of a loop of your own" in text
    for way in ("client.restore", "`shardkeep tables`", "shardkeep.torchrec.save(model.module, FILE)"):
        assert way in text
