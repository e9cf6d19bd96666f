"""Settings of labels: what a model predicts, and the loss of each label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from shardkeep.base.errors import did_you_mean
from shardkeep.base.plugging.plugs import Plug, by_name
from shardkeep.base.printable import printable
from shardkeep.base.settings import Named, Settings

ColumnName = Annotated[str, Field(min_length=1)]
SAMPLED = "sampled_softmax"
"""The loss of retrieval models, which have no other."""
LOSSES: dict[str, Plug[tuple[str, ...], Any]] = by_name(
    Plug("bce", (), "shardkeep.workers.dense.loss:bce"),
    Plug("mse", (), "shardkeep.workers.dense.loss:mse"),
    Plug("huber", ("delta",), "shardkeep.workers.dense.loss:huber"),
    Plug(SAMPLED, (), "shardkeep.workers.dense.loss:weighted_sum"),
)
"""The `config` of a loss: the settings that its function takes."""


class NegativesConfig(Settings):
    """The items among which a retrieval model finds the right one."""

    batch: Annotated[int, Field(ge=0, le=1_000_000)] | Literal["all"] = "all"
    """Distinct items of the rank's own micro-batch; all = as many as there are."""
    uniform: int = Field(0, ge=0, le=1_000_000)
    """Items drawn from the catalogue for each micro-batch, each with the same chance."""

    @model_validator(mode="after")
    def _are_some(self) -> NegativesConfig:
        if self.batch == 0 and self.uniform == 0:
            raise ValueError("batch: 0 with uniform: 0 leaves no item; allowed: one of them above 0")
        return self


class LossConfig(Named):
    """What training minimizes: the mean over the samples of a step."""

    name: Literal["bce", "mse", "huber", "sampled_softmax"] = "bce"
    """bce = binary cross-entropy of labels 0 and 1; mse = squared error and huber, of labels that are numbers;
    sampled_softmax = of retrieval models, which have no other."""
    delta: float | None = Field(None, gt=0.0, le=1e30)
    """huber: errors above it count linearly; default 1."""
    temperature: float | None = Field(None, gt=0.0, le=1e6)
    """sampled_softmax: divides the similarities; default 0.05 for cosines, 1 for dot products."""
    negatives: NegativesConfig | None = None
    """sampled_softmax: the items beside the right one; default all of the micro-batch."""
    correction: Literal["log_q", "none"] | None = None
    """sampled_softmax: log_q subtracts the logarithm of each item's chance to be among the negatives; default log_q."""

    @property
    def of_numbers(self) -> bool:
        """Whether the model's output is the value itself, not a logit."""
        return self.name in ("mse", "huber")

    @model_validator(mode="after")
    def _options_are_of_the_loss(self) -> LossConfig:
        if self.delta is not None and "delta" not in LOSSES[self.name].config:
            raise ValueError(f"delta: has no effect with name: {self.name}; allowed with huber")
        for key in ("temperature", "negatives", "correction"):
            if getattr(self, key) is not None and self.name != SAMPLED:
                raise ValueError(f"{key}: has no effect with name: {self.name}; allowed with sampled_softmax")
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_not_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Versions that know no retrieval read the settings of the other losses."""
        found: dict[str, Any] = handler(self)
        return found if self.name == SAMPLED else {key: found[key] for key in ("name", "delta") if key in found}


def _texts(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, list) and any(isinstance(v, bool) for v in value)):
        raise ValueError('a bare true or false is a truth value in YAML; put the text in quotes: ["true"]')
    if isinstance(value, list):
        return [str(v) if isinstance(v, int | float) else v for v in value]
    return [str(value)] if isinstance(value, str | int | float) else value


def _marks(value: Any) -> Any:
    return {key: _texts(each) for key, each in value.items()} if isinstance(value, dict) else _texts(value)


Texts = Annotated[list[str], BeforeValidator(_texts)]  # YAML reads 4 as a number; a file holds texts
Missing = Annotated[list[str] | dict[ColumnName, list[str]], BeforeValidator(_marks)]
Text = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value)]


class Threshold(Settings):
    """Numbers above one bound, below another, or both."""

    above: float | None = None
    """Numbers above this mean 1."""
    below: float | None = None
    """Numbers below this mean 1."""

    @model_validator(mode="after")
    def _has_a_bound(self) -> Threshold:
        if self.above is None and self.below is None:
            raise ValueError("allowed: above, below, or both")
        if self.above is not None and self.below is not None and self.above >= self.below:
            raise ValueError(f"no number is above {self.above:g} and below {self.below:g}")
        return self


def _positive(value: Any) -> Any:
    return value if isinstance(value, dict | Threshold) else _texts(value)


class LabelSettings(Settings):
    """What is the same for the only label and for each of several."""

    column: ColumnName
    """Name of the column."""
    positive: Annotated[list[str] | Threshold | None, BeforeValidator(_positive)] = None
    """Values that mean 1, those that are numbers compared as numbers; or {above: NUMBER}, {below: NUMBER}. Every other
    value means 0. Left out = the column holds 0 and 1, or true and false."""
    missing: Literal["error", "skip", "mask"] = "error"
    kind: Literal["class", "number"] = "class"

    @model_validator(mode="after")
    def _numbers_have_no_positive_ones(self) -> Self:
        if self.kind == "number" and self.positive is not None:
            raise ValueError("positive: has no effect with kind: number; leave one of them out")
        return self


class LabelColumn(LabelSettings):
    """The label: 0 or 1, or a number."""

    missing: Literal["error", "skip"] = "error"
    """What to do with rows without a label: error, or skip = leave them out."""
    kind: Literal["class", "number"] = "class"
    """class = 0 or 1; number = any number, for train.loss: mse or huber, which sets it."""


class TaskColumn(LabelSettings):
    """One of several labels: 0 or 1, or a number."""

    missing: Literal["error", "skip", "mask"] = "error"
    """What to do with rows without this label: error, mask = train and evaluate the others on them, or skip = leave
    them out, for the first label alone."""
    kind: Literal["class", "number"] = "class"
    """class = 0 or 1; number = any number; left out = by `loss`."""
    loss: LossConfig | None = None
    """Left out = bce, or mse with kind: number."""
    weight: float = Field(1.0, gt=0.0, le=1e9)
    """Multiplies the label's part of the loss."""
    given: ColumnName | None = None
    """A label before this one: train and evaluate this label only on rows where that one is 1."""
    after: ColumnName | None = None
    """A label before this one, without which it does not happen: the model learns how often this one follows, and the
    score is the product over all rows (ESMM)."""

    @model_validator(mode="before")
    @classmethod
    def _kind_by_loss(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "kind" in value:
            return value
        loss = value.get("loss")
        name = loss.get("name") if isinstance(loss, dict) else getattr(loss, "name", loss)
        return {**value, "kind": "number"} if name in ("mse", "huber") else value

    @model_validator(mode="after")
    def _settings_fit(self) -> TaskColumn:
        if self.kind == "number" and not self.objective.of_numbers:
            raise ValueError("kind: number with loss: bce, whose labels are 0 and 1; allowed: class, or another loss")
        if self.objective.name == SAMPLED:
            raise ValueError(f"loss: {SAMPLED}, which has no labels; allowed: bce, mse, huber")
        if self.given is not None and self.after is not None:
            raise ValueError(f"given: {self.given} and after: {self.after}; allowed: one of them")
        if self.after is not None and self.objective.of_numbers:
            raise ValueError(f"after: {self.after} with loss: {self.objective.name}; allowed with bce, of 0 and 1")
        return self

    @property
    def objective(self) -> LossConfig:
        """Its loss."""
        return self.loss or LossConfig(name="mse" if self.kind == "number" else "bce")


def afters(tasks: Sequence[TaskColumn]) -> list[int | None]:
    """Of each label the index of the label that it comes after; None = it comes after none."""
    names = [task.column for task in tasks]
    return [None if task.after is None else names.index(task.after) for task in tasks]


def check_labels(labels: Sequence[TaskColumn]) -> None:
    """Raises ValueError where several labels cannot be predicted together."""
    names = [label.column for label in labels]
    if len(labels) == 1:
        raise ValueError(f"labels: has one label; allowed: two or more, or data.label: {printable(names[0])}")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"labels: names {printable(twice)} twice; allowed: each label once")
    if late := next((label.column for label in labels[1:] if label.missing == "skip"), None):
        raise ValueError(
            f"labels: {late}: missing: skip leaves the row out for all labels, so it is allowed for the first alone; "
            "allowed: error or mask"
        )
    for at in range(len(labels)):
        _check_order(labels, at)


def _check_order(labels: Sequence[TaskColumn], at: int) -> None:
    """Raises ValueError where the label that another one names is not a label of 0 and 1 before it."""
    label, before = labels[at], {other.column: other for other in labels[:at]}
    key, name = ("given", label.given) if label.given is not None else ("after", label.after)
    if name is None:
        return
    place, names = f"labels: {label.column}: {key}: {name}", [other.column for other in labels]
    if name not in names:
        known = did_you_mean(name, names) or f"; the labels are {', '.join(names)}"
        raise ValueError(f"{place} is no label{known}")
    if name not in before:
        why = "is the label itself" if name == label.column else "comes later in the list"
        raise ValueError(f"{place} {why}; allowed: a label before it")
    if before[name].kind != "class" or before[name].objective.of_numbers:
        raise ValueError(f"{place} is a number; allowed: a label of 0 and 1")
