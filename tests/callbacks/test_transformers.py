"""Hugging Face's Trainer over embedding servers. Needs transformers (CONTRIBUTING.md says how)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkeep import EmbeddingClient, SgdConfig, TableSpec, UserError
from shardkeep.nn import EmbeddingBagCollection
from tests.support.cases import every
from tests.support.late_import import late_import
from tests.support.metered_loops import metered_client

transformers = late_import("transformers")
late_import("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TABLES = [TableSpec(name="user", dim=8, optimizer=SgdConfig(lr=0.1))]
BATCH, STEPS = 16, 12


def data() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 50, (BATCH * STEPS,), generator=torch.Generator().manual_seed(0))
    return [{"ids": one, "labels": (one % 2).float()} for one in ids]


class Model(nn.Module):
    def __init__(self, client: EmbeddingClient, *, by_optimizer: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.top = nn.Linear(8, 1)
        self.optimizer = torch.optim.SGD(self.top.parameters(), lr=0.1)
        self.bags = EmbeddingBagCollection(
            client, {"user": "user"}, steps=self.optimizer if by_optimizer else "backward"
        )
        self.losses: list[float] = []

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        score = self.top(self.bags({"user": ids})["user"])[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(score.float(), labels)
        self.losses.append(loss.item())
        return {"loss": loss, "logits": score}


def trained(model: Model, folder: Path, callbacks: Any = (), resume: bool = False, **settings: Any) -> None:
    settings = {"max_steps": STEPS, "save_strategy": "no", **settings}
    settings |= {"per_device_train_batch_size": BATCH, "train_sampling_strategy": "sequential", "max_grad_norm": 0.0}
    settings |= {"lr_scheduler_type": "constant", "learning_rate": 0.1}
    args = transformers.TrainingArguments(folder, report_to=[], use_cpu=True, disable_tqdm=True, **settings)
    some = {"train_dataset": data(), "eval_dataset": data()[:BATCH], "callbacks": list(callbacks)}
    trainer = transformers.Trainer(model, args, optimizers=(model.optimizer, None), **some)
    trainer.train(resume_from_checkpoint=resume or None)


def digest(client: EmbeddingClient) -> Any:
    return client.summary(digest=True)["state_digest"]


def test_logged_losses_and_evaluations_are_reported(tmp_path: Path) -> None:
    from shardkeep.callbacks.transformers import RowsCallback

    client, records, _ = metered_client(TABLES, consistency="sync")
    model = Model(client)
    callback = RowsCallback(client, close=True)
    trained(model, tmp_path, [callback], logging_steps=4, eval_strategy="steps", eval_steps=STEPS)
    steps = model.losses[:STEPS]
    with pytest.raises(UserError, match="the client is closed"):
        client.read({"user": torch.arange(2)})
    (evaluation,) = records.of("eval")
    assert set(evaluation) == {"step", "loss"} and evaluation["step"] == STEPS
    (loss,) = [record["loss"] for record in records.of("telemetry") if record["loss"] is not None]
    assert loss == pytest.approx(sum(steps) / STEPS, abs=1e-3)


@every("per_step", [1, 2], ids=["each", "accumulated"])
def test_losses_and_rows_are_those_of_a_plain_loop(tmp_path: Path, per_step: int) -> None:
    found = []
    for theirs in (False, True):
        with EmbeddingClient.local(TABLES, consistency="sync") as client:
            model = Model(client, by_optimizer=per_step > 1)
            if theirs:
                trained(model, tmp_path, gradient_accumulation_steps=per_step, max_steps=STEPS // per_step)
            else:
                samples = data()
                for number in range(STEPS):
                    some = samples[number * BATCH : (number + 1) * BATCH]
                    batch = {name: torch.stack([one[name] for one in some]) for name in some[0]}
                    (model(**batch)["loss"] / per_step).backward()
                    if (number + 1) % per_step == 0:
                        model.optimizer.step()
                        model.optimizer.zero_grad()
            assert client.step == STEPS // per_step
            found.append((digest(client), model.losses, model.top.weight.tolist()))
    assert found[0] == found[1]


def test_a_checkpoint_has_rows_and_model_of_one_step(tmp_path: Path) -> None:
    from shardkeep.callbacks.transformers import RowsCallback

    with EmbeddingClient.local(TABLES, consistency="sync") as client:
        model = Model(client)
        trained(model, tmp_path / "whole")
        expected = digest(client), model.top.weight.tolist()
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}
    with EmbeddingClient.local(TABLES, consistency="sync") as client:
        trained(Model(client), tmp_path / "parts", [RowsCallback(client)], max_steps=8, **saving)
    assert [path.name for path in (tmp_path / "parts").glob("checkpoint-*")] == ["checkpoint-8"]  # theirs cleans up
    with EmbeddingClient.local(TABLES, consistency="sync") as client:
        model = Model(client)
        trained(model, tmp_path / "parts", [RowsCallback(client)], resume=True, **saving)
        assert client.step == STEPS
        assert (digest(client), model.top.weight.tolist()) == expected
    with EmbeddingClient.local(TABLES) as client:
        trained(Model(client), tmp_path / "bare", max_steps=4, save_strategy="steps", save_steps=4)
    with EmbeddingClient.local(TABLES) as client, pytest.raises(UserError, match="checkpoint-4/rows: no rows"):
        trained(Model(client), tmp_path / "bare", [RowsCallback(client)], resume=True)
