"""Norms: ``rms_norm`` (https://arxiv.org/abs/1910.07467), ``layer_norm``, and the gated norm of Mamba-2."""

from __future__ import annotations

from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, Norm, NormConfig, ParamSpec, init


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that norms, decays and softmax are computed in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RMSNormConfig(NormConfig):
    """y = x / sqrt(mean(x^2) + eps) * weight."""

    type: Literal["rms_norm"] = "rms_norm"
    eps: float = Field(default=1e-6, gt=0)

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> RMSNorm:
        return RMSNorm(ctx, self.eps)


class RMSNorm(Norm):
    """Root mean square norm over the last axis, of width ``ctx.d_model``."""

    def __init__(self, ctx: BuildContext, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(ctx.d_model, **ctx.factory))

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec("norm", init.constant(1.0))}

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


class LayerNormConfig(NormConfig):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""

    type: Literal["layer_norm"] = "layer_norm"
    eps: float = Field(default=1e-5, gt=0)
    bias: bool = True

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> LayerNorm:
        return LayerNorm(ctx, self.eps, self.bias)


class LayerNorm(Norm):
    """Layer norm over the last axis, of width ``ctx.d_model``."""

    def __init__(self, ctx: BuildContext, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(ctx.d_model, **ctx.factory))
        self.bias = nn.Parameter(torch.zeros(ctx.d_model, **ctx.factory)) if bias else None

    def param_specs(self) -> dict[str, ParamSpec]:
        specs = {"weight": ParamSpec("norm", init.constant(1.0))}
        return specs if self.bias is None else {**specs, "bias": ParamSpec("bias", init.constant(0.0))}

    def forward(self, x: Tensor) -> Tensor:
        wide = accumulation_dtype(x.dtype)
        bias = None if self.bias is None else self.bias.to(wide)
        return F.layer_norm(x.to(wide), x.shape[-1:], self.weight.to(wide), bias, self.eps).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """RMS norm of y * silu(gate) over ``n_groups`` equal groups of channels (Mamba-2; gate first, then norm).

    With ``norm_first`` the norm comes before the gate: norm(y) * silu(gate).
    """

    def __init__(self, ctx: BuildContext, *, n_groups: int, eps: float, norm_first: bool) -> None:
        super().__init__()
        self.n_groups, self.eps, self.norm_first = n_groups, eps, norm_first
        self.weight = nn.Parameter(torch.ones(ctx.d_model, **ctx.factory))

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec("norm", init.constant(1.0))}

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """``y``, ``gate`` (... c) to (... c), in ``gate``'s dtype."""
        dtype = gate.dtype
        wide = y.to(accumulation_dtype(y.dtype))
        act = F.silu(gate.to(wide.dtype))
        if not self.norm_first:
            wide = wide * act
        grouped: Tensor = wide.unflatten(-1, (self.n_groups, -1))
        normed = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)).flatten(-2)
        normed = normed * self.weight.to(wide.dtype)
        out: Tensor = normed * act if self.norm_first else normed
        return out.to(dtype)
