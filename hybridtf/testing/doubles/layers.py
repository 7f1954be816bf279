"""A channel mixer with a state, and a residual block around any mixer.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    Block,
    BlockConfig,
    BlockOutput,
    BuildContext,
    ChannelMixer,
    ChannelMixerConfig,
    Component,
    Context,
    Edges,
    Extras,
    Ring,
    Segments,
    SequenceMixerConfig,
    State,
)
from hybridtf.testing.doubles.documents import documents
from hybridtf.testing.doubles.recurrent import EmaConfig


class ShiftConfig(ChannelMixerConfig):
    """An MLP on the token and the one before it."""

    type: Literal["double_shift"] = "double_shift"
    d_ff: int = Field(default=8, ge=1)

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> ShiftMixer:
        return ShiftMixer(self, ctx)


class ShiftMixer(ChannelMixer):
    """See :class:`ShiftConfig`; built on :class:`EmaMixer`'s op with decay 0 of the tokens before."""

    def __init__(self, config: ShiftConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.up_proj = nn.Linear(2 * ctx.d_model, config.d_ff, **ctx.factory)
        self.down_proj = nn.Linear(config.d_ff, ctx.d_model, **ctx.factory)

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        weight = self.down_proj.weight
        return Ring.empty(batch_size, {"x": (weight.shape[0],)}, window=2, dtype=weight.dtype, device=weight.device)

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, keep: int = 0
    ) -> tuple[Tensor, State | None]:
        real, document = documents(x, segments)
        count = real.to(torch.int64).cumsum(1)
        same = document[:, :, None] == document[:, None]
        before = (same & real[:, None] & (count[:, :, None] - count[:, None] == 1)).to(x.dtype)
        previous = torch.bmm(before, torch.where(real[..., None], x, torch.zeros_like(x)))
        if state is not None:
            last = (state.positions() == state.length[:, None] - 1) & state.valid()
            held = torch.where(last[..., None], state["x"], torch.zeros_like(state["x"])).sum(1).to(x.dtype)
            first = (document == 0) & (count == 1) & real
            previous = previous + torch.where(first[..., None], held[:, None], torch.zeros_like(previous))
            state = state.push({"x": x}, segments, keep=keep)
        return self.down_proj(self.up_proj(torch.cat([x, previous], -1)).tanh()), state



class DoubleBlockConfig(BlockConfig):
    """x + mixer(x)."""

    type: Literal["double_block"] = "double_block"
    mixer: Component[SequenceMixerConfig]

    @classmethod
    def tiny(cls) -> Self:
        return cls(mixer=EmaConfig.tiny())

    def build(self, ctx: BuildContext) -> DoubleBlock:
        return DoubleBlock(self, ctx)


class DoubleBlock(Block):
    """See :class:`DoubleBlockConfig`."""

    def __init__(self, config: DoubleBlockConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.mixer = config.mixer.build(ctx.child("mixer", defer_init=True))
        if self.mixer.causal_only and not ctx.causal:
            raise ctx.error(f"{config.mixer.type_name()!r} sees the past only")

    def parts(self) -> dict[str, Any]:
        return {"mixer": self.mixer}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return {"mixer": self.mixer.init_state(batch_size, max_len)}

    def forward(
        self, x: Tensor, edges: Edges, *, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> BlockOutput:
        more = {"edges": {name: edges[name] for name in self.mixer.reads}} if self.mixer.reads else {}
        inner = None if state is None else state["mixer"]
        y, after, *rest = self.mixer(x, segments=segments, state=inner, context=context, keep=keep, **more)
        extras = rest[0] if rest else Extras()
        return BlockOutput(
            x + y, {**edges, **extras.edges}, dict(extras.losses), None if state is None else {"mixer": after}
        )
