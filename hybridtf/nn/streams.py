"""A residual stream of several streams: what a branch reads of them, how they pass by, how a branch's output is added.

With streams x_1 .. x_n of one token, a connection gives numbers a (what the branch reads), C (how the streams mix) and
w (what each stream takes), and a layer f turns the streams into

    x'_k = sum_j C[j, k] x_j + w_k f(sum_j a_j x_j)

- :class:`HyperConnection` (https://arxiv.org/abs/2409.19606): a, C, w learned, plus small parts made from each stream.
- :class:`ManifoldConnection` (mHC, https://arxiv.org/abs/2512.24880): a, w through a sigmoid, C near doubly stochastic.
- :class:`GatedConnection` (Qwen4-Exp): a for each channel of the normed streams; C is the identity.

Numbers that mix are made in float32 at least, and so are the sums; the result has the streams' dtype.

Axes: b batch, t time, s or j, k streams, d d_model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from hybridtf.core import BuildContext, NormConfig, ParamSpec, init
from hybridtf.nn.norms import RMSNorm, accumulation_dtype
from hybridtf.ops.autocast import no_autocast


class Connected(NamedTuple):
    """What a branch reads (b t d), the streams that pass it by (b t s d), and what each takes of its output (b t s) or (s)."""

    read: Tensor
    kept: Tensor
    taken: Tensor

    def added(self, y: Tensor) -> Tensor:
        """What each stream takes of the branch's output (b t d): (b t s d), in the streams' dtype."""
        return (self.taken[..., None] * y.to(self.taken.dtype)[..., None, :]).to(self.kept.dtype)


class Connection(nn.Module, ABC):
    """The streams around one branch."""

    @abstractmethod
    def forward(self, x: Tensor) -> Connected:
        """Streams (b t s d)."""


def _sum_of(weights: Tensor, x: Tensor) -> Tensor:
    """sum_j weights[.., j] x_j."""
    return (weights[..., None] * x).sum(-2)


class HyperConnection(Connection):
    """[a C] = A + scale_a tanh(norm(x) W_a), w = B + scale_w tanh(norm(x) W_w), each row j from stream j alone.

    At the start W is 0, B is 1, C the identity and the branch reads stream ``place`` mod n: as one residual stream, n times.
    Without a ``norm`` the numbers are learned ones alone (static).
    """

    def __init__(self, ctx: BuildContext, n_streams: int, place: int, norm: NormConfig | None) -> None:
        super().__init__()
        self.n_streams, self.place = n_streams, place % n_streams
        self.mix = nn.Parameter(torch.empty(n_streams, 1 + n_streams, **ctx.factory))
        self.take = nn.Parameter(torch.empty(n_streams, **ctx.factory))
        self.norm = None if norm is None else norm.build(ctx.child("norm"))
        if norm is not None:
            self.mix_proj = nn.Parameter(torch.empty(1 + n_streams, ctx.d_model, **ctx.factory))
            self.take_proj = nn.Parameter(torch.empty(1, ctx.d_model, **ctx.factory))
            self.mix_scale = nn.Parameter(torch.empty(1, **ctx.factory))
            self.take_scale = nn.Parameter(torch.empty(1, **ctx.factory))

    def param_specs(self) -> dict[str, ParamSpec]:
        def start(tensor: Tensor, generator: Generator) -> None:
            tensor.zero_()[:, 1:].fill_diagonal_(1.0)
            tensor[self.place, 0] = 1.0

        specs = {"mix": ParamSpec("norm", start, drawn=False), "take": ParamSpec("norm", init.constant(1.0))}
        if self.norm is not None:
            specs |= {name: ParamSpec("matrix", init.constant(0.0)) for name in ("mix_proj", "take_proj")}
            specs |= {name: ParamSpec("norm", init.constant(0.01)) for name in ("mix_scale", "take_scale")}
        return specs

    def forward(self, x: Tensor) -> Connected:
        with no_autocast(x.device):
            wide = x.to(accumulation_dtype(x.dtype))
            mix, take = self.mix.to(wide.dtype), self.take.to(wide.dtype)
            if self.norm is not None:
                normed = self.norm(wide)
                mix = mix + self.mix_scale.to(wide.dtype) * F.linear(normed, self.mix_proj.to(wide.dtype)).tanh()
                said = F.linear(normed, self.take_proj.to(wide.dtype)).tanh().squeeze(-1)
                take = take + self.take_scale.to(wide.dtype) * said
            mixed = torch.matmul(mix.transpose(-1, -2), wide).to(x.dtype)
            return Connected(mixed[..., 0, :], mixed[..., 1:, :], take)


class StreamLogits(nn.Module):
    """scale_i * (W_i norm(vec(x))) + bias_i for groups i of outputs; the norm is an RMS norm over all streams, unweighted.

    ``widths``: outputs of each group; ``starts``: where the biases of each begin.
    """

    def __init__(
        self, ctx: BuildContext, n_streams: int, widths: tuple[int, ...], norm_eps: float, starts: tuple[float, ...]
    ) -> None:
        super().__init__()
        self.widths, self.starts = widths, starts
        self.norm = RMSNorm(ctx, norm_eps, weight=False)
        self.proj = nn.Parameter(torch.empty(sum(widths), n_streams * ctx.d_model, **ctx.factory))
        self.bias = nn.Parameter(torch.empty(sum(widths), **ctx.factory))
        self.scale = nn.Parameter(torch.empty(len(widths), **ctx.factory))

    def param_specs(self) -> dict[str, ParamSpec]:
        def start(tensor: Tensor, generator: Generator) -> None:
            for part, value in zip(tensor.split(self.widths), self.starts, strict=True):
                part.fill_(value)

        return {
            "proj": ParamSpec("matrix", init.normal(0.02)), "bias": ParamSpec("bias", start, drawn=False),
            "scale": ParamSpec("norm", init.constant(0.01)),
        }

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Streams (b t s d), in float32 at least, to (b t width) for each group."""
        found = F.linear(self.norm(x.flatten(-2)), self.proj.to(x.dtype)).split(self.widths, -1)
        biases, scales = self.bias.to(x.dtype).split(self.widths), self.scale.to(x.dtype).unbind()
        return tuple(f * scale + bias for f, scale, bias in zip(found, scales, biases, strict=True))


def even_share(n_streams: int) -> float:
    """The number whose sigmoid is 1 / n_streams."""
    return -math.log(max(n_streams - 1, 1))


class ManifoldConnection(Connection):
    """a = sigmoid(l_a) + eps, w = magnitude sigmoid(l_w), C = Sinkhorn(softmax(l_C) + eps), all l from all streams.

    The Sinkhorn steps divide by the sums of columns and rows in turn, columns last. With ``sinkhorn_iters`` 0, C is the
    identity and eps is added to w too (HY-V4).
    """

    def __init__(
        self, ctx: BuildContext, n_streams: int, *, sinkhorn_iters: int, magnitude: float, eps: float, norm_eps: float
    ) -> None:
        super().__init__()
        n = n_streams
        self.n_streams, self.sinkhorn_iters, self.magnitude, self.eps = n, sinkhorn_iters, magnitude, eps
        widths, starts = ((n, n, n * n), (even_share(n), 0.0, 0.0)) if sinkhorn_iters else ((n, n), (even_share(n), 0.0))
        self.logits = StreamLogits(ctx, n, widths, norm_eps, starts)

    def forward(self, x: Tensor) -> Connected:
        with no_autocast(x.device):
            wide = x.to(accumulation_dtype(x.dtype))
            read, take, *mix = self.logits(wide)
            take = self.magnitude * torch.sigmoid(take)
            kept = x
            if mix:
                weights = self._doubly_stochastic(mix[0].unflatten(-1, (self.n_streams, self.n_streams)))
                kept = torch.matmul(weights.transpose(-1, -2), wide).to(x.dtype)
            else:
                take = take + self.eps
            return Connected(_sum_of(torch.sigmoid(read) + self.eps, wide).to(x.dtype), kept, take)

    def _doubly_stochastic(self, logits: Tensor) -> Tensor:
        mix = logits.softmax(-1) + self.eps
        mix = mix / (mix.sum(-2, keepdim=True) + self.eps)
        for _ in range(self.sinkhorn_iters - 1):
            mix = mix / (mix.sum(-1, keepdim=True) + self.eps)
            mix = mix / (mix.sum(-2, keepdim=True) + self.eps)
        return mix


class GatedStreams(nn.Module):
    """mean_j of (sigmoid(up(silu(down(n) / s))) * n)_j, where n are the streams, each with a norm of its own (Qwen4-Exp)."""

    def __init__(self, ctx: BuildContext, n_streams: int, rank: int, norm: NormConfig) -> None:
        super().__init__()
        self.n_streams = n_streams
        self.norms = nn.ModuleList(norm.build(ctx.child("norm")) for _ in range(n_streams))
        self.down_proj = nn.Linear(n_streams * ctx.d_model, rank, bias=False, **ctx.factory)
        self.up_proj = nn.Linear(rank, n_streams * ctx.d_model, bias=False, **ctx.factory)

    def normed(self, x: Tensor) -> Tensor:
        """Streams (b t s d) to (b t s*d)."""
        return torch.cat([norm(one) for norm, one in zip(self.norms, x.unbind(-2), strict=True)], -1)

    def gated(self, normed: Tensor) -> Tensor:
        """(b t s*d) to (b t d)."""
        gate = torch.sigmoid(self.up_proj(F.silu(self.down_proj(normed) / self.n_streams)))
        y: Tensor = (gate * normed).unflatten(-1, (self.n_streams, -1)).mean(-2)
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.gated(self.normed(x))


class GatedConnection(Connection):
    """The branch reads :class:`GatedStreams`; stream k takes 2 sigmoid(W_k n / s) of its output; the streams do not mix."""

    def __init__(self, ctx: BuildContext, n_streams: int, rank: int, norm: NormConfig) -> None:
        super().__init__()
        self.gate = GatedStreams(ctx, n_streams, rank, norm)
        self.take_proj = nn.Linear(n_streams * ctx.d_model, n_streams, bias=False, **ctx.factory)

    def forward(self, x: Tensor) -> Connected:
        normed = self.gate.normed(x)
        return Connected(self.gate.gated(normed), x, 2 * torch.sigmoid(self.take_proj(normed) / self.gate.n_streams))


class SigmoidStreams(nn.Module):
    """sum_j (sigmoid(l_j) + eps) x_j: one stream of all (DeepSeek-V4)."""

    def __init__(self, ctx: BuildContext, n_streams: int, *, eps: float, norm_eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.logits = StreamLogits(ctx, n_streams, (n_streams,), norm_eps, (even_share(n_streams),))

    def forward(self, x: Tensor) -> Tensor:
        with no_autocast(x.device):
            wide = x.to(accumulation_dtype(x.dtype))
            return _sum_of(torch.sigmoid(self.logits(wide)[0]) + self.eps, wide).to(x.dtype)
