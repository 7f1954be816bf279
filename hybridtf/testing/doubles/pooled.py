"""A mixer whose state holds one entry for each full block: a sparse ``Growing``, and the partial block beside it."""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Context,
    Growing,
    Segments,
    SequenceMixer,
    SequenceMixerConfig,
    State,
    with_history,
)
from hybridtf.nn import ShortConv
from hybridtf.testing.doubles.documents import documents


class PoolConfig(SequenceMixerConfig):
    """The gated mean of the document's full blocks so far, each pooled by a convolution as wide as a block."""

    type: Literal["double_pool"] = "double_pool"
    stride: int = Field(default=3, ge=1)

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> PoolMixer:
        return PoolMixer(self, ctx)


class PoolMixer(SequenceMixer):
    """See :class:`PoolConfig`. Blocks count from the document's start; the convolution's window is the partial block."""

    def __init__(self, config: PoolConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.stride = config.stride
        self.in_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=False, **ctx.factory)
        self.pool = ShortConv(ctx.child("pool"), config.stride, bias=False, activation=None)
        self.gate_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=False, **ctx.factory)
        self.out_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=False, **ctx.factory)

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        slots = None if max_len is None else -(-max_len // self.stride)
        op, width = self.pool.short_conv, self.pool.weight.shape[0]
        blocks = Growing.empty(
            batch_size, {"u": (width,)}, max_len=slots, sparse=True, dtype=op.compute_dtype, device=op.device
        )
        return {"blocks": blocks, "partial": self.pool.init_state(batch_size)}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        if state is None:
            return self._step(x, segments, self.init_state(x.shape[0]))[0], None
        return with_history(self._step, x, segments, state, keep, self.init_state)

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        blocks = state["blocks"]
        u, partial = self.pool(self.in_proj(x), segments, state["partial"])
        real, document = documents(x, segments)
        steps = torch.arange(x.shape[1], device=x.device) + blocks.length[:, None]
        positions = steps if segments is None else segments.positions(blocks.length)
        full = real & ((positions + 1) % self.stride == 0)
        seen = full[:, None] & (document[:, :, None] == document[:, None])
        seen = seen & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        held = blocks.valid()[:, None] & (document == 0)[:, :, None]
        seen, values = torch.cat([held, seen], 2), torch.cat([blocks["u"].to(u.dtype), u], 1)
        values = torch.where(seen.any(1)[..., None], values, torch.zeros_like(values))
        weight = seen.to(u.dtype) / seen.sum(2, keepdim=True).clamp(min=1).to(u.dtype)
        y = self.out_proj(torch.bmm(weight, values) * self.gate_proj(x).sigmoid())
        return y, {"blocks": blocks.append({"u": u}, segments, where=full), "partial": partial}
