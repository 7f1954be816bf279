"""Mixers that break a law of time: cuts, causality, and calls of any length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridtf.core import BuildContext, Fixed, Segments, State
from hybridtf.testing.doubles import CrossMixer, EmaMixer, SumMixer, WindowMixer
from tests.testing.broken.parts import ConvEma, EmaParts


class SeesFuture(SumMixer):
    def __init__(self, ctx: BuildContext) -> None:
        super().__init__(ctx)
        self.causal = False


class BlindAhead(SumMixer):
    """Built for both ways, looks back only."""

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__(ctx)
        self.causal = True


class DropsState(WindowMixer):
    def forward(self, x: Tensor, *, segments: Any = None, state: Any = None, context: Any = None, keep: int = 0) -> Any:
        y, _ = super().forward(x, segments=segments)
        return y, None if state is None else state.push({"u": self.in_proj(x)}, segments, keep=keep)


class WindowTooWide(WindowMixer):
    """Sees further back than the ring keeps."""

    def forward(self, x: Tensor, **options: Any) -> Any:
        self.window += 2
        try:
            return super().forward(x, **options)
        finally:
            self.window -= 2


class LeavesBuffer(SumMixer):
    """Moves to another buffer at each call."""

    def forward(self, x: Tensor, **options: Any) -> Any:
        y, state = super().forward(x, **options)
        return y, None if state is None else state.clone()


class LowState(EmaMixer):
    """Carries float32 in a float64 model."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        return y, Fixed({"h": new["h"].float().to(new["h"].dtype)}, new.length)


class ForgetsContext(CrossMixer):
    """Later calls see nothing of the context."""

    def forward(self, x: Tensor, *, state: Any = None, context: Any = None, **options: Any) -> Any:
        if state is not None and context is None:
            nothing = {**state.constant, "document": state["document"] * 0}
            state = Fixed(state.data, state.length, constant=nothing)
        return super().forward(x, state=state, context=context, **options)


class FailsOnNothing(EmaMixer):
    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        x[:, -1]  # no last token in an empty call
        return super()._step(x, segments, state)


class TrainsOtherwise(EmaMixer):
    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        return (1.001 * y if torch.is_grad_enabled() else y), new


class ReturnsFloat64(EmaMixer):
    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        return y.double(), new


class TopLeft(SumMixer):
    """Lines its mask up with the oldest key: behind a cache, a query sees too little of it."""

    def forward(self, x: Tensor, *, segments: Any = None, state: Any = None, context: Any = None, keep: int = 0) -> Any:
        if state is None or segments is not None:
            return super().forward(x, segments=segments, state=state)
        v = self.v_proj(x)
        values = torch.cat([state["v"][:, : int(state.length.max())].to(v.dtype), v], 1)
        state = state.append({"v": v}, None)
        weight = torch.ones(x.shape[1], values.shape[1], dtype=v.dtype).tril()
        weight = weight / weight.sum(1, keepdim=True)
        return self.out_proj((weight @ values) * self.gate_proj(x).sigmoid()), state


class FirstTokenAlone(EmaMixer):
    """Takes a call with a state for a step: one token, however many come."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        if segments is None and bool((state.length > 0).any()) and x.shape[1] > 1:
            y, new = super()._step(x[:, :1], None, state)
            return y.expand_as(x), new
        return super()._step(x, segments, state)


class ShortTail(ConvEma):
    """A call with fewer tokens than the window keeps has no older ones in its window."""

    def convolve(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super().convolve(x, segments, state)
        window, short = new["window"], 3 - x.shape[1]
        if segments is not None or short <= 0 or not x.shape[1]:
            return y, new
        return y, Fixed({"window": torch.cat([0 * window[:, :short], window[:, short:]], 1)}, new.length)


class TokenTwice(ConvEma):
    """Puts the last token into the window once more."""

    def convolve(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super().convolve(x, segments, state)
        if segments is not None or not x.shape[1]:
            return y, new
        return y, Fixed({"window": torch.cat([new["window"][:, 1:], x[:, -1:]], 1)}, new.length)


class SlicedFromTheEnd(ConvEma):
    """Keeps the tail of a padded convolution: every output is moved, and sees what comes."""

    def convolve(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super().convolve(x, segments, state)
        return torch.cat([y[:, 1:], y[:, :1]], 1), new


class DetachedState(EmaMixer):
    """Hands its state on without the way back."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        return y, Fixed({"h": new["h"].detach()}, new.length)


class IgnoresGivenGradient(EmaMixer):
    """Takes a state in without the way back."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        return super()._step(x, segments, Fixed({"h": state["h"].detach()}, state.length))


class WholeChunks(EmaMixer):
    """Takes lengths that its chunks divide."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        if x.shape[1] % 4:
            raise ValueError(f"length {x.shape[1]} is not a multiple of 4")
        return super()._step(x, segments, state)


class DropsTheRest(EmaMixer):
    """Tokens after the last whole chunk are lost."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        whole = torch.arange(x.shape[1]) < max(1, x.shape[1] // 4 * 4)
        y, new = super()._step(x * whole[:, None], segments, state)
        return y * whole[:, None], new


class SmallBuffer(SumMixer):
    """Room for fewer tokens than it was asked for."""

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return super().init_state(batch_size, None if max_len is None else max_len - 6)


class WrapsBuffer(SumMixer):
    """A full buffer begins again, over what is still needed."""

    def forward(self, x: Tensor, *, state: Any = None, **options: Any) -> Any:
        y, new = super().forward(x, state=state, **options)
        if new is not None and new.static and int(new.length.max()) > 8:
            with torch.no_grad():
                new["v"][:, : x.shape[1]] = new["v"][:, 8 : 8 + x.shape[1]]
        return y, new


class OtherDecode(EmaParts):
    """A step of one token has a sum that the others have not."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        return (y * 1.001 if x.shape[1] == 1 else y), new


class NoBackwardInEval(EmaMixer):
    """In eval mode a short call takes a path that has no way back."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        return (y.detach() if not self.training and x.shape[1] < 32 else y), new


class DropsInEval(EmaMixer):
    """Dropout that asks nobody whether the model trains."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        return torch.nn.functional.dropout(y, 0.1), new


BROKEN: dict[str, tuple[str, str]] = {
    "SeesFuture": ("causal", "looks into the future: output at t="),
    "BlindAhead": ("causal", "does not see ahead"),
    "DropsState": ("cut", "cut law broken"),
    "WindowTooWide": ("cut", "cut law broken"),
    "LeavesBuffer": ("cut", "must stay in its buffer"),
    "LowState": ("cut", "cut law broken"),
    "ForgetsContext": ("cut", "cut law broken"),
    "FailsOnNothing": ("empty", "IndexError"),
    "TrainsOtherwise": ("eval", "gradients on differ from gradients off"),
    "ReturnsFloat64": ("shape", "returns the dtype it was given"),
    "TopLeft": ("cut", "cut law broken"),
    "FirstTokenAlone": ("cut", "cut law broken"),
    "ShortTail": ("cut", "cut law broken"),
    "TokenTwice": ("cut", "cut law broken"),
    "SlicedFromTheEnd": ("causal", "looks into the future: output at t="),
    "DetachedState": ("cut", "gradient"),
    "IgnoresGivenGradient": ("cut", "gradient"),
    "WholeChunks": ("cut", "is not a multiple of 4"),
    "DropsTheRest": ("cut", "cut law broken"),
    "SmallBuffer": ("cut", "max_len"),
    "WrapsBuffer": ("cut", "cut law broken"),
    "OtherDecode": ("cut", "cut law broken"),
    "NoBackwardInEval": ("gradients", "parameters without gradient"),
    "DropsInEval": ("eval", "differ"),
}
