"""``[train]``: how a recipe is trained."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from hybridtf.core import ConfigError, RecipeError, Role, nearest
from hybridtf.core.config import ConfigTable, tuples
from hybridtf.models.weights import MAX_SHARD_BYTES
from hybridtf.recipe import Recipe

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
EvalContext: TypeAlias = Literal["window", "document"]
CheckpointLayers: TypeAlias = Literal["none", "all"] | int | tuple[int, ...]
EvalTokens: TypeAlias = Literal["all"] | Annotated[int, Field(ge=0)]
MuonScale: TypeAlias = Literal["match_rms_adamw", "original"]
SinkName: TypeAlias = Literal["tensorboard", "trackio", "wandb"]


class RoleOptions(ConfigTable):
    """What the optimizer does with all parameters of one role."""

    lr_scale: float = Field(default=1.0, ge=0)
    """Multiplies the learning rate."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Not given: ``train.weight_decay``, or none for norms, biases and state parameters."""


class MuonOptions(ConfigTable):
    """What Muon does with matrices; their weight decay is that of the role ``matrix``."""

    lr: float | None = Field(default=None, gt=0)
    """The highest learning rate of matrices; not given: ``train.lr``. It follows the same schedule."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    nesterov: bool = True
    scale: MuonScale = "match_rms_adamw"
    """The size of an update of a matrix (out in): 0.2 sqrt(max(out, in)), about that of AdamW, so that one ``lr`` serves both
    (Liu et al. 2025, arXiv 2502.16982); or sqrt(max(1, out / in)), for rates of about 0.02."""
    ns_steps: int = Field(default=5, gt=0, lt=100)
    """Newton-Schulz steps."""
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Of the Newton-Schulz steps; ``auto``: bf16 on a GPU, else fp32; float64 parameters keep float64 but for bf16."""


class TeacherOptions(ConfigTable):
    """A model to be matched: see ``hybridtf/train/teacher.py``."""

    run: str = Field(min_length=1)
    """A run (its newest checkpoint), checkpoint or model folder; its model stays as it is."""
    given: Literal["student", "teacher"] = "student"
    """``student``: the model that learns reads the text itself, end to end. ``teacher``: each matched layer alone reads what
    the teacher's layer read, and ``hidden`` is the whole loss."""
    hidden: float = Field(default=1.0, ge=0)
    """Weight of the squared distance of the matched layers' outputs."""
    logits: float = Field(default=1.0, ge=0)
    """Weight of the divergence of the scores."""
    loss: float = Field(default=1.0, ge=0)
    """Weight of the cross-entropy of the text."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides both scores before their divergence is taken."""
    layers: Literal["replaced", "all"] | tuple[Annotated[int, Field(ge=0)], ...] = "replaced"
    """The matched layers; ``replaced``: those whose mixers are not the teacher's."""
    trains: Literal["all", "replaced"] = "all"
    """``replaced``: only the mixers of the matched layers are trained."""

    @model_validator(mode="before")
    @classmethod
    def _alone(cls, data: Any) -> Any:
        # A layer by itself has no scores: their weights are 0 where nothing else is said.
        alone = isinstance(data, Mapping) and data.get("given") == "teacher"
        return {"logits": 0.0, "loss": 0.0, **data} if alone else data

    @model_validator(mode="after")
    def _teaches(self) -> Self:
        if self.given == "teacher" and (self.logits or self.loss):
            raise ValueError("given = 'teacher' trains layers by themselves, which have no scores: logits and loss must be 0")
        if not self.hidden and (self.given == "teacher" or not self.logits):
            raise ValueError("nothing of the teacher has a weight: give hidden or logits")
        if not self.hidden and self.trains == "all" and self.layers != "replaced":
            raise ValueError("layers names layers that nothing is done with: hidden is 0, and trains is 'all'")
        if not self.logits and self.temperature != 1:
            raise ValueError("temperature is of the scores, whose weight logits is 0")
        return self


def _teacher_options(value: Any) -> Any:
    return TeacherOptions(**value) if isinstance(value, Mapping) else value


def _role_options(value: Any) -> Any:
    # Made here and not by pydantic, so that an unknown option is answered with this table's names.
    return RoleOptions(**value) if isinstance(value, Mapping) else value


def _muon_options(value: Any) -> Any:
    return MuonOptions(**value) if isinstance(value, Mapping) else value


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
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the training data, rounded up to whole steps; for tasks that have epochs."""
    batch_size: int = Field(default=8, gt=0)
    """Rows of one forward pass."""
    seq_len: int = Field(default=256, gt=0)
    """Tokens of a row."""
    accumulation: int = Field(default=1, gt=0)
    """Forward passes of one optimizer step: it learns from ``batch_size * accumulation`` rows."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """``muon``: Muon for the matrices, AdamW for everything else."""
    muon: Annotated[MuonOptions | None, BeforeValidator(_muon_options)] = None
    """Options of Muon; only with ``optimizer = "muon"``, which without them takes the defaults."""
    lr: float = Field(default=1e-3, gt=0)
    """The highest learning rate of the schedule."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    """Of matrices, convolutions, embeddings and heads; norms, biases and state parameters have none, see ``roles``."""
    roles: dict[Role, Annotated[RoleOptions, BeforeValidator(_role_options)]] = Field(default_factory=dict)
    """By role, such as ``roles = { embedding = { weight_decay = 0.0 } }``."""
    optimizer_form: Literal["auto", "loop", "foreach", "fused"] = "auto"
    """torch's implementation of the update; ``auto``: fused on CPU and CUDA, else foreach."""
    clip_norm: float = Field(default=1.0, ge=0)
    """The gradient is scaled down to this norm; 0: never."""
    loss_weights: dict[str, float] = Field(default_factory=dict)
    """Weights of the model's auxiliary losses by name; 1 where none is given."""

    teacher: Annotated[TeacherOptions | None, BeforeValidator(_teacher_options)] = Field(
        default=None, examples=[{"run": "runs/teacher"}]
    )
    """Match another model while training."""

    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: float = Field(default=0.02, ge=0)
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
    stop_at: float | None = None
    """End the run at the first check whose score on the first group of the task's third side (``task.validation``) is as good
    as this, in its measure; a check comes every ``stop_every`` steps. Steps are then the most that are made, and schedules
    follow them."""
    stop_every: int = Field(default=50, gt=0)
    save_every: int = Field(default=500, gt=0)
    """Steps between checkpoints; one is always saved at the end, on Ctrl-C and on SIGTERM."""
    keep_checkpoints: int = Field(default=2, gt=0)
    max_shard_bytes: int = Field(default=MAX_SHARD_BYTES, gt=0)
    """Tensors of a checkpoint that need more than this are written as several files and an index."""

    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Keep an exponential average of the parameters, which update t (from 0) decays by min(this, (1 + t) / (10 + t))."""
    ema_every: int = Field(default=1, gt=0)
    """Steps between updates of the average."""
    eval_ema: bool = False
    """Every evaluation scores the average too."""

    stats_every: int | None = Field(default=None, gt=0)
    """Steps between lines about gradients, weights and activations of every layer; not given: none."""
    sinks: tuple[SinkName, ...] = ()
    """Where log lines are sent beside ``log.jsonl``; needs the extra ``track``."""

    @model_validator(mode="before")
    @classmethod
    def _muon(cls, data: Any) -> Any:
        # The options that were used are to stand in the resolved recipe.
        if isinstance(data, Mapping) and data.get("optimizer") == "muon" and data.get("muon") is None:
            return {**data, "muon": {}}
        return data

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
        if self.muon is not None and self.optimizer != "muon":
            raise ValueError(f"muon gives options of Muon, and optimizer is {self.optimizer!r}; give optimizer = 'muon'")
        if self.compile and self.teacher is not None and self.teacher.hidden:
            raise ValueError("compile = true hides what layers give: set teacher.hidden = 0, or leave compile out")
        if self.ema_decay is None and (self.eval_ema or self.ema_every != 1):
            raise ValueError("eval_ema and ema_every are about an average that is not kept; give ema_decay")
        if self.stop_at is not None and not math.isfinite(self.stop_at):
            raise ValueError(f"stop_at must be finite, got {self.stop_at}")
        if self.stop_at is None and self.stop_every != 50:
            raise ValueError("stop_every is about checks that are not made; give stop_at")
        if len(set(self.sinks)) != len(self.sinks):
            raise ValueError(f"sinks names one twice: {list(self.sinks)}")
        for name, weight in self.loss_weights.items():
            if not math.isfinite(weight):
                raise ValueError(f"loss_weights.{name} must be finite, got {weight}")
        return self


MAY_CHANGE: frozenset[str] = frozenset({
    "steps", "tokens", "epochs", "log_every", "eval_every", "eval_tokens", "eval_context", "eval_ema",
    "save_every", "keep_checkpoints", "max_shard_bytes", "stats_every", "sinks", "stop_at", "stop_every", "teacher.run",
})
"""Options of ``[train]`` that a resumed run may change; the place of the teacher, whose weights must be the same."""


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
