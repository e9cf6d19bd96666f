"""Settings of encoders, which make one vector of each id column of a sequence, and the features that they attend with.

To add one, write its class and its module, and name the class in the union here. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from shardkeep.base.errors import ConfigError
from shardkeep.base.plugging.plugs import Plug, by_name
from shardkeep.base.settings import Settings, Width, bare

if TYPE_CHECKING:
    from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns

_NAME = Field(description="The encoder.")
Targets = Mapping[str, Mapping[str, str]]
"""Group -> its columns -> the feature of the same table that the column is compared with."""


class EncoderSettings(Settings):
    """What all encoders have."""

    takes_numbers: ClassVar[bool] = True
    """Whether the numbers of a group are part of its entries; else their means are dense columns."""
    attends: ClassVar[Literal["no", "may", "must"]] = "may"
    """Whether it compares the entries with a target."""
    name: str

    def widths(self, entry: int) -> list[int]:
        """Inputs of its widest hidden layers and then the width of each, for entries of that width."""
        return []


class MeanEncoderConfig(EncoderSettings):
    """The mean of the rows."""

    takes_numbers = False
    attends = "no"
    name: Annotated[Literal["mean"], _NAME] = "mean"


class _Attending(EncoderSettings):
    target: dict[str, str] = Field(default_factory=dict)
    """Column of a sequence to the feature that it is compared with; left out = the one feature of the same table."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout inside the encoder."""


class DinEncoderConfig(_Attending):
    """Attention of the target by hidden layers, as in DIN."""

    attends = "must"
    name: Annotated[Literal["din"], _NAME] = "din"
    hidden: Annotated[list[Width], Field(min_length=1, max_length=100)] = Field([64])
    """Widths of the hidden layers before an entry's weight."""
    activation: Literal["relu", "gelu", "prelu", "dice"] = "dice"
    """Activation of the hidden layers."""
    norm: Literal["none", "batch", "layer"] = "none"
    """Normalization in every hidden layer, before the activation."""
    softmax: bool = False
    """Divide the weights so that those of a sample sum to 1."""

    def widths(self, entry: int) -> list[int]:
        return [4 * entry, *self.hidden]


class _Layered(_Attending):
    heads: int = Field(2, ge=1, le=64)
    """Heads of each layer; they divide the width of an entry."""


class TransformerEncoderConfig(_Layered):
    """Self-attention between the entries and the target, as in BST."""

    name: Annotated[Literal["transformer"], _NAME] = "transformer"
    layers: int = Field(1, ge=1, le=16)
    """Number of layers."""
    hidden: Width | None = None
    """Width of the hidden layer after each attention; left out = 4 times that of an entry."""

    def widths(self, entry: int) -> list[int]:
        return [entry, self.hidden or 4 * entry]


class HstuEncoderConfig(_Layered):
    """Hierarchical sequential transduction units."""

    name: Annotated[Literal["hstu"], _NAME] = "hstu"
    layers: int = Field(2, ge=1, le=16)
    """Number of layers."""


EncoderConfig = Annotated[
    MeanEncoderConfig | DinEncoderConfig | TransformerEncoderConfig | HstuEncoderConfig,
    Field(discriminator="name"), bare("name"),
]  # fmt: skip


def _plug(config: type[EncoderSettings]) -> Plug[type[EncoderSettings], Any]:
    name = str(config.model_fields["name"].default)
    code = config.__name__.removesuffix("Config")
    return Plug(name, config, f"shardkeep.workers.models.encoders.{name}:{code}")


ENCODERS = by_name(*map(_plug, get_args(get_args(EncoderConfig)[0])))
"""The settings of each encoder, and its class."""


def encoder_of(model: Settings) -> EncoderSettings:
    """The encoder of a stock model; mean, where it names none."""
    return getattr(model, "encoder", None) or MeanEncoderConfig()


def targets_of(model: Settings, schema: Schema) -> Targets:
    """The features with which the encoder of a stock model compares the columns of each group; a column may have none.

    Raises ConfigError: an encoder without sequences, a target that does not fit, several features or none to choose
    from.
    """
    encoder = encoder_of(model)
    if getattr(model, "encoder", None) is not None and not schema.sequences:
        raise ConfigError(f"model.encoder: {encoder.name} has no effect: the data has no sequences (data.sequences)")
    named: Mapping[str, str] = getattr(encoder, "target", {})
    columns = {column.name for group in schema.sequences for column in group.ids}
    if unknown := named.keys() - columns:
        raise ConfigError(
            f"model.encoder.target: {min(unknown)} is no column of a sequence; allowed: {', '.join(sorted(columns))}"
        )
    if encoder.attends == "no":
        return {group.name: {} for group in schema.sequences}
    found: dict[str, dict[str, str]] = {}
    for group in schema.sequences:
        pairs = {column.name: _target(column, schema, named.get(column.name)) for column in group.ids}
        found[group.name] = {column: feature for column, feature in pairs.items() if feature is not None}
        if encoder.attends == "must" and not found[group.name]:
            raise ConfigError(_no_target(encoder, group))
    return found


def _target(column: Feature, schema: Schema, named: str | None) -> str | None:
    """The feature of a column's table; weighted ones hold lists. Raises ConfigError."""
    near = [each.name for each in schema.features if each.table == column.table and each.pooling != "weighted"]
    if named is not None:
        if named not in near:
            allowed = ", ".join(near) or "none, as no feature has that table"
            what = f"{named} is no feature of table {column.table}"
            raise ConfigError(f"model.encoder.target: {column.name}: {what}; allowed: {allowed}")
        return named
    if len(near) > 1:
        raise ConfigError(
            f"model.encoder.target: features {', '.join(near)} share table {column.table} with {column.name}; "
            f"name one of them: target: {{{column.name}: {near[0]}}}"
        )
    return near[0] if near else None


def _no_target(encoder: EncoderSettings, group: SequenceColumns) -> str:
    tables = ", ".join(dict.fromkeys(column.table for column in group.ids))
    without = ", ".join(name for name, plug in ENCODERS.items() if plug.config.attends != "must")
    return (
        f"model.encoder: {encoder.name} compares the entries of {group.name} with a feature, and no feature has table "
        f"{tables}; encoders that need none: {without}"
    )
