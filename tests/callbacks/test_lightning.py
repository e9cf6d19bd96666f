"""Lightning's Trainer over embedding servers. Needs lightning (CONTRIBUTING.md says how)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shardkeep import EmbeddingClient, SgdConfig, TableSpec, UserError
from shardkeep.nn import EmbeddingBagCollection
from tests.support.cases import every
from tests.support.late_import import late_import
from tests.support.metered_loops import metered_client

lightning = late_import("lightning.pytorch")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TABLES = [TableSpec(name="user", dim=8, optimizer=SgdConfig(lr=0.1))]
STEPS = 12


def data(count: int = STEPS) -> list[Any]:
    random = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 50, (16,), generator=random) for _ in range(count)]
    return [(each, (each % 2).float()) for each in ids]


def module_of(client: EmbeddingClient, *, with_optimizer: bool = False) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.top = nn.Linear(8, 1)
            self.optimizer = torch.optim.SGD(self.top.parameters(), lr=0.1, momentum=0.9)
            steps: Any = self.optimizer if with_optimizer else "backward"
            self.bags = EmbeddingBagCollection(client, {"user": "user"}, steps=steps)
            self.losses: list[float] = []

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            ids, wanted = batch
            score = self.top(self.bags({"user": ids})["user"])[:, 0]
            loss = nn.functional.binary_cross_entropy_with_logits(score.float(), wanted)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return self.optimizer

    return Module()


def fitted(client: EmbeddingClient, module: Any, batches: list[Any], ckpt_path: Any = None, **settings: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(**{"max_epochs": 1, "enable_checkpointing": False, **quiet, **settings})
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
    return trainer


def digest(client: EmbeddingClient) -> Any:
    return client.summary(digest=True)["state_digest"]


def plain_loop(client: EmbeddingClient, module: Any, per_step: int = 1) -> None:
    for number, batch in enumerate(data(), 1):
        (module.training_step(batch, 0) / per_step).backward()
        if number % per_step == 0:
            module.optimizer.step()
            module.optimizer.zero_grad()


@every("per_step", [1, 2], ids=["each", "accumulated"])
def test_logged_losses_and_validation_metrics_are_reported(tmp_path: Path, per_step: int) -> None:
    from shardkeep.callbacks.lightning import RowsCallback

    client, records, _ = metered_client(TABLES, consistency="sync")
    module = module_of(client, with_optimizer=per_step > 1)

    def validation_step(batch: Any, batch_idx: int) -> None:
        module.log("val_hits", 0.5)
        module.log("size", 16.0)

    module.validation_step = validation_step
    callback = RowsCallback(client, tmp_path / "rows", close=True)
    settings = {"callbacks": [callback], "log_every_n_steps": 4, "accumulate_grad_batches": per_step}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, **settings)
    trainer.fit(module, *(DataLoader(data(count), batch_size=None) for count in (STEPS, 2)))
    (evaluation,) = records.of("eval")
    assert evaluation == {"step": STEPS // per_step, "val_hits": 0.5}
    counted = [record["loss"] for record in records.of("telemetry") if record["loss"] is not None]
    assert counted == [pytest.approx(sum(module.losses[3::4]) / 3, abs=1e-5)]


@every("per_step", [1, 2], ids=["each", "accumulated"])
def test_losses_and_rows_are_those_of_a_plain_loop(per_step: int) -> None:
    found = []
    for lightnings in (False, True):
        with EmbeddingClient.local(TABLES, consistency="sync") as client:
            module = module_of(client, with_optimizer=per_step > 1)
            if lightnings:
                fitted(client, module, data(), accumulate_grad_batches=per_step)
            else:
                plain_loop(client, module, per_step)
            assert client.step == STEPS // per_step
            found.append((digest(client), module.losses, module.top.weight.tolist()))
    assert found[0] == found[1]


def test_a_checkpoint_has_rows_and_model_of_one_step(tmp_path: Path) -> None:
    from shardkeep.callbacks.lightning import RowsCallback

    with EmbeddingClient.local(TABLES, consistency="sync") as client:
        module = module_of(client)
        fitted(client, module, data(), max_epochs=3).save_checkpoint(tmp_path / "bare.ckpt")
        expected = digest(client), module.top.weight.tolist()
    keep = lightning.callbacks.ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    with EmbeddingClient.local(TABLES, consistency="sync") as client:
        callbacks = [keep, RowsCallback(client, tmp_path / "rows")]
        fitted(client, module_of(client), data(), callbacks=callbacks, enable_checkpointing=True, max_epochs=2)
    with EmbeddingClient.local(TABLES, consistency="sync") as client:
        module, rows = module_of(client), RowsCallback(client, tmp_path / "rows", close=True)
        digests = []
        client_close, client.close = client.close, lambda: digests.append(digest(client))  # type: ignore[method-assign]
        fitted(client, module, data(), callbacks=[rows], ckpt_path=tmp_path / "epoch=0.ckpt", max_epochs=3)
        client_close()
        assert client.step == 3 * STEPS
        assert (digests[0], module.top.weight.tolist()) == expected
    with EmbeddingClient.local(TABLES) as client, pytest.raises(UserError, match="the checkpoint has no rows"):
        rows = RowsCallback(client, tmp_path)
        fitted(client, module_of(client), data(), callbacks=[rows], ckpt_path=tmp_path / "bare.ckpt", max_epochs=4)
