"""``[train]``: how a recipe is trained."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from hybridtf.core import ConfigError, RecipeError, Role, nearest
from hybridtf.core.config import ConfigTable, tuples
from hybridtf.recipe import Recipe

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
EvalContext: TypeAlias = Literal["window", "document"]
CheckpointLayers: TypeAlias = Literal["none", "all"] | int | tuple[int, ...]
EvalTokens: TypeAlias = Literal["all"] | Annotated[int, Field(ge=0)]


class RoleOptions(ConfigTable):
    """What the optimizer does with all parameters of one role."""

    lr_scale: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Multiplies the learning rate."""
    weight_decay: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Not given: ``train.weight_decay``, or none for norms, biases and state parameters."""


def _role_options(value: Any) -> Any:
    # Made here and not by pydantic, so that an unknown option is answered with this table's names.
    return RoleOptions(**value) if isinstance(value, Mapping) else value


def _layers(value: Any) -> CheckpointLayers:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value in ("none", "all") or (whole and value > 0):
        return typing.cast(CheckpointLayers, value)
    if isinstance(value, list | tuple) and all(type(i) is int and i >= 0 for i in value):
        return tuple(value)
    near = nearest(value, ("none", "all")) if isinstance(value, str) else None
    hint = f". Did you mean {near!r}?" if near else ""
    raise ConfigError(f"must be 'none', 'all', n > 0 (every n-th layer) or a list of layers, got {value!r}{hint}")


def _eval_tokens(value: Any) -> EvalTokens:
    if value == "all" or (type(value) is int and value >= 0):
        return typing.cast(EvalTokens, value)
    raise ConfigError(f"must be 'all' or a number of tokens (0: no evaluation), got {value!r}")


EvalTokensField = Annotated[EvalTokens, PlainValidator(_eval_tokens, json_schema_input_type=EvalTokens)]
LayersField = Annotated[CheckpointLayers, PlainValidator(_layers, json_schema_input_type=CheckpointLayers)]


class TrainConfig(ConfigTable):
    """The table ``[train]``. The length of a run is exactly one of ``steps``, ``tokens`` and ``epochs``."""

    steps: int | None = Field(default=None, gt=0)
    """Optimizer steps."""
    tokens: int | None = Field(default=None, gt=0)
    """Positions of all rows (padding included), rounded up to whole steps."""
    epochs: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Passes over the training data, rounded up to whole steps; for tasks that have epochs."""
    batch_size: int = Field(default=8, gt=0)
    """Rows of one forward pass."""
    seq_len: int = Field(default=256, gt=0)
    """Tokens of a row."""
    accumulation: int = Field(default=1, gt=0)
    """Forward passes of one optimizer step: it learns from ``batch_size * accumulation`` rows."""

    optimizer: Literal["adamw"] = "adamw"
    lr: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """The highest learning rate of the schedule."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Of matrices, convolutions, embeddings and heads; norms, biases and state parameters have none, see ``roles``."""
    roles: dict[Role, Annotated[RoleOptions, BeforeValidator(_role_options)]] = Field(default_factory=dict)
    """By role, such as ``roles = { embedding = { weight_decay = 0.0 } }``."""
    optimizer_form: Literal["auto", "loop", "foreach", "fused"] = "auto"
    """torch's implementation of the update; ``auto``: fused on CPU and CUDA, else foreach."""
    clip_norm: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """The gradient is scaled down to this norm; 0: never."""
    loss_weights: dict[str, float] = Field(default_factory=dict)
    """Weights of the model's auxiliary losses by name; 1 where none is given."""

    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: float = Field(default=0.02, ge=0, allow_inf_nan=False)
    """Below 1: share of the run; from 1 on: steps."""
    min_lr_fraction: float = Field(default=0.1, ge=0, le=1)
    """Where cosine and wsd end, as a share of ``lr``."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """The share of the run over which wsd falls."""

    precision: Precision = "fp32"
    """``bf16`` and ``fp16`` by autocast; parameters stay float32. ``fp16`` scales the loss, and needs a GPU."""
    checkpoint_layers: LayersField = "none"
    """Layers whose activations are computed again in the backward pass: none, all, every n-th, or a list."""
    compile: bool = False
    """Run the model through ``torch.compile``."""
    seed: int = 0
    """Of the parameters, the order of the data, and dropout."""

    log_every: int = Field(default=10, gt=0)
    eval_every: int | None = Field(default=None, gt=0)
    """Steps between evaluations; not given: only at the end."""
    eval_tokens: EvalTokensField = 100_000
    """At most this many held-out tokens an evaluation, the first of every document; ``"all"``; 0: no evaluation."""
    eval_context: EvalContext = "window"
    """What a held-out token is predicted from: a window of ``seq_len`` tokens, or its document from the start."""
    save_every: int = Field(default=500, gt=0)
    """Steps between checkpoints; one is always saved at the end, on Ctrl-C and on SIGTERM."""
    keep_checkpoints: int = Field(default=2, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        lengths = [name for name in ("steps", "tokens", "epochs") if getattr(self, name) is not None]
        if len(lengths) != 1:
            got = " and ".join(lengths) if lengths else "none of them"
            raise ValueError(f"needs exactly one of steps, tokens and epochs, got {got}")
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise ValueError(f"warmup = {self.warmup} is neither a share of the run (below 1) nor whole steps")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be from 0 to below 1, got {list(self.betas)}")
        for name, weight in self.loss_weights.items():
            if not math.isfinite(weight):
                raise ValueError(f"loss_weights.{name} must be finite, got {weight}")
        return self


MAY_CHANGE: frozenset[str] = frozenset({
    "steps", "tokens", "epochs", "log_every", "eval_every", "eval_tokens", "eval_context", "save_every",
    "keep_checkpoints",
})
"""Options of ``[train]`` that a resumed run may change."""


def train_config(recipe: Recipe) -> TrainConfig:
    """``recipe.train`` as a config; raises :class:`RecipeError` where it is missing or wrong."""
    table = recipe.train
    if isinstance(table, TrainConfig):
        return table
    if table is None:
        raise RecipeError("", [("train", "the recipe has no section [train]; it needs steps, tokens or epochs")])
    if not isinstance(table, Mapping):
        raise RecipeError("", [("train", f"must be a table or a TrainConfig, not {type(table).__name__}")])
    try:
        return TrainConfig(**tuples(dict(table)))
    except RecipeError as error:
        faults = [(f"train.{path}" if path else "train", message) for path, message in error.faults]
        raise RecipeError("", faults) from None
