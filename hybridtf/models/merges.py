"""What the residual stream of a stack is, and how its end becomes one tensor (b t d): a choice where it is not one stream.

Axes: b batch, t time, s streams, d d_model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import Block, BuildContext, Component, ConfigError, ConfigTable, Edges, NormConfig, OneOf
from hybridtf.models.spreads import ProjectedSpreadConfig, ProjectedStreams
from hybridtf.nn import DepthAttention, DepthOptions, GatedStreams, RMSNormConfig, SigmoidStreams, group_sums


class Merge(nn.Module, ABC):
    """Makes one tensor of what a stack ends with."""

    @abstractmethod
    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        """Streams (b t s d), or one and the edges of the stack, to (b t d)."""


class MergeTable(ConfigTable):
    """Base of the tables of merges."""

    type: str
    partial_sums: ClassVar[bool] = False
    """It is for stacks whose stream is the partial sum of a group of layers; else for several streams."""

    def build(self, ctx: BuildContext, n_streams: int) -> Merge:
        """The module."""
        raise NotImplementedError


class SumConfig(MergeTable):
    """The sum of the streams (hyper-connections)."""

    type: Literal["sum"] = "sum"

    def build(self, ctx: BuildContext, n_streams: int) -> Merge:
        return Sum()


class MeanConfig(MergeTable):
    """The mean of the streams (GLM-5-Next)."""

    type: Literal["mean"] = "mean"

    def build(self, ctx: BuildContext, n_streams: int) -> Merge:
        return Mean()


class SigmoidConfig(MergeTable):
    """A sum with weights made from the streams, each through a sigmoid (DeepSeek-V4)."""

    type: Literal["sigmoid"] = "sigmoid"
    eps: float = Field(default=1e-6, gt=0)
    """Added to each weight."""
    norm_eps: float = Field(default=1e-6, gt=0)

    def build(self, ctx: BuildContext, n_streams: int) -> Merge:
        return Learned(SigmoidStreams(ctx, n_streams, eps=self.eps, norm_eps=self.norm_eps))


class GatedConfig(MergeTable):
    """The mean of the normed streams, each channel with a gate made from all of them (Qwen4-Exp: it has no final norm)."""

    type: Literal["gated"] = "gated"
    rank: int = Field(default=320, gt=0)
    norm: Component[NormConfig] = Field(default_factory=lambda: RMSNormConfig(unit_offset=True))

    def build(self, ctx: BuildContext, n_streams: int) -> Merge:
        return Learned(GatedStreams(ctx, n_streams, self.rank, self.norm))


class ProjectedConfig(MergeTable):
    """The mean of the first stream and of projections of the others that are as large as it (Gemma 3n)."""

    type: Literal["projected"] = "projected"
    eps: float = Field(default=1e-5, gt=0)
    """The least mean square of a projection that is divided by."""

    def build(self, ctx: BuildContext, n_streams: int) -> Merge:
        return Projected(ctx, n_streams, self.eps)


class DepthConfig(MergeTable, DepthOptions):
    """A learned mix over what the groups of layers gave (attention residuals)."""

    type: Literal["attention_residual"] = "attention_residual"
    partial_sums: ClassVar[bool] = True

    def build(self, ctx: BuildContext, n_streams: int) -> Merge:
        return Depth(DepthAttention(self, ctx))


MergeConfig: TypeAlias = Annotated[
    MergeTable, OneOf("merge", SumConfig, MeanConfig, SigmoidConfig, GatedConfig, ProjectedConfig, DepthConfig)
]
"""A field that holds one of them."""


class Sum(Merge):
    """See :class:`SumConfig`."""

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        return x.sum(-2)


class Mean(Merge):
    """See :class:`MeanConfig`."""

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        return x.mean(-2)


class Learned(Merge):
    """A part that turns streams into one."""

    def __init__(self, streams: nn.Module) -> None:
        super().__init__()
        self.streams = streams

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        y: Tensor = self.streams(x)
        return y


class Projected(Merge):
    """See :class:`ProjectedConfig`."""

    def __init__(self, ctx: BuildContext, n_streams: int, eps: float) -> None:
        super().__init__()
        self.streams = ProjectedStreams(ctx, n_streams, eps)

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        return self.streams.mean(x)


class Depth(Merge):
    """See :class:`DepthConfig`."""

    def __init__(self, attention: DepthAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        y: Tensor = self.attention([*(edges[name] for name in group_sums(edges)), x])
        return y


@dataclass(frozen=True)
class Stream:
    """What all blocks of a stack agree on."""

    n_streams: int = 1
    partial_sums: bool = False

    def __str__(self) -> str:
        if self.partial_sums:
            return "the partial sum of a group of layers"
        return "one residual stream" if self.n_streams == 1 else f"{self.n_streams} residual streams"

    @property
    def kind(self) -> str:
        """What a merge of such a stream is for."""
        return "attention residuals" if self.partial_sums else "several residual streams"


def agreed_stream(layers: Sequence[str], blocks: Sequence[Block], where: str) -> Stream:
    """The residual stream of a stack. Raises :class:`ConfigError` where its blocks do not agree."""
    found = [Stream(block.n_streams, block.partial_sums) for block in blocks]
    for i, stream in enumerate(found):
        if stream != found[0]:
            raise ConfigError(
                f"{where}.blocks.{layers[i]}: layer {i} works on {stream}, and layer 0 (block {layers[0]!r}) on {found[0]}; "
                "all blocks of a stack must agree"
            )
    return found[0] if found else Stream()


def build_merge(merge: MergeTable | None, stream: Stream, ctx: BuildContext) -> Merge | None:
    """The merge of a stack: as said; where nothing is said, the sum of several streams, or a mix of partial sums."""
    if merge is None:
        merge = DepthConfig() if stream.partial_sums else SumConfig()
        return None if stream == Stream() else merge.build(ctx, stream.n_streams)
    if merge.partial_sums != stream.partial_sums:
        raise ctx.error(f"merge {merge.type!r} is for {Stream(2, merge.partial_sums).kind}, and this stack works on {stream}")
    if stream == Stream():
        raise ctx.error(f"merge {merge.type!r} is for {Stream(2).kind}, and this stack works on {stream}")
    return merge.build(ctx, stream.n_streams)


def build_spread(spread: ProjectedSpreadConfig | None, stream: Stream, ctx: BuildContext) -> nn.Module | None:
    """What makes the streams of a stack; None where what comes in is repeated."""
    if spread is not None and stream.n_streams == 1:
        raise ctx.error(f"spread {spread.type!r} is for {Stream(2).kind}, and this stack works on {stream}")
    return None if spread is None else spread.build(ctx, stream.n_streams)
