"""Mixers that mistake documents or padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridtf.core import Edges, Fixed, Segments, State
from hybridtf.testing.doubles import CrossMixer, EdgesMixer, SumMixer
from tests.testing.broken.parts import ConvEma, EmaParts


class PadsDecay(EmaParts):
    """A pad is a token of zeros."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        if segments is not None:
            x = torch.where(segments.real[..., None], x, torch.zeros_like(x))
        return super()._step(x, segments, state)

    def documents(self, x: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
        real, document = super().documents(x, segments)
        return torch.ones_like(real), document


class IgnoresSegments(EmaParts):
    def documents(self, x: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
        return super().documents(x, None)


class IgnoresContinues(EmaParts):
    """Takes every row for a continued one."""

    def documents(self, x: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
        real, document = super().documents(x, segments)
        if segments is not None:
            document = document - (~segments.continues & (segments.first_id > 0)).long()[:, None]
        return real, document


class CountsPads(EdgesMixer):
    """Its loss has the pads in it."""

    def forward(self, x: Tensor, *, edges: Edges, segments: Any = None, **options: Any) -> Any:
        return super().forward(x, edges=edges, segments=None, **options)


class OneContext(CrossMixer):
    """Every document sees the context of all."""

    def project(self, context: Any) -> dict[str, Tensor]:
        out = super().project(context)
        return {**out, "document": out["document"].clamp(max=1)}


class NaNWithoutKeys(SumMixer):
    """A token that sees nothing divides by zero."""

    def forward(self, x: Tensor, *, segments: Any = None, **options: Any) -> Any:
        y, state = super().forward(x, segments=segments, **options)
        if segments is not None:
            y = y / segments.real.any(1).to(y.dtype)[:, None, None]
        return y, state


class ConvLeaks(ConvEma):
    """Documents reach the average, and not the convolution before it."""

    def convolve(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        return super().convolve(x, None, state)


class AverageLeaks(ConvEma):
    """Documents reach the convolution, and not the average behind it."""

    def documents(self, x: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
        real, document = super().documents(x, segments)
        return real, torch.zeros_like(document)


class BiasAtPads(ConvEma):
    """Pads are zero before the convolution, and silu(bias) behind it, which the average takes in."""

    def convolve(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super().convolve(x, segments, state)
        if segments is None or self.conv.bias is None:
            return y, new
        return torch.where(segments.real[..., None], y, torch.nn.functional.silu(self.conv.bias).to(y.dtype)), new

    def documents(self, x: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
        real, document = super().documents(x, segments)
        return torch.ones_like(real), document


class WindowOfPads(ConvEma):
    """The window is the end of the row, pads or not."""

    def convolve(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super().convolve(x, segments, state)
        if segments is None:
            return y, new
        x = torch.where(segments.real[..., None], x, torch.zeros_like(x))
        window = torch.cat([state["window"], x.to(state["window"].dtype)], 1)[:, -3:]
        return y, Fixed({"window": window}, new.length)


class InsideAChunk(EmaParts):
    """A document that begins inside a chunk of four tokens goes on with the one before it."""

    def documents(self, x: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
        real, document = super().documents(x, segments)
        if segments is None:
            return real, document
        on_the_border = torch.arange(x.shape[1]) % 4 == 0
        return real, (segments.starts & on_the_border).long().cumsum(1)


class ZeroTimesNaN(EmaParts):
    """Hides pads by a product with zero."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        return (y if segments is None else y + (x * ~segments.real[..., None]).sum() * 0), new


class LengthOfTheRow(EmaParts):
    """Its length has the pads in it."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        return y, Fixed({"h": new["h"]}, state.length + x.shape[1])


class MeanOfTheCall(EmaParts):
    """Centres each row by its mean: a document sees those beside it."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        if segments is not None:
            real = segments.real[..., None]
            x = x - torch.where(real, x, torch.zeros_like(x)).mean(1, keepdim=True)
        return super()._step(x, segments, state)


class StateOfTheFirst(EmaParts):
    """Hands on the state of the row's first document."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        if segments is None:
            return y, new
        first = Segments.from_ids(torch.where(segments.ids == segments.first_id[:, None], segments.ids, 0))
        _, wrong = super()._step(x, first, Fixed({"h": state["h"]}, state.length))
        return y, Fixed({"h": torch.where(segments.continues[:, None], wrong["h"], new["h"])}, new.length)


BROKEN: dict[str, tuple[str, str]] = {
    "PadsDecay": ("segment", "segment law broken"),
    "IgnoresSegments": ("segment", "segment law broken"),
    "IgnoresContinues": ("segment", "segment law broken"),
    "CountsPads": ("segment", "pads must not count"),
    "OneContext": ("segment", "segment law broken"),
    "NaNWithoutKeys": ("segment", "not finite"),
    "ConvLeaks": ("segment", "segment law broken"),
    "AverageLeaks": ("segment", "segment law broken"),
    "BiasAtPads": ("segment", "segment law broken"),
    "WindowOfPads": ("segment", "segment law broken"),
    "InsideAChunk": ("segment", "segment law broken"),
    "ZeroTimesNaN": ("segment", "with NaN at pads: output at real tokens: not finite"),
    "LengthOfTheRow": ("segment", "real tokens of the row's last document"),
    "MeanOfTheCall": ("segment", "segment law broken"),
    "StateOfTheFirst": ("segment", "segment law broken"),
}
