"""What loops over layers need beside shared blocks: keep the stream for later, and add what was kept.

    remember   edge <- norm(x), x stays (or has a vector added)
    inject     x <- norm(x) + edge

A group of shared blocks in a pattern, ``(a b c)*3``, is a loop already: each name is one set of weights, each visit has a
state of its own (Universal Transformer, https://arxiv.org/abs/1807.03819). With these two a loop starts again from what went
into it, ``keep (add a b)*3`` (Dory, or with the edge ``embedding`` the input of every loop,
https://arxiv.org/abs/2502.05171), or two streams take turns (HRM-Text, whose transformers code defines it). Both are layers
without a mixer.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from hybridtf.core import (
    Block,
    BlockConfig,
    BlockOutput,
    BuildContext,
    Component,
    ConfigError,
    Context,
    Edges,
    EdgeSpec,
    NormConfig,
    ParamSpec,
    Segments,
    State,
    check_call,
    init,
)


class EdgeBlockConfig(BlockConfig):
    """Options of both."""

    edge: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """The name under which the stream is kept."""
    norm: Component[NormConfig] | None = Field(default=None, examples=[{"type": "rms_norm"}])
    """None: as it is."""

    @field_validator("edge")
    @classmethod
    def _a_stream(cls, edge: str) -> str:
        if edge == "token_ids":
            raise ValueError("token_ids are no stream of the model's width")
        return edge


class RememberConfig(EdgeBlockConfig):
    """Keeps the stream, normed where a norm is given, as an edge; a later one of the same edge takes its place."""

    type: Literal["remember"] = "remember"
    offset: bool = False
    """To the stream that goes on a vector is added, zero at the start and not trained: with what the low stream of HRM-Text
    begins, the kept one being the high stream."""

    @field_validator("edge")
    @classmethod
    def _not_the_stems(cls, edge: str) -> str:
        if edge == "embedding":
            raise ValueError("the edge 'embedding' is the stem's; choose another name")
        return edge

    @classmethod
    def tiny(cls) -> Self:
        return cls(edge="start")

    def build(self, ctx: BuildContext) -> Remember:
        return Remember(self, ctx)


class InjectConfig(EdgeBlockConfig):
    """Adds a kept stream to the stream, which is normed first where a norm is given."""

    type: Literal["inject"] = "inject"

    @classmethod
    def tiny(cls) -> Self:
        return cls(edge="embedding")

    def build(self, ctx: BuildContext) -> Inject:
        return Inject(self, ctx)


class EdgeBlock(Block):
    """A layer without parts and state."""

    def __init__(self, config: EdgeBlockConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.edge, self.where, self.d_model = config.edge, ctx.where, ctx.d_model
        self.norm = None if config.norm is None else config.norm.build(ctx.child("norm"))

    def parts(self) -> dict[str, Any]:
        return {}

    def edge_specs(self) -> dict[str, EdgeSpec]:
        return {self.edge: EdgeSpec((self.d_model,))}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return {}

    def normed(self, x: Tensor) -> Tensor:
        """The stream, normed where there is a norm."""
        return x if self.norm is None else self.norm(x)


class Remember(EdgeBlock):
    """See :class:`RememberConfig`."""

    def __init__(self, config: RememberConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.writes = (config.edge,)
        empty = torch.empty(ctx.d_model, **ctx.factory) if config.offset else None
        self.offset = None if empty is None else nn.Parameter(empty, requires_grad=False)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {} if self.offset is None else {"offset": ParamSpec("bias", init.constant(0.0))}

    def steering(self) -> tuple[nn.Parameter, ...]:
        """What no gradient trains."""
        return () if self.offset is None else (self.offset,)

    def forward(
        self, x: Tensor, edges: Edges, *, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> BlockOutput:
        check_call(self, x, segments, state)
        on = x if self.offset is None else x + self.offset.to(x.dtype)
        return BlockOutput(on, {**edges, self.edge: self.normed(x)}, {}, state)


class Inject(EdgeBlock):
    """See :class:`InjectConfig`."""

    def __init__(self, config: InjectConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.reads = (config.edge,)

    def forward(
        self, x: Tensor, edges: Edges, *, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> BlockOutput:
        check_call(self, x, segments, state)
        kept = edges[self.edge]
        if kept.shape != x.shape:
            raise ConfigError(f"{self.where}: the edge {self.edge!r} is {tuple(kept.shape)}, the stream {tuple(x.shape)}")
        return BlockOutput(self.normed(x) + kept, dict(edges), {}, state)
