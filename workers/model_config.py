"""Settings of the dense model: a class for each model, with the keys that it has.

To add one, write its class and its module, and name the class in the union here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator
from pydantic_core import core_schema

from shardkeep.base.plugging.plugs import Plug, by_name
from shardkeep.base.settings import MOST_WIDTH, Settings, Width, bare, own_code
from shardkeep.workers.encoder_config import DinEncoderConfig, EncoderConfig, TransformerEncoderConfig

OWN = "module:Class"
_NAME = Field(description="The model.")
Widths = Annotated[list[Width], Field(max_length=100)]


class AttentionConfig(Settings):
    """Self-attention between fields."""

    layers: int = Field(3, ge=1, le=16)
    """Number of layers."""
    heads: int = Field(2, ge=1, le=64)
    """Heads of each layer."""
    dim: int = Field(64, ge=1, le=4096)
    """Width of all heads together; a multiple of `heads`."""

    @model_validator(mode="after")
    def _heads_are_equally_wide(self) -> AttentionConfig:
        if self.dim % self.heads:
            raise ValueError(f"dim: {self.dim} with heads: {self.heads}; allowed: a multiple of heads")
        return self


class MaskConfig(Settings):
    """Blocks that multiply their input by a mask."""

    ratio: float = Field(1.0, gt=0.0, le=16.0)
    """Width of the mask's hidden layer, divided by that of the masked input."""
    blocks: int | None = Field(None, ge=1, le=64)
    """structure: parallel only: number of blocks; default 3."""
    dim: int | None = Field(None, ge=1, le=MOST_WIDTH)
    """structure: parallel only: width of a block's output; default 64."""


class GatesConfig(Settings):
    """Gates on the inputs of two streams."""

    hidden: Widths = Field([64])
    """Widths of a gate's hidden layers."""
    first: list[str] = Field(default_factory=list)
    """Features that the first stream's gate sees; none = a learned vector."""
    second: list[str] = Field(default_factory=list)
    """Features that the second stream's gate sees; none = a learned vector."""


class ModelSettings(Settings):
    """What all models have."""

    kernels: ClassVar[tuple[str, ...]] = ()
    """The modules of kernels that the model imports."""
    code: ClassVar[str] = ""
    """The module and class of a model that has not the file and class of its name."""
    name: str


class _Hidden(ModelSettings):
    """A model with hidden layers."""

    hidden: Widths = Field([512, 256])
    """Widths of the hidden layers before the logit."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout after every hidden layer."""
    activation: Literal["relu", "gelu", "prelu", "dice"] = "relu"
    """Activation of the hidden layers."""
    init: Literal["dlrm", "xavier_normal", "xavier_uniform", "kaiming_uniform"] = "dlrm"
    """Initial values of the linear layers; dlrm = xavier_normal with random biases."""
    activation_checkpointing: bool = False
    """Recompute hidden layers in the backward pass to save memory."""
    encoder: EncoderConfig | None = None
    """What makes one vector of each id column of a sequence; left out = mean."""

    @model_serializer(mode="wrap")
    def _without_encoder(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Versions that know no encoders read the settings of a model without one."""
        found: dict[str, Any] = handler(self)
        return {key: value for key, value in found.items() if key != "encoder" or value is not None}


class _Normed(_Hidden):
    """A model whose hidden layers may be normalized."""

    norm: Literal["none", "batch", "layer"] = "none"
    """Normalization in every hidden layer, before the activation (docs/guide/models.md)."""


class LrConfig(ModelSettings):
    """Logistic regression."""

    name: Annotated[Literal["lr"], _NAME] = "lr"


class FmConfig(ModelSettings):
    """Factorization machine."""

    name: Annotated[Literal["fm"], _NAME] = "fm"


class DnnConfig(_Normed):
    """Hidden layers over all inputs."""

    name: Annotated[Literal["dnn"], _NAME] = "dnn"


class DinConfig(_Normed):
    """`dnn` with the encoder `din`."""

    code = "dnn:Dnn"
    name: Annotated[Literal["din"], _NAME] = "din"
    encoder: DinEncoderConfig = DinEncoderConfig()
    """Its encoder."""


class BstConfig(_Normed):
    """`dnn` with the encoder `transformer`."""

    code = "dnn:Dnn"
    name: Annotated[Literal["bst"], _NAME] = "bst"
    encoder: TransformerEncoderConfig = TransformerEncoderConfig()
    """Its encoder."""


class WideDeepConfig(_Normed):
    """Wide & Deep."""

    name: Annotated[Literal["wide_deep"], _NAME] = "wide_deep"


class DeepFmConfig(_Normed):
    """DeepFM."""

    name: Annotated[Literal["deepfm"], _NAME] = "deepfm"


class XDeepFmConfig(_Normed):
    """xDeepFM."""

    name: Annotated[Literal["xdeepfm"], _NAME] = "xdeepfm"
    cin: list[Width] = Field([16, 16, 16], min_length=1, max_length=16)
    """Vectors of each layer of the compressed interaction network."""


class DlrmConfig(_Normed):
    """DLRM."""

    kernels = ("shardkeep.workers.models.layers.interaction_kernels",)
    name: Annotated[Literal["dlrm"], _NAME] = "dlrm"
    bottom: Widths = Field([512, 256])
    """Widths of the hidden layers over the dense columns; a layer of the default dim follows."""


class DcnV2Config(_Normed):
    """DCN V2."""

    name: Annotated[Literal["dcn_v2"], _NAME] = "dcn_v2"
    structure: Literal["stacked", "parallel"] = "stacked"
    """Hidden layers after the cross layers, or beside them."""
    cross_layers: int = Field(3, ge=1, le=16)
    """Number of cross layers."""
    cross_rank: int | None = Field(None, ge=1, le=MOST_WIDTH)
    """Rank of the weights of the cross layers; left out = full rank."""


class AutoIntConfig(_Normed):
    """AutoInt."""

    name: Annotated[Literal["autoint"], _NAME] = "autoint"
    attention: AttentionConfig = AttentionConfig()
    """Self-attention between fields."""


class FiBiNetConfig(_Normed):
    """FiBiNET."""

    name: Annotated[Literal["fibinet"], _NAME] = "fibinet"
    bilinear: Literal["all", "each", "interaction"] = "interaction"
    """One matrix for all fields, for each field, or for each pair."""
    reduction: int = Field(3, ge=1, le=1000)
    """Fields divided by the width of SENET's hidden layer."""


class MaskNetConfig(_Hidden):
    """MaskNet, with a layer norm of its own."""

    name: Annotated[Literal["masknet"], _NAME] = "masknet"
    structure: Literal["serial", "parallel"] = "serial"
    """A block after the other, or side by side."""
    mask: MaskConfig = MaskConfig()
    """Its blocks."""

    @model_validator(mode="after")
    def _blocks_are_parallel(self) -> MaskNetConfig:
        for key in ("blocks", "dim"):
            if self.structure != "parallel" and getattr(self.mask, key) is not None:
                raise ValueError(f"mask.{key}: has no effect with structure: serial; allowed: structure: parallel")
        return self


class FinalMlpConfig(_Normed):
    """FinalMLP."""

    name: Annotated[Literal["finalmlp"], _NAME] = "finalmlp"
    second_hidden: Widths | None = None
    """Widths of the second stream's hidden layers; left out = `hidden`."""
    fusion_heads: int = Field(1, ge=1, le=1024)
    """Heads of the bilinear fusion of both streams."""
    gates: GatesConfig = GatesConfig()
    """Gates on the streams' inputs."""


class _Tasks(_Normed):
    """A model of several labels that share experts."""

    hidden: Annotated[Widths, Field(min_length=1)] = Field([512, 256])
    """Widths of each expert's layers."""
    task_hidden: Widths = Field([64])
    """Widths of the hidden layers of each label, before its logit."""


class MmoeConfig(_Tasks):
    """MMoE."""

    code = "tasks.mmoe:Mmoe"
    name: Annotated[Literal["mmoe"], _NAME] = "mmoe"
    experts: int = Field(8, ge=1, le=256)
    """Experts, which all labels share."""


class PleConfig(_Tasks):
    """PLE."""

    code = "tasks.ple:Ple"
    name: Annotated[Literal["ple"], _NAME] = "ple"
    levels: int = Field(2, ge=1, le=16)
    """Levels of experts; 1 = CGC."""
    shared_experts: int = Field(2, ge=1, le=256)
    """Experts of each level that all labels share."""
    task_experts: int = Field(2, ge=1, le=256)
    """Experts of each level for each label."""


class RetrievalSettings(ModelSettings):
    """A model of vectors of users and items, whose similarity says what a user takes next."""

    kernels = ("shardkeep.workers.retrieval.ranking_kernels",)
    predicts: ClassVar[Literal["item", "next"]] = "item"
    """The item of each sample, or each entry of its list and then the item."""
    item: list[str] = Field([], max_length=1000)
    """The columns of an item; the first names it."""
    similarity: Literal["cosine", "dot"] = "cosine"
    """Of the vectors of a user and an item."""


class TwoTowerConfig(_Normed, RetrievalSettings):
    """Two towers."""

    code = "retrieval.two_tower:TwoTower"
    name: Annotated[Literal["two_tower"], _NAME] = "two_tower"
    item: list[str] = Field([], max_length=1000)
    """The columns of an item; the first names it. All others are the user's."""
    dim: Width = 64
    """Width of the vectors of users and items."""


class _NextItem(RetrievalSettings):
    """A model that predicts each entry of a list from those before it."""

    predicts = "next"
    similarity: Literal["cosine", "dot"] = "dot"
    """Of the vectors of a user and an item."""
    item: list[str] = Field([], max_length=1)
    """The column of the item that follows the list; left out = the feature of the same table."""
    layers: int = Field(2, ge=1, le=16)
    """Number of layers."""
    heads: int = Field(1, ge=1, le=64)
    """Heads of each layer; they divide the dim of the item's table."""
    dropout: float = Field(0.2, ge=0.0, lt=1.0)
    """Dropout inside the layers."""


class SasRecConfig(_NextItem):
    """SASRec."""

    code = "retrieval.sasrec:SasRec"
    name: Annotated[Literal["sasrec"], _NAME] = "sasrec"
    hidden: Width | None = None
    """Width of the hidden layer after each attention; left out = the dim of the item's table."""


class HstuConfig(_NextItem):
    """HSTU as a model of what comes next."""

    code = "retrieval.hstu:Hstu"
    name: Annotated[Literal["hstu"], _NAME] = "hstu"


class OwnModelConfig(ModelSettings):
    """A class of your own."""

    name: str
    """Its module:Class."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""

    @field_validator("name")
    @classmethod
    def _names_code(cls, value: str) -> str:
        return own_code(value, tuple(MODELS), OWN)


class _ByName:
    """Makes a union of models one by their names, and by a colon for a class of the user's own."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        kinds = {_name(kind): handler.generate_schema(kind) for kind in get_args(source)}
        return core_schema.tagged_union_schema(kinds, discriminator=_kind_of)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        found: dict[str, Any] = handler(schema)
        kinds = {_name(kind): one["$ref"] for kind, one in zip(KINDS, found["oneOf"], strict=True)}
        return found | {"discriminator": {"propertyName": "name", "mapping": kinds}}


def _kind_of(value: Any) -> Any:
    name = value.get("name", "dlrm") if isinstance(value, Mapping) else getattr(value, "name", None)
    return OWN if ":" in str(name) else name


def _name(model: type[ModelSettings]) -> str:
    return OWN if model is OwnModelConfig else str(model.model_fields["name"].default)


ModelConfig = Annotated[
    LrConfig | FmConfig | DnnConfig | DinConfig | BstConfig | WideDeepConfig | DeepFmConfig | XDeepFmConfig | DlrmConfig
    | DcnV2Config | AutoIntConfig | FiBiNetConfig | MaskNetConfig | FinalMlpConfig | MmoeConfig | PleConfig
    | TwoTowerConfig | SasRecConfig | HstuConfig | OwnModelConfig,
    _ByName(), bare("name"),
]  # fmt: skip
KINDS: tuple[type[ModelSettings], ...] = get_args(get_args(ModelConfig)[0])


def _plug(config: type[ModelSettings]) -> Plug[type[ModelSettings], Any]:
    name = _name(config)
    code = config.code or f"{name}:{config.__name__.removesuffix('Config')}"
    return Plug(name, config, f"shardkeep.workers.models.{code}", config.kernels)


ONE_LABEL = ("lr", "fm")
"""Models without a last layer, which predict one label."""
MODELS = by_name(*map(_plug, KINDS[:-1]))
"""The stock models: the settings of each, and its class."""
RETRIEVAL = tuple(name for name, plug in MODELS.items() if issubclass(plug.config, RetrievalSettings))
"""Models of vectors, trained by `sampled_softmax`."""


def keys_of(name: Any) -> dict[str, Any]:
    """The keys of a model, and the types of their values."""
    kind = MODELS[name].config if name in MODELS else OwnModelConfig
    return {key: field.annotation for key, field in kind.model_fields.items() if key != "name"}
