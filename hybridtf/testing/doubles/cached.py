"""Mixers with a ``Growing`` and a ``Ring`` state.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Context,
    Growing,
    Ring,
    Segments,
    SequenceMixer,
    SequenceMixerConfig,
    State,
)
from hybridtf.testing.doubles.documents import documents


class SumConfig(SequenceMixerConfig):
    """The gated mean of everything seen: attention with equal weights."""

    type: Literal["double_sum"] = "double_sum"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> SumMixer:
        return SumMixer(ctx)


class SumMixer(SequenceMixer):
    """See :class:`SumConfig`. Sees both ways in a non-causal stack."""

    causal_only = False

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.causal = ctx.causal
        self.v_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=False, **ctx.factory)
        self.gate_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=False, **ctx.factory)
        self.out_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=False, **ctx.factory)

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        weight = self.v_proj.weight
        return Growing.empty(
            batch_size, {"v": (weight.shape[0],)}, max_len=max_len, dtype=weight.dtype, device=weight.device
        )

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        v = self.v_proj(x)
        real, document = documents(x, segments)
        seen = real[:, None] & (document[:, :, None] == document[:, None])
        if self.causal:
            seen = seen & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        values = v
        if state is not None:
            held = state.valid()[:, None] & (document == 0)[:, :, None]
            seen, values = torch.cat([held, seen], 2), torch.cat([state["v"].to(v.dtype), v], 1)
            values = torch.where(seen.any(1)[..., None], values, torch.zeros_like(values))
            state = state.append({"v": v}, segments)
        weight = seen.to(v.dtype) / seen.sum(2, keepdim=True).clamp(min=1).to(v.dtype)
        values = torch.where(seen.any(1)[..., None], values, torch.zeros_like(values))
        return self.out_proj(torch.bmm(weight, values) * self.gate_proj(x).sigmoid()), state


class DeclaredConfig(SequenceMixerConfig):
    """The gated mean of everything seen, over the square root of the declared length."""

    type: Literal["double_declared"] = "double_declared"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> DeclaredMixer:
        return DeclaredMixer(ctx)


class DeclaredMixer(SumMixer):
    """See :class:`DeclaredConfig`. The length is the ``max_len`` of the state, else the model's ``max_seq_len``."""

    uses_max_len = True

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__(ctx)
        self.max_seq_len = ctx.max_seq_len

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        declared = self.max_seq_len if state is None or state.max_len is None else state.max_len
        y, state = super().forward(x, segments=segments, state=state, context=context, keep=keep)
        return y * declared**-0.5, state


class WindowConfig(SequenceMixerConfig):
    """The mean of the last ``window`` tokens."""

    type: Literal["double_window"] = "double_window"
    window: int = Field(default=4, ge=1)

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> WindowMixer:
        return WindowMixer(self, ctx)


class WindowMixer(SequenceMixer):
    """See :class:`WindowConfig`."""

    def __init__(self, config: WindowConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.window = config.window
        self.in_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=False, **ctx.factory)
        self.out_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=False, **ctx.factory)

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        weight = self.in_proj.weight
        return Ring.empty(
            batch_size, {"u": (weight.shape[0],)}, window=self.window, dtype=weight.dtype, device=weight.device
        )

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        u = self.in_proj(x)
        real, document = documents(x, segments)
        length = None if state is None else state.length
        if segments is None:
            steps = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
            place = steps if length is None else steps + length[:, None]
        else:
            place = segments.positions(length)
        back = place[:, :, None] - place[:, None]
        seen = real[:, None] & (document[:, :, None] == document[:, None]) & (back >= 0) & (back < self.window)
        values = torch.where(real[..., None], u, torch.zeros_like(u))
        if state is not None:
            back = place[:, :, None] - state.positions()[:, None]
            held = state.valid()[:, None] & (document == 0)[:, :, None] & (back >= 0) & (back < self.window)
            seen, values = torch.cat([held, seen], 2), torch.cat([state["u"].to(u.dtype), values], 1)
            state = state.push({"u": u}, segments, keep=keep)
        weight = seen.to(u.dtype) / seen.sum(2, keepdim=True).clamp(min=1).to(u.dtype)
        return self.out_proj(torch.bmm(weight, values)), state
