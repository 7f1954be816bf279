"""The parallel block (GPT-J, PaLM: https://arxiv.org/abs/2204.02311): x + mixer(norm(x)) + channel_mixer(norm(x))."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from hybridtf.blocks.options import NormsBefore, Share
from hybridtf.blocks.wiring import BranchResult, Wiring
from hybridtf.core import BuildContext


class ParallelConfig(NormsBefore):
    """Both branches read the same input. ``shared_norm``: one norm for both (GPT-J, Cohere); else one each (GPT-NeoX)."""

    type: Literal["parallel"] = "parallel"
    shared_norm: bool = False
    """The one norm is ``mixer_norm``."""
    skip_scale: Share = Field(default=1.0)
    """Multiplies the stream, which passes both branches by at once."""

    @model_validator(mode="after")
    def _has_both(self) -> Self:
        if self.mixer is None or self.channel_mixer is None:
            raise ValueError("a parallel block needs both a mixer and a channel_mixer; with one of them use 'prenorm'")
        if self.shared_norm and self.channel_norm is not None:
            raise ValueError("channel_norm is given, and shared_norm = true makes mixer_norm the only one")
        return self

    def norm_sites(self, branch: str) -> tuple[str, ...]:
        return () if self.shared_norm and branch == "channel_mixer" else super().norm_sites(branch)

    def build(self, ctx: BuildContext) -> Parallel:
        return Parallel(self, ctx)


class Parallel(Wiring):
    """See :class:`ParallelConfig`."""

    def wired(self, x: Tensor, seen: BranchResult, call: dict[str, Any]) -> Tensor:
        mixer_input = self.norm("mixer", x)
        shared = not self.config.norm_sites("channel_mixer")
        channel_input = mixer_input if shared else self.norm("channel_mixer", x)
        mixed = self.scaled("mixer", self.branch("mixer", mixer_input, seen, **call))
        changed = self.scaled("channel_mixer", self.branch("channel_mixer", channel_input, seen, **call))
        return self.onto("mixer", x, mixed) + changed
