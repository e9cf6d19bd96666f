"""PyTorch Lightning: rows and model of one step, in each of its checkpoints; losses for the job's page. Tried with
lightning 2.6."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.base.errors import MissingPackage, UserError
from shardkeep.base.files import local

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise MissingPackage("shardkeep.callbacks.lightning needs lightning: pip install lightning") from error

if TYPE_CHECKING:
    from shardkeep.loop.client import EmbeddingClient

KEY = "shardkeep"
"""Of a Lightning checkpoint: the folder of its rows."""


class RowsCallback(Callback):  # type: ignore[misc]
    """Saves the rows with every checkpoint of a Trainer, and loads them with it.

        trainer = Trainer(callbacks=[RowsCallback(client, "rows")])
        trainer.fit(module, loader)  # or ckpt_path="last": the rows of that checkpoint are loaded first

    Each loss of a step in which the Trainer logs, and validation metrics whose names begin with "val", are reported to
    the job's page (`client.report`).

    Training waits while rows are written. To resume, give the servers' tables empty: start the servers again.

    Args:
        folder: For the rows; servers and trainers see it. Lightning does not clean it up: each checkpoint has a folder
            step-N in it.
        close: Close the client at the end of `fit`.
    """

    def __init__(self, client: EmbeddingClient, folder: str | Path, *, close: bool = False) -> None:
        self._client, self._folder, self._close = client, Path(local(folder)).absolute(), close

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        folder = self._folder / f"step-{self._client.step:08d}"
        if not folder.exists():
            self._client.save(folder)
        checkpoint[KEY] = str(folder)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if KEY not in checkpoint:
            raise UserError("the checkpoint has no rows; allowed: one that was saved with RowsCallback")
        if not self._client.step:  # later, as after `fit`, the rows are those of training
            self._client.restore(checkpoint[KEY])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None and (batch_idx + 1) % max(1, trainer.log_every_n_steps) == 0:
            self._client.report(loss=loss * trainer.accumulate_grad_batches)  # it was divided by their number

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        found = {name: value for name, value in trainer.callback_metrics.items() if name.startswith("val")}
        if found and not trainer.sanity_checking:
            self._client.report(eval=found)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self._close:
            self._client.close()
