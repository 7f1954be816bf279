"""``language_model``: stem, stack, final norm, head; one causal stack over tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BlockConfig,
    BuildContext,
    Component,
    ConfigError,
    DataError,
    Head,
    HeadConfig,
    ModelConfig,
    NormConfig,
    RowsError,
    Segments,
    State,
    StemConfig,
    active,
    init_parameters,
    leaves,
    state_rows,
)
from hybridtf.core import Stack as StackView
from hybridtf.models.compose import add_losses, build_stack
from hybridtf.models.heads import LMHeadConfig
from hybridtf.models.merges import MergeConfig
from hybridtf.models.pattern import expand_pattern, print_pattern
from hybridtf.models.spreads import SpreadConfig
from hybridtf.models.stems import TokenEmbeddingConfig
from hybridtf.nn import RMSNormConfig

IGNORED = -100
"""A target that is not scored."""


class LanguageModelConfig(ModelConfig):
    """A stack of named blocks over tokens. ``pattern`` says which block each layer is; see ``recipes/README.md``."""

    type: Literal["language_model"] = "language_model"
    vocab_size: int = Field(gt=0)
    d_model: int = Field(gt=0)
    n_layers: int | None = Field(default=None, gt=0)
    """Needed where the pattern has a bare star; else it must equal what the pattern gives."""
    pattern: str
    blocks: dict[str, Component[BlockConfig]]
    """Blocks by name; without a ``type`` a block is ``prenorm``."""
    max_seq_len: int = Field(default=2048, gt=0)
    """The length that length-dependent parts are made for. Only a learned position table makes it a limit."""
    stem: Component[StemConfig] = Field(default_factory=TokenEmbeddingConfig)
    head: Component[HeadConfig] = Field(default_factory=LMHeadConfig)
    final_norm: Component[NormConfig] = Field(default_factory=RMSNormConfig)
    merge: MergeConfig | None = Field(default=None, examples=[{"type": "mean"}])
    """How what the stack ends with becomes one stream, where its blocks work on several or on partial sums. None: the sum of
    the streams, or a mix of the partial sums."""
    spread: SpreadConfig | None = Field(default=None, examples=[{"type": "projected"}])
    """How several streams start. None: each as what the stem gives."""
    residual_init: Literal["depth", "zero"] = "depth"
    """Matrices that end a residual branch start scaled by (2 n_layers)^-0.5, or at zero."""

    @classmethod
    def tiny(cls) -> Self:
        block = active()["blocks"].get("prenorm").tiny()
        return cls(vocab_size=11, d_model=8, pattern="a*2", blocks={"a": block}, max_seq_len=64)  # type: ignore[dict-item]

    def layers(self) -> tuple[str, ...]:
        """Block name of each layer."""
        return expand_pattern(self.pattern, self.blocks, self.n_layers)

    def stacks(self) -> tuple[StackView, ...]:
        layers = self.layers()
        return (StackView("decoder", print_pattern(layers), layers, self.blocks, self.d_model),)

    def build(self, ctx: BuildContext | None = None) -> LanguageModel:
        """The model. ``ctx`` gives device, dtypes, kernels and seed; the rest of it comes from this config."""
        return LanguageModel(self, ctx or BuildContext(d_model=self.d_model))


@dataclass(frozen=True, eq=False)
class LanguageModelOutput:
    """``logits`` (b t vocab), or (b vocab) for the last real token of each row, or None; the state after the call;
    auxiliary losses as (sum, count)."""

    logits: Tensor | None
    state: State | None
    losses: Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Loss:
    """Cross-entropy in nats summed over ``count`` scored tokens, and auxiliary losses as (sum, count)."""

    total: Tensor
    count: Tensor
    losses: Mapping[str, tuple[Tensor, Tensor]]

    def mean(self) -> Tensor:
        """Nats a scored token; 0 where nothing is scored."""
        return self.total / self.count.clamp(min=1)


class LanguageModel(nn.Module):
    """See :class:`LanguageModelConfig`."""

    def __init__(self, config: LanguageModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        layers = config.layers()
        ctx = ctx.child(
            "model", d_model=config.d_model, n_layers=len(layers), max_seq_len=config.max_seq_len, vocab_size=config.vocab_size,
            causal=True, defer_init=True,
        )
        if ctx.mesh is not None:
            raise ConfigError("language_model: a device mesh was given, and none of its parts says yet how it shards")
        self.seed = ctx.seed
        self.stem = config.stem.build(ctx.child("stem"), config.vocab_size)
        self.stack = build_stack(
            layers, config.blocks, ctx, edges=self.stem.writes, specs=self.stem.edge_specs(), merge=config.merge,
            spread=config.spread,
        )
        self.stem.unread(frozenset(self.stem.writes) - self.stack.read)
        self.final_norm = config.final_norm.build(ctx.child("final_norm"))
        self.head: Head = config.head.build(ctx.child("head"), config.vocab_size)
        if self.head.needs_tied_weight and self.stem.tied_weight() is None:
            raise ctx.child("head").error(f"a tied head needs a stem with an embedding; {config.stem.type_name()!r} has none")
        said = ((name, getattr(part, "cannot", {}).get("segment")) for name, part in self.named_modules())
        self.unsegmented = next((f"{name} says: {reason}" for name, reason in said if reason is not None), None)
        """Why segments are refused; None: they are obeyed."""
        self.reset_parameters()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def reset_parameters(self, seed: int | None = None) -> None:
        """Fill every parameter from (seed, its name): after ``to_empty`` this equals a normal build."""
        depth = (2 * len(self.stack.order)) ** -0.5
        scale = 0.0 if self.config.residual_init == "zero" else depth
        init_parameters(self, self.seed if seed is None else seed, residual_scale=scale)

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        """The empty state of ``batch_size`` rows. With ``max_len``, buffers of that many tokens, made once."""
        return {
            "stem": self.stem.init_state(batch_size, max_len), "layers": self.stack.init_state(batch_size, max_len),
            "head": self.head.init_state(batch_size, max_len),
        }

    def forward(
        self, token_ids: Tensor, *, segments: Segments | None = None, state: State | None = None, keep: int = 0,
        logits: Literal["all", "last", "none"] = "all",
    ) -> LanguageModelOutput:
        """Token ids (b t) to logits.

        ``segments`` says padding and packing; ``state`` is what an earlier call or :meth:`init_state` returned, and is
        consumed; with ``keep`` the new state can be cropped by that many tokens. ``logits = "last"`` computes only those
        of each row's last real token.
        """
        self._check_call(token_ids, segments, state)
        states: Mapping[str, State] = state or dict.fromkeys(("stem", "layers", "head"))
        x, stem_state, extras = self.stem(token_ids, segments=segments, state=states["stem"], keep=keep)
        out = self.stack(x, extras.edges, segments=segments, state=states["layers"], keep=keep)
        losses = add_losses(extras.losses, out.losses)
        # A head without a state need not see the tokens whose scores nobody asked for; one that reads a summary counts places.
        whole = logits == "all" or bool(leaves(states["head"])) or self.head.scores == "read"
        if logits == "none" and not whole:
            scores, head_state = None, states["head"]
        else:
            hidden = out.x if whole else _last_real(out.x, segments)[:, None]
            scores, head_state, *more = self.head(
                self.final_norm(hidden), segments=segments if whole else None, state=states["head"], keep=keep,
                tied=self.stem.tied_weight() if self.head.needs_tied_weight else None,
            )
            losses = add_losses(losses, more[0].losses) if more else losses
            if logits != "all":
                scores = None if logits == "none" else _last_real(scores, segments) if whole else scores[:, 0]
        new_state = None if state is None else {"stem": stem_state, "layers": out.state, "head": head_state}
        return LanguageModelOutput(scores, new_state, losses)

    def _check_call(self, token_ids: Tensor, segments: Segments | None, state: State | None) -> None:
        if token_ids.ndim != 2 or token_ids.dtype != torch.int64:
            raise DataError(f"token ids must be int64 of shape (b, t); got {token_ids.dtype} {tuple(token_ids.shape)}")
        if segments is not None and segments.ids.shape != token_ids.shape:
            raise DataError(f"segments are of shape {tuple(segments.ids.shape)}, the token ids {tuple(token_ids.shape)}")
        if segments is not None and self.unsegmented is not None:
            raise ConfigError(f"this model cannot tell documents or padding apart: {self.unsegmented}")
        if (rows := state_rows(state)) is not None and rows != token_ids.shape[0]:
            raise RowsError(f"the state has {rows} rows, the token ids {token_ids.shape[0]}")

    def loss(self, inputs: Tensor, targets: Tensor, segments: Segments | None = None) -> Loss:
        """Cross-entropy of ``targets`` (b t; -100 is not scored) given ``inputs`` (b t), in float32 at least."""
        return self.loss_of(self(inputs, segments=segments), targets)

    def loss_of(self, out: LanguageModelOutput, targets: Tensor) -> Loss:
        """:meth:`loss` of what a call with all logits returned."""
        assert out.logits is not None
        scores = out.logits.flatten(0, 1)
        scores = scores if scores.dtype == torch.float64 else scores.float()
        total = F.cross_entropy(scores, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return Loss(total, (targets != IGNORED).sum(), out.losses)


def _last_real(x: Tensor, segments: Segments | None) -> Tensor:
    if not x.shape[1]:
        raise DataError("the last token's scores were asked for, and there is no token")
    if segments is None:
        return x[:, -1]
    steps = torch.arange(x.shape[1], device=x.device)
    last = torch.where(segments.real, steps, torch.zeros_like(steps)).amax(1)
    return x[torch.arange(x.shape[0], device=x.device), last]
