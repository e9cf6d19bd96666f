"""What a job's settings say together of a retrieval model: its loss, and what it does not take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardkeep.workers.config import TowerConfig, TrainConfig
from shardkeep.workers.data_config import DataConfig
from shardkeep.workers.label_config import SAMPLED
from shardkeep.workers.model_config import RETRIEVAL


def with_sampled_loss(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Raw settings of a job, in which the loss of a retrieval model has a name."""
    model, train = raw.get("model"), raw.get("train", {})
    name = model.get("name") if isinstance(model, Mapping) else getattr(model, "name", model)
    loss = _loss_of(raw)
    if name not in RETRIEVAL or not isinstance(train, Mapping) or not isinstance(loss, Mapping):
        return dict(raw)
    return {**raw, "train": {**train, "loss": {"name": SAMPLED, **loss}}}


def loss_fits(raw: Mapping[str, Any], name: str) -> bool:
    """Whether the loss of raw settings, if they have one, is one of the model `name`."""
    loss = _loss_of(raw)
    kind = loss.get("name") if isinstance(loss, Mapping) else loss
    return kind is None or (kind == SAMPLED) == (name in RETRIEVAL)


def _loss_of(raw: Mapping[str, Any]) -> Any:
    train = raw.get("train")
    return train.get("loss") or {} if isinstance(train, Mapping) else {}


def check_retrieval(name: str, data: DataConfig, train: TrainConfig, tower: TowerConfig) -> None:
    """Raises ValueError where settings do not go with the model `name`."""
    loss = train.loss.name
    if (loss == SAMPLED) != (name in RETRIEVAL):
        other = "allowed with " + ", ".join(RETRIEVAL) if loss == SAMPLED else f"allowed: {SAMPLED}"
        raise ValueError(f"train.loss: {loss} with model.name: {name}; {other}")
    if name not in RETRIEVAL:
        return
    if data.labels:
        raise ValueError(f"data.labels: with model.name: {name}, which predicts items; allowed: data.label, or none")
    if data.label is not None and data.label.kind == "number":
        raise ValueError(f"data.label.kind: number with model.name: {name}, whose label is 0 or 1; allowed: class")
    if tower.compile == "on":
        raise ValueError(
            f"tower.compile: on with model.name: {name}, whose number of candidates changes from step to step; "
            "allowed: auto or off"
        )
    if train.order == "time":
        raise ValueError(
            f"train.order: time with model.name: {name}, which ranks all items and scores no sample before it trains; "
            "allowed: shuffled or stored"
        )
