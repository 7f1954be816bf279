"""The pre-norm block (https://arxiv.org/abs/2002.04745): x + mixer(norm(x)), then x + channel_mixer(norm(x))."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from hybridtf.blocks.wiring import BranchResult, Wiring, WiringConfig
from hybridtf.core import BlockOutput, BuildContext, Context, Edges, Segments, State


class PreNormConfig(WiringConfig):
    """Norm before each branch, one branch after the other."""

    type: Literal["prenorm"] = "prenorm"

    def build(self, ctx: BuildContext) -> PreNorm:
        return PreNorm(self, ctx)


class PreNorm(Wiring):
    """See :class:`PreNormConfig`."""

    def forward(
        self, x: Tensor, edges: Edges, *, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> BlockOutput:
        seen = BranchResult(edges)
        call: dict[str, Any] = {"segments": segments, "state": state, "context": context, "keep": keep}
        if self.mixer is not None:
            x = x + self.branch("mixer", self.mixer_norm(x), seen, **call)
        if self.channel_mixer is not None:
            x = x + self.branch("channel_mixer", self.channel_norm(x), seen, **call)
        return BlockOutput(x, seen.edges, seen.losses, None if state is None else seen.state)
