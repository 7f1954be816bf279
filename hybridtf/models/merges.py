"""What the residual stream of a stack is, and how its end becomes one tensor (b t d): a choice where there are several streams.

Axes: b batch, t time, s streams, d d_model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import Block, BuildContext, Component, ConfigError, ConfigTable, Edges, NormConfig, OneOf
from hybridtf.nn import GatedStreams, RMSNormConfig, SigmoidStreams


class Merge(nn.Module, ABC):
    """Makes one tensor of what a stack ends with."""

    @abstractmethod
    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        """Streams (b t s d) to (b t d)."""


class MergeTable(ConfigTable):
    """Base of the tables of merges."""

    type: str

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
    """The mean of the normed streams, each channel with a gate made from all of them (Qwen4-Exp, whose ``final_norm`` is none)."""

    type: Literal["gated"] = "gated"
    rank: int = Field(default=320, gt=0)
    norm: Component[NormConfig] = Field(default_factory=lambda: RMSNormConfig(unit_offset=True))

    def build(self, ctx: BuildContext, n_streams: int) -> Merge:
        return Learned(GatedStreams(ctx, n_streams, self.rank, self.norm))


MergeConfig: TypeAlias = Annotated[MergeTable, OneOf("merge", SumConfig, MeanConfig, SigmoidConfig, GatedConfig)]
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


@dataclass(frozen=True)
class Stream:
    """What all blocks of a stack agree on."""

    n_streams: int = 1
    partial_sums: bool = False

    def __str__(self) -> str:
        if self.partial_sums:
            return "the partial sum of a group of layers"
        return "one residual stream" if self.n_streams == 1 else f"{self.n_streams} residual streams"


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
    """The merge of a stack: as said, or the sum where there are several streams and nothing is said."""
    if merge is None:
        return Sum() if stream.n_streams > 1 else None
    if stream.n_streams == 1:
        raise ctx.error(f"merge {merge.type!r} makes one of several streams, and the blocks of this stack work on {stream}")
    return merge.build(ctx, stream.n_streams)
