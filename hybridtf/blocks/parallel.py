"""The parallel block (GPT-J, PaLM: https://arxiv.org/abs/2204.02311): x + mixer(norm(x)) + channel_mixer(norm(x))."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator
from torch import Tensor

from hybridtf.blocks.wiring import BranchResult, Wiring, WiringConfig
from hybridtf.core import BlockOutput, BuildContext, Context, Edges, Segments, State


class ParallelConfig(WiringConfig):
    """Both branches read the same input. ``shared_norm``: one norm for both (GPT-J, Cohere); else one each (GPT-NeoX)."""

    type: Literal["parallel"] = "parallel"
    shared_norm: bool = False

    @model_validator(mode="after")
    def _has_both(self) -> Self:
        if self.mixer is None or self.channel_mixer is None:
            raise ValueError("a parallel block needs both a mixer and a channel_mixer; with one of them use 'prenorm'")
        return self

    def build(self, ctx: BuildContext) -> Parallel:
        return Parallel(self, ctx)


class Parallel(Wiring):
    """See :class:`ParallelConfig`."""

    def __init__(self, config: ParallelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        if config.shared_norm:
            del self.channel_norm
        self.shared_norm = config.shared_norm

    def forward(
        self, x: Tensor, edges: Edges, *, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> BlockOutput:
        seen = BranchResult(edges)
        call: dict[str, Any] = {"segments": segments, "state": state, "context": context, "keep": keep}
        normed = self.mixer_norm(x)
        mixed = self.branch("mixer", normed, seen, **call)
        changed = self.branch("channel_mixer", normed if self.shared_norm else self.channel_norm(x), seen, **call)
        return BlockOutput(x + mixed + changed, seen.edges, seen.losses, None if state is None else seen.state)
