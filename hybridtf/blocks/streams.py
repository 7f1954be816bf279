"""Residual streams of several streams: one branch after the other, each with a connection to the streams around it.

A connection gives what the branch reads of the n streams x_j, how the streams pass by (C), and what each takes of the
branch's output (w):

    x'_k = sum_j C[j, k] x_j + w_k f(norm(sum_j a_j x_j))

    hyper_connections  a, C, w learned, plus small parts made from the streams    https://arxiv.org/abs/2409.19606
    mhc                C doubly stochastic by Sinkhorn steps; DeepSeek-V4          https://arxiv.org/abs/2512.24880
    gated_residual     a for each channel, C the identity; Qwen4-Exp, whose transformers code defines it

The model repeats what its stem gives for every stream, and its option ``merge`` says how they become one at the end.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor

from hybridtf.blocks.options import BRANCHES, Multiplier, NormsBefore, WiringConfig
from hybridtf.blocks.sequential import Sequential
from hybridtf.blocks.wiring import BranchResult
from hybridtf.core import BuildContext, Component, NormConfig
from hybridtf.nn import Connected, Connection, GatedConnection, HyperConnection, ManifoldConnection, RMSNormConfig


class StreamsConfig(WiringConfig):
    """Options of the wirings over several streams. ``skip_scale`` multiplies the streams as they pass by."""

    n_streams: int = Field(default=4, gt=1)

    @abstractmethod
    def connection(self, ctx: BuildContext, place: int) -> Connection:
        """The connection of one branch; ``place`` counts the branches of the stack, as if all layers were as this one."""

    def build(self, ctx: BuildContext) -> Streams:
        return Streams(self, ctx)


class HyperConnectionsConfig(StreamsConfig, NormsBefore):
    """Hyper-connections: at the start each stream is the residual stream of ``prenorm``.

    ``norm`` is also the norm of the streams that the dynamic part is made from. Held to the package hyper-connections, and to
    the paper's algorithm, token by token.
    """

    type: Literal["hyper_connections"] = "hyper_connections"
    dynamic: bool = True
    """The numbers depend on the streams (DHC); else they are learned ones alone (SHC)."""

    @classmethod
    def tiny(cls) -> Self:
        return super().tiny().model_copy(update={"n_streams": 3})

    def connection(self, ctx: BuildContext, place: int) -> Connection:
        return HyperConnection(ctx, self.n_streams, place, self.norm if self.dynamic else None)


class ManifoldConnectionsConfig(StreamsConfig, NormsBefore):
    """Manifold-constrained hyper-connections. At the start a branch reads about their mean, and each takes its output."""

    type: Literal["mhc"] = "mhc"
    mixing: Literal["sinkhorn", "none"] = "sinkhorn"
    """``none``: the streams pass by as they are (HY-V4)."""
    sinkhorn_iters: int = Field(default=20, gt=0)
    magnitude: Multiplier = 2.0
    """The most that a stream takes of a branch's output."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to what is read, to the matrix of the mixing and to the sums that divide it."""
    norm_eps: float = Field(default=1e-6, gt=0)
    """Of the norm of the streams that the numbers are made from."""

    @classmethod
    def tiny(cls) -> Self:
        return super().tiny().model_copy(update={"n_streams": 2, "sinkhorn_iters": 3})

    def connection(self, ctx: BuildContext, place: int) -> Connection:
        iters = self.sinkhorn_iters if self.mixing == "sinkhorn" else 0
        return ManifoldConnection(
            ctx, self.n_streams, sinkhorn_iters=iters, magnitude=self.magnitude, eps=self.eps, norm_eps=self.norm_eps
        )


class GatedResidualConfig(StreamsConfig):
    """Gated streams. The connection has the norm, and the branch none of its own."""

    type: Literal["gated_residual"] = "gated_residual"
    norms_before: ClassVar[bool] = False
    norm: Component[NormConfig] = Field(default_factory=lambda: RMSNormConfig(unit_offset=True))
    """Each stream has one of its own at each connection."""
    rank: int = Field(default=320, gt=0)
    """Of the gate's two matrices."""

    @classmethod
    def tiny(cls) -> Self:
        return super().tiny().model_copy(update={"n_streams": 2, "rank": 3})

    def connection(self, ctx: BuildContext, place: int) -> Connection:
        return GatedConnection(ctx, self.n_streams, self.rank, self.norm)


class Streams(Sequential):
    """See :class:`StreamsConfig`. The connections are ``mixer_streams`` and ``channel_streams``."""

    def __init__(self, config: StreamsConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.n_streams = config.n_streams
        for i, branch in enumerate(self.parts()):
            name = f"{BRANCHES[branch]}_streams"
            self.add_module(name, config.connection(ctx.child(name), ctx.layer_idx * len(self.parts()) + i))

    def wired(self, branch: str, x: Tensor, seen: BranchResult, call: dict[str, Any]) -> Tensor:
        found: Connected = getattr(self, f"{BRANCHES[branch]}_streams")(x)
        y = self.scaled(branch, self.branch(branch, self.norm(branch, found.read), seen, **call))
        return self.onto(branch, found.kept, found.added(y))
