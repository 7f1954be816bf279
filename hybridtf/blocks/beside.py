"""A transformer beside the stream (Zamba: https://arxiv.org/abs/2405.16712, Zamba2: https://arxiv.org/abs/2411.15242).

    beside   edge <- channel_mixer(norm(mixer(norm([x, embedding])))), x stays
    guided   x <- x + mixer(norm(x + edge_proj(edge))), then the channel mixer as in ``prenorm``

In Zamba the first is one shared set of weights that many layers visit, each before a layer of Mamba that it guides.

Axes: b batch, t time, d d_model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.blocks.options import NormsBefore, Share
from hybridtf.blocks.sequential import PreNorm
from hybridtf.blocks.wiring import BranchResult, Wiring
from hybridtf.core import BuildContext, EdgeSpec

EDGE = r"^[a-z][a-z0-9_]*$"


class BesideConfig(NormsBefore):
    """A mixer over the stream and the embedding side by side, then a channel mixer; without residuals, and the result is an
    edge. The mixer works on 2 d_model channels and gives d_model, as those of heads can."""

    type: Literal["beside"] = "beside"
    edge: str = Field(default="beside", pattern=EDGE)
    """The name of the result."""
    skip_scale: Share = Field(default=1.0)
    """Multiplies the stream as it passes by."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.mixer is None or self.channel_mixer is None:
            raise ValueError("a block of type 'beside' needs both a mixer and a channel_mixer")
        if self.edge in ("embedding", "token_ids"):
            raise ValueError(f"the edge {self.edge!r} is the stem's; choose another name")
        return self

    def build(self, ctx: BuildContext) -> Beside:
        return Beside(self, ctx)


class Beside(Wiring):
    """See :class:`BesideConfig`."""

    def __init__(self, config: BesideConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.edge, self.d_model = config.edge, ctx.d_model
        out = getattr(self.mixer, "out_proj", None)
        if not isinstance(out, nn.Linear) or out.out_features != ctx.d_model:
            kind = "none" if config.mixer is None else config.mixer.type_name()
            raise ctx.error(f"mixer {kind!r} cannot give another width than it is given; use one of heads, as 'attention'")
        self.reads: tuple[str, ...] = ("embedding",)
        self.writes: tuple[str, ...] = (config.edge,)

    def inner(self, branch: str, ctx: BuildContext) -> BuildContext:
        return replace(ctx, d_model=2 * ctx.d_model, d_out=ctx.d_model) if branch == "mixer" else ctx

    def edge_specs(self) -> dict[str, EdgeSpec]:
        return dict.fromkeys(("embedding", self.edge), EdgeSpec((self.d_model,)))

    def wired(self, x: Tensor, seen: BranchResult, call: dict[str, Any]) -> Tensor:
        y = torch.cat([x, seen.edges["embedding"].to(x.dtype)], -1)
        for branch in self.parts():
            y = self.scaled(branch, self.branch(branch, self.norm(branch, y), seen, **call))
        seen.edges[self.edge] = y
        skip = self.config.of_branch("skip_scale", "mixer")
        return x if skip == 1.0 else x * skip

    def _check_result(self, name: str, extra: bool, x: Tensor, result: Any) -> None:
        super()._check_result(name, extra, x[..., : self.d_model], result)


class GuidedConfig(NormsBefore):
    """``prenorm`` whose first branch also reads an edge, through a projection of its own; the stream itself does not."""

    type: Literal["guided"] = "guided"
    edge: str = Field(default="beside", pattern=EDGE)
    """What an earlier layer of type ``beside`` or ``remember`` wrote, or ``embedding``."""

    @classmethod
    def tiny(cls) -> Self:
        return super().tiny().model_copy(update={"edge": "embedding"})

    def build(self, ctx: BuildContext) -> Guided:
        return Guided(self, ctx)


class Guided(PreNorm):
    """See :class:`GuidedConfig`."""

    def __init__(self, config: GuidedConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.edge, self.d_model = config.edge, ctx.d_model
        self.reads = (config.edge,)
        self.edge_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=False, **ctx.factory)

    def edge_specs(self) -> dict[str, EdgeSpec]:
        return {self.edge: EdgeSpec((self.d_model,))}

    def wired(self, x: Tensor, seen: BranchResult, call: dict[str, Any]) -> Tensor:
        guide = self.edge_proj(seen.edges[self.edge])
        for i, branch in enumerate(self.parts()):
            given = x if i else x + guide
            x = self.onto(branch, x, self.scaled(branch, self.branch(branch, self.norm(branch, given), seen, **call)))
        return x
