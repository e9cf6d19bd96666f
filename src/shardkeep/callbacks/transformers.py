"""Hugging Face's Trainer: rows and model of one step, in each of its checkpoints; losses for the job's page. Tried with
transformers 5.24."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.base.errors import MissingPackage, UserError

try:
    from transformers import TrainerCallback
except ImportError as error:
    why = "shardkeep.callbacks.transformers needs transformers: pip install transformers"
    raise MissingPackage(why) from error

if TYPE_CHECKING:
    from shardkeep.loop.client import EmbeddingClient

FOLDER = "rows"
"""Of the rows, in each checkpoint's folder."""


class RowsCallback(TrainerCallback):  # type: ignore[misc]
    """Saves the rows into every checkpoint of a Trainer, and loads them with it.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[RowsCallback(client)])
        trainer.train()  # or resume_from_checkpoint=True: the rows of that checkpoint are loaded first

    Losses that the Trainer logs, and the metrics of its evaluations, are reported to the job's page (`client.report`).

    Training waits while rows are written. To resume, give the servers' tables empty: start the servers again.

    Args:
        resume_from: The checkpoint's folder, if it is not in the Trainer's `output_dir`.
        close: Close the client at the end of `train`.
    """

    def __init__(self, client: EmbeddingClient, *, resume_from: str | Path | None = None, close: bool = False) -> None:
        self._client, self._resume_from, self._close = client, resume_from, close

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = _checkpoint(args, state) / FOLDER
        if not folder.exists():
            self._client.save(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.global_step:
            return
        folder = (Path(self._resume_from) if self._resume_from else _checkpoint(args, state)) / FOLDER
        if not folder.is_dir():
            raise UserError(f"{folder}: no rows; allowed: a checkpoint that was saved with RowsCallback")
        if not self._client.step:
            self._client.restore(folder)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs and state.is_world_process_zero:
            self._client.report(loss=logs["loss"])

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        found = {name.removeprefix("eval_"): value for name, value in (metrics or {}).items() if _scores(name, value)}
        if found:
            self._client.report(eval=found)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._close:
            self._client.close()


def _scores(name: str, value: Any) -> bool:
    """Whether it is a metric of the model, and not of the machine."""
    timed = name.endswith(("_runtime", "_per_second", "_preparation_time"))
    return name.startswith("eval_") and not timed and isinstance(value, int | float)


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
