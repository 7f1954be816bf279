"""Mixers that are wrong about the place of a token."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core import Segments, State
from tests.testing.broken.parts import Placed


class RestartsPositions(Placed):
    """Every call begins at 0."""

    def places(self, x: Tensor, segments: Segments | None, state: State) -> Tensor:
        return super().places(x, segments, state) - state.length[:, None]


class OneTooFar(Placed):
    """The counter has been advanced before the token is placed, where something came before."""

    def places(self, x: Tensor, segments: Segments | None, state: State) -> Tensor:
        place = super().places(x, segments, state)
        return place + (state.length > 0)[:, None] if segments is None else place


class CountsPadsAsPlaces(Placed):
    """Padding moves the tokens after it on."""

    def places(self, x: Tensor, segments: Segments | None, state: State) -> Tensor:
        return torch.arange(x.shape[1], device=x.device) + state.length[:, None]


class OneRowForAll(Placed):
    """The first row's places are those of all."""

    def places(self, x: Tensor, segments: Segments | None, state: State) -> Tensor:
        return super().places(x, segments, state)[:1].expand(x.shape[:2])


class PlacesGoOn(Placed):
    """A new document goes on counting where the one before it ended."""

    def places(self, x: Tensor, segments: Segments | None, state: State) -> Tensor:
        if segments is None:
            return super().places(x, segments, state)
        return segments.real.long().cumsum(1) - 1 + state.length[:, None]


class ScalesByTheCall(Placed):
    """Places are stretched by the length of the call, and held as they were."""

    def places(self, x: Tensor, segments: Segments | None, state: State) -> Tensor:
        return super().places(x, segments, state) / max(1, x.shape[1])


BROKEN: dict[str, tuple[str, str]] = {
    "RestartsPositions": ("cut", "cut law broken"),
    "OneTooFar": ("cut", "cut law broken"),
    "CountsPadsAsPlaces": ("segment", "segment law broken"),
    "OneRowForAll": ("segment", "segment law broken"),
    "PlacesGoOn": ("segment", "segment law broken"),
    "ScalesByTheCall": ("cut", "cut law broken"),
}
