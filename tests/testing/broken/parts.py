"""Honest mixers whose parts can be spoilt one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core import BuildContext, Segments, State
from hybridtf.nn import ShortConv
from hybridtf.testing.doubles import EmaConfig, EmaMixer


class EmaParts(EmaMixer):
    """An average whose idea of real tokens and documents can be spoilt."""

    def documents(self, x: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
        real = torch.ones(x.shape[:2], dtype=torch.bool) if segments is None else segments.real
        document = torch.zeros_like(real, dtype=torch.int64) if segments is None else segments.starts.long().cumsum(1)
        return real, document

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        real, document = self.documents(x, segments)
        wide = state["h"].dtype
        u, decay = self.in_proj(x).to(wide), self.logit.to(wide).sigmoid()
        y, h = self.ema(u, decay, state["h"], real, document, n_tokens=x.shape[1])
        return self.out_proj(y.to(x.dtype)), state.advance({"h": h}, segments, x.shape[1])


class ConvEma(EmaParts):
    """An average of what a short convolution with a bias gives, as in most recurrent layers."""

    def __init__(self, config: EmaConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.conv = ShortConv(ctx.child("conv"), 4, bias=True, activation="silu")

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return {"conv": self.conv.init_state(batch_size), "ema": super().init_state(batch_size)}

    def convolve(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        return self.conv(x, segments, state)

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        u, conv = self.convolve(x, segments, state["conv"])
        y, ema = super()._step(u, segments, state["ema"])
        return y, {"conv": conv, "ema": ema}


class Placed(EmaParts):
    """An average of tokens that are told their places."""

    def places(self, x: Tensor, segments: Segments | None, state: State) -> Tensor:
        """(b t): the position of every token in its document."""
        if segments is not None:
            return segments.positions(state.length)
        return torch.arange(x.shape[1], device=x.device) + state.length[:, None]

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        place = self.places(x, segments, state).to(torch.float32)
        return super()._step(x * (1 + 0.5 * torch.sin(place)).to(x.dtype)[..., None], segments, state)
