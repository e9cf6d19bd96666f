"""Settings of the dense model. A stock model refuses the options that it does not use."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from shardkeep.base.settings import MOST_WIDTH, Named, Settings, Width, own_code

_HIDDEN = ("top", "dropout", "norm", "activation", "init", "activation_checkpointing", "sync_norm")
MODELS: dict[str, tuple[str, ...]] = {
    "lr": (),
    "fm": (),
    "dnn": _HIDDEN,
    "wide_deep": _HIDDEN,
    "deepfm": _HIDDEN,
    "xdeepfm": (*_HIDDEN, "cin"),
    "dlrm": (*_HIDDEN, "bottom"),
    "dcn_v2": (*_HIDDEN, "structure", "cross_layers", "cross_rank"),
    "autoint": (*_HIDDEN, "attention"),
    "fibinet": (*_HIDDEN, "bilinear", "reduction"),
    "masknet": (*(key for key in _HIDDEN if key != "norm"), "structure", "mask"),
    "finalmlp": (*_HIDDEN, "second_top", "fusion_heads", "gates"),
}
"""The stock models, and the options of each."""
_STRUCTURES = {"dcn_v2": ("stacked", "parallel"), "masknet": ("serial", "parallel")}
_MOST_LAYERS = 100


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

    widths: list[Width] = Field([64], max_length=_MOST_LAYERS)
    """Widths of a gate's hidden layers."""
    first: list[str] = Field(default_factory=list)
    """Features that the first stream's gate sees; none = a learned vector."""
    second: list[str] = Field(default_factory=list)
    """Features that the second stream's gate sees; none = a learned vector."""


class ModelConfig(Named):
    """The dense model over the pooled embeddings. An option that the model does not use is refused."""

    name: str = "dlrm"
    """lr, fm, dnn, wide_deep, deepfm, xdeepfm, dlrm, dcn_v2, autoint, fibinet, masknet, finalmlp, or your own
    module:Class."""
    bottom: Annotated[list[Width], Field(max_length=_MOST_LAYERS)] | None = None
    """dlrm: widths of the hidden layers over the dense columns; a layer of the default dim follows; default [512,
    256]."""
    top: Annotated[list[Width], Field(max_length=_MOST_LAYERS)] | None = None
    """Widths of the hidden layers before the logit; default [512, 256]."""
    dropout: float | None = Field(None, ge=0.0, lt=1.0)
    """Dropout after every hidden layer; default 0."""
    norm: Literal["none", "batch", "layer"] | None = None
    """Normalization in every hidden layer, before the activation (docs/guide/models.md); default none."""
    sync_norm: bool = False
    """Batch norm and Dice take the statistics of all workers' samples, not of one worker's."""
    activation: Literal["relu", "gelu", "prelu", "dice"] | None = None
    """Activation of the hidden layers; default relu."""
    init: Literal["dlrm", "xavier_normal", "xavier_uniform", "kaiming_uniform"] | None = None
    """Initial values of the linear layers; default dlrm: xavier_normal with random biases."""
    structure: Literal["stacked", "parallel", "serial"] | None = None
    """dcn_v2: stacked (default) or parallel; masknet: serial (default) or parallel."""
    cross_layers: int | None = Field(None, ge=1, le=16)
    """dcn_v2: number of cross layers; default 3."""
    cross_rank: int | None = Field(None, ge=1, le=MOST_WIDTH)
    """dcn_v2: rank of the weights of the cross layers; left out = full rank."""
    cin: Annotated[list[Width], Field(min_length=1, max_length=16)] | None = None
    """xdeepfm: vectors of each layer of the compressed interaction network; default [16, 16, 16]."""
    attention: AttentionConfig | None = None
    """autoint: self-attention between fields."""
    bilinear: Literal["all", "each", "interaction"] | None = None
    """fibinet: one matrix for all fields, for each field, or for each pair; default interaction."""
    reduction: int | None = Field(None, ge=1, le=1000)
    """fibinet: fields divided by the width of SENET's hidden layer; default 3."""
    mask: MaskConfig | None = None
    """masknet: its blocks."""
    second_top: Annotated[list[Width], Field(max_length=_MOST_LAYERS)] | None = None
    """finalmlp: widths of the second stream's hidden layers; left out = `top`."""
    fusion_heads: int | None = Field(None, ge=1, le=1024)
    """finalmlp: heads of the bilinear fusion of both streams; default 1."""
    gates: GatesConfig | None = None
    """finalmlp: gates on the streams' inputs."""
    activation_checkpointing: bool = False
    """Recompute hidden layers in the backward pass to save memory."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your module:Class."""

    @field_validator("name")
    @classmethod
    def _known_name(cls, value: str) -> str:
        return own_code(value, tuple(MODELS), "module:Class")

    @model_validator(mode="after")
    def _every_option_is_used(self) -> ModelConfig:
        used = MODELS.get(self.name, ("options",))
        for key in type(self).model_fields:
            value = getattr(self, key)
            if not (key == "name" or key in used or value is None or value is False or value == {}):
                allowed = f"it uses {', '.join(used)}" if used else "it has no options"
                raise ValueError(f"{key}: has no effect with model.name: {self.name}; {allowed}")
        if self.sync_norm and self.norm != "batch" and self.activation != "dice":
            raise ValueError("sync_norm: has no effect; allowed with norm: batch or activation: dice")
        structures = _STRUCTURES.get(self.name, ())
        if self.structure is not None and self.structure not in structures:
            raise ValueError(
                f"structure: {self.structure} with model.name: {self.name}; allowed: {' or '.join(structures)}"
            )
        if self.mask is not None and self.structure != "parallel":
            for key in ("blocks", "dim"):
                if getattr(self.mask, key) is not None:
                    raise ValueError(f"mask.{key}: has no effect with structure: serial; allowed: structure: parallel")
        return self

    @property
    def kernels(self) -> tuple[str, ...]:
        """The modules of kernels that the model imports."""
        return ("shardkeep.workers.models.layers.interaction_kernels",) if self.name == "dlrm" else ()
