"""Settings of the compression room. Apart from the codecs so that reading a config needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from shardkeep.base.plugging.own import OwnConfig
from shardkeep.base.plugging.plugs import Plug, by_name
from shardkeep.base.settings import MOST_ROWS, MOST_STEPS, MOST_WIDTH, Settings
from shardkeep.compression.selection.registry import Select
from shardkeep.compression.values.registry import FORMATS, Scale, Values


def _check_scale(values: Values, scale: Scale | None) -> None:
    """Raises ValueError for the scale of a number format that has none."""
    if scale is not None and (isinstance(values, OwnConfig) or scale not in FORMATS[values].config):
        raise ValueError(f"scale: has no effect with values: {values}")


class PushConfig(Settings):
    """How row gradients are sent from a worker to the servers."""

    model_config = ConfigDict(
        json_schema_extra={
            "left": {
                "rounding": "leave it out, every value is rounded to nearest",
                "max_age": "leave it out, a row waits until its norm is among the largest",
                "keep_rows": "use keep",
                "keep_values": "use select: top_k, and keep",
                "dgc": "use select: {name: shardkeep.examples.compression.dgc:Dgc, options: {momentum: 0.9}}, and keep",
            }
        }
    )

    select: Select = "rows"
    """What is sent of a step. rows = the rows with the largest norm of gradient and residual, of all tables of one dim
    together. top_k = the single values of largest magnitude of each table; the others of a row are zeros, which take no
    bytes with `values: fp32`. module:Class = a selector of your own, with its `options`; its module is searched last in
    `data.root`."""
    keep: float = Field(1.0, gt=0.0, le=1.0)
    """Share that is sent of the rows, or of the values, at least one; 1.0 = all. The others wait in the pool, so it
    needs `pool_rows`."""
    warmup_steps: int = Field(0, ge=0, le=MOST_STEPS)
    """Steps over which the share falls from 1 to `keep`."""
    pool_rows: int = Field(0, ge=0, le=MOST_ROWS)
    """Rows whose unsent gradients and rounding errors a worker keeps for later steps (error feedback); 0 = none. A row
    that finds the pool full is sent at once."""
    second_moment: bool = False
    """Send the sum of a row's mean squared gradients beside it, in one byte. Adagrad and Adam need it if a row is the
    sum of several steps' gradients."""
    values: Values = "fp32"
    """Number format of the gradient values on the wire, rounded to nearest, or a class of your own."""
    scale: Scale | None = None
    """Row scale of int8, int4 and int2: pow2 = a power of two, 1 byte; fp16 = a 16-bit float, 2 bytes; default
    pow2."""

    @model_validator(mode="after")
    def _every_setting_is_used(self) -> PushConfig:
        _check_scale(self.values, self.scale)
        if self.select == "top_k" and self.values == "fp32":
            self._refuse(("second_moment",), "has no effect with select: top_k and values: fp32")
        if not self.pool_rows:
            self._refuse(("second_moment", "select"), "has no effect without pool_rows")
            self._refuse(("keep",), "drops gradients without pool_rows; allowed: pool_rows above 0, or keep: 1")
        if self.keep == 1.0:
            self._refuse(("warmup_steps",), "has no effect where all is sent")
        return self

    def _refuse(self, keys: Sequence[str], why: str) -> None:
        """Raises ValueError for the first of these settings that is not its default."""
        for key in keys:
            value = getattr(self, key)
            if value != type(self).model_fields[key].default:
                raise ValueError(f"{key}: {'' if value is True else f'{value} '}{why}")


class PullConfig(Settings):
    """How rows are sent from the servers to a worker."""

    cache_rows: int = Field(0, ge=0, le=MOST_ROWS)
    """Rows that a worker keeps and does not pull again while their lease is valid; 0 = none."""
    lease: int = Field(0, ge=0, le=MOST_STEPS)
    """Steps for which a cached row is used. It may lag behind by so many steps more than the consistency mode
    allows."""
    drift: float | None = Field(None, gt=0.0, le=1e6)
    """Share of its norm by which a cached row may have moved, judged by its last two reads. Rows that move fast are
    read more often than `lease` says; left out = no limit."""

    values: Values = "fp32"
    """Number format of row values on the wire, rounded to nearest, or a class of your own. Servers store rows as
    `tables` says, and evaluation reads fp32."""
    scale: Scale | None = None
    """Row scale, as in `push`; default pow2."""

    @model_validator(mode="after")
    def _every_setting_is_used(self) -> PullConfig:
        _check_scale(self.values, self.scale)
        if bool(self.cache_rows) != bool(self.lease):
            raise ValueError(
                f"cache_rows: {self.cache_rows} with lease: {self.lease}; allowed: both 0, or both above 0"
            )
        if self.drift is not None and not self.lease:
            raise ValueError("drift: has no effect with lease: 0")
        return self


_TOWER = "shardkeep.compression.tower"
FORMS: dict[str, Plug[tuple[str, ...], Any]] = by_name(
    Plug("none", (), f"{_TOWER}.formats:none"),
    Plug("fp16", (), f"{_TOWER}.formats:fp16"),
    Plug("topk", ("keep", "values"), f"{_TOWER}.top_k:TopK", ("shardkeep.compression.ids.set_kernels",)),
    Plug("powersgd", ("values", "rank"), f"{_TOWER}.powersgd:PowerSGD"),
)
"""Forms of the tower's sum that are built in: the options that each takes, and its class."""


class TowerCompressionConfig(OwnConfig):
    """How dense gradients are sent between workers."""

    built_in = tuple(FORMS)
    name: str = "none"
    """none = fp32. fp16 rounds every value, in blocks of 64 with a scale. topk sends the largest values of each
    parameter, powersgd a product of two thin matrices for each large one; both keep a residual and send it later. Or
    module:Class of your own, which is searched last in `data.root`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Class of your own only: its keyword arguments."""
    keep: float | None = Field(None, gt=0.0, le=1.0)
    """topk only: share of each parameter's values that is sent, at least one; parameters below 1024 values are sent
    whole; default 0.01."""
    values: Literal["fp16", "int8"] | None = None
    """topk and powersgd only: number format of what is sent; default fp16 with topk, fp32 with powersgd."""
    rank: int | None = Field(None, ge=1, le=MOST_WIDTH)
    """powersgd only: rank of the approximation; default 2."""
    warmup_steps: int | None = Field(None, ge=0, le=MOST_STEPS)
    """topk and powersgd only: number of first steps in which all values are sent, as fp16; default 0."""

    @field_validator("name", mode="before")
    @classmethod
    def _is_no_example(cls, value: Any) -> Any:
        if value == "lossless":
            raise ValueError("it is an example now; allowed: shardkeep.examples.compression.lossless:Lossless")
        return value

    @model_validator(mode="after")
    def _every_argument_is_used(self) -> TowerCompressionConfig:
        form = FORMS.get(self.name)
        used = {"name", *(("options",) if form is None else form.config)}
        used |= {"warmup_steps"} if form is not None and form.config else set()
        wrong = [key for key in type(self).model_fields if key not in used and getattr(self, key) not in (None, {})]
        if wrong:
            raise ValueError(f"{' and '.join(wrong)}: has no effect with name: {self.name}")
        return self


class CompressionConfig(Settings):
    """What is compressed, in each direction."""

    ids: Literal["raw", "coded"] = "raw"
    """coded = the shortest of several codes; raw = 8 bytes per id."""
    push: PushConfig = PushConfig()
    """Row gradients, from workers to servers."""
    pull: PullConfig = PullConfig()
    """Rows, from servers to workers."""
    tower: TowerCompressionConfig = TowerCompressionConfig()
    """Dense gradients, between workers."""

    @property
    def own(self) -> list[str]:
        """The `module:Class` names of the user's own that it has."""
        names = self.push.values, self.push.select, self.pull.values, self.tower.name
        return [str(name) for name in names if ":" in str(name)]
