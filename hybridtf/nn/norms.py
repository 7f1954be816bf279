"""Norms over channels: ``rms_norm`` (https://arxiv.org/abs/1910.07467), ``layer_norm`` (https://arxiv.org/abs/1607.06450),
``group_norm`` (https://arxiv.org/abs/1803.08494), ``l2_norm`` and ``none``; and :class:`GatedRMSNorm`, a part of mixers.

Each token is normalised alone, in float32 at least, and rounded once at the end. A row of zeros gives zeros (plus the
bias, where there is one) and finite gradients.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import BuildContext, Norm, NormConfig, ParamSpec, init
from hybridtf.nn.bottleneck import Bottleneck


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that norms, decays and softmax are computed in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RMSNormConfig(NormConfig):
    """y = x / sqrt(mean(x^2) + eps) * weight + bias."""

    type: Literal["rms_norm"] = "rms_norm"
    eps: float = Field(default=1e-6, gt=0)
    weight: bool = True
    """A learned weight for each channel."""
    bias: bool = False
    unit_offset: bool = False
    """The weight is stored as w and applied as 1 + w, so that weight decay pulls it to 1 (Gemma, Qwen3-Next)."""
    round_first: bool = False
    """In bfloat16: round before the weight is multiplied, and again after (Llama). Else once, at the end (Gemma, OLMo)."""
    gate_rank: int | None = Field(default=None, gt=0)
    """y becomes y * sigmoid(up(silu(down(y)))), over a middle of this width (A.X-K2). None: it stays."""

    @model_validator(mode="after")
    def _has_a_weight(self) -> Self:
        if not self.weight and (self.unit_offset or self.round_first):
            raise ValueError(f"{'unit_offset' if self.unit_offset else 'round_first'} speaks of a weight, and weight = false")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> RMSNorm:
        options = {"weight": self.weight, "unit_offset": self.unit_offset, "round_first": self.round_first}
        return RMSNorm(ctx, self.eps, **options, bias=self.bias, gate_rank=self.gate_rank)


class RMSNorm(Norm):
    """Root mean square norm over the last axis, of width ``ctx.d_model``; see :class:`RMSNormConfig`."""

    def __init__(
        self, ctx: BuildContext, eps: float, *, weight: bool = True, unit_offset: bool = False, round_first: bool = False,
        bias: bool = False, gate_rank: int | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.unit_offset, self.round_first = eps, unit_offset, round_first
        self.weight, self.bias = _parameter(ctx, weight), _parameter(ctx, bias)
        self.gate = Bottleneck(ctx, gate_rank, ctx.d_model, bias=False, between="silu") if gate_rank is not None else None

    def param_specs(self) -> dict[str, ParamSpec]:
        start = ParamSpec("norm", init.constant(0.0), offset=1.0) if self.unit_offset else ParamSpec("norm", init.constant(1.0))
        specs = {"weight": start, "bias": ParamSpec("bias", init.constant(0.0))}
        return {name: spec for name, spec in specs.items() if getattr(self, name) is not None}

    def forward(self, x: Tensor) -> Tensor:
        """(... d) to (... d)."""
        y = self._normed(x)
        return y if self.gate is None else (y * torch.sigmoid(self.gate(y).to(accumulation_dtype(y.dtype)))).to(y.dtype)

    def _normed(self, x: Tensor) -> Tensor:
        dtype = accumulation_dtype(x.dtype)
        wide = x if x.dtype == dtype else x.to(dtype)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is None:
            return (normed if self.bias is None else normed + self.bias.to(dtype)).to(x.dtype)
        weight: Tensor = self.weight
        weight = weight if weight.dtype == dtype else weight.to(dtype)
        if self.unit_offset:
            weight = 1.0 + weight
        if self.round_first:
            rounded = normed.to(x.dtype) * weight.to(x.dtype)
            return rounded if self.bias is None else rounded + self.bias.to(x.dtype)
        y = normed * weight
        y = y if self.bias is None else y + self.bias.to(dtype)
        return y if x.dtype == dtype else y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"eps={self.eps}, unit_offset={self.unit_offset}"


class L2NormConfig(NormConfig):
    """y = x / sqrt(sum(x^2) + eps), a point of the unit sphere (nGPT); without parameters."""

    type: Literal["l2_norm"] = "l2_norm"
    eps: float = Field(default=1e-6, gt=0)

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> L2Norm:
        return L2Norm(self.eps)


class L2Norm(Norm):
    """See :class:`L2NormConfig`."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(... d) to (... d)."""
        return l2_normalised(x, self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class LayerNormConfig(NormConfig):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""

    type: Literal["layer_norm"] = "layer_norm"
    eps: float = Field(default=1e-5, gt=0)
    weight: bool = True
    bias: bool = True

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> LayerNorm:
        return LayerNorm(ctx, self.eps, self.bias, weight=self.weight)


class GroupNormConfig(NormConfig):
    """Layer norm of each of ``n_groups`` equal groups of channels, of one token alone: never over time.

    This differs from ``torch.nn.GroupNorm`` on (b c t), which mixes all tokens and would break every law of time.
    """

    type: Literal["group_norm"] = "group_norm"
    n_groups: int = Field(gt=0)
    eps: float = Field(default=1e-5, gt=0)
    weight: bool = True
    bias: bool = True

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_groups=2)

    def build(self, ctx: BuildContext) -> LayerNorm:
        if ctx.d_model % self.n_groups:
            raise ctx.error(f"group_norm: a width of {ctx.d_model} is not divisible by n_groups = {self.n_groups}")
        return LayerNorm(ctx, self.eps, self.bias, weight=self.weight, n_groups=self.n_groups)


class LayerNorm(Norm):
    """Layer norm of each of ``n_groups`` equal groups of the last axis, of width ``ctx.d_model``; weight and bias a channel."""

    def __init__(self, ctx: BuildContext, eps: float, bias: bool, *, weight: bool = True, n_groups: int = 1) -> None:
        super().__init__()
        self.n_groups, self.eps = n_groups, eps
        self.weight, self.bias = _parameter(ctx, weight), _parameter(ctx, bias)

    def param_specs(self) -> dict[str, ParamSpec]:
        specs = {"weight": ParamSpec("norm", init.constant(1.0)), "bias": ParamSpec("bias", init.constant(0.0))}
        return {name: spec for name, spec in specs.items() if getattr(self, name) is not None}

    def forward(self, x: Tensor) -> Tensor:
        """(... d) to (... d)."""
        wide = accumulation_dtype(x.dtype)
        weight = None if self.weight is None else self.weight.to(wide)
        bias = None if self.bias is None else self.bias.to(wide)
        if self.n_groups == 1:
            return F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, self.eps).to(x.dtype)
        groups: Tensor = x.to(wide).unflatten(-1, (self.n_groups, -1))
        y = F.layer_norm(groups, groups.shape[-1:], None, None, self.eps).flatten(-2)
        y = y if weight is None else y * weight
        return (y if bias is None else y + bias).to(x.dtype)

    def extra_repr(self) -> str:
        return f"n_groups={self.n_groups}, eps={self.eps}"


class NoNormConfig(NormConfig):
    """No norm: a post-norm stack needs no final one, a branch that starts at 0 (ReZero) none at all."""

    type: Literal["none"] = "none"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> NoNorm:
        return NoNorm()


class NoNorm(Norm):
    """Returns what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _parameter(ctx: BuildContext, wanted: bool) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(ctx.d_model, **ctx.factory)) if wanted else None


class GatedRMSNorm(nn.Module):
    """RMS norm and a gate over ``n_groups`` equal groups of channels, as mixers use them on their output.

    y, gate (... c) of width ``ctx.d_model``; act is ``activation``: ``silu`` or ``sigmoid``.

    - ``norm_first`` false: norm(y * act(gate)) * weight (Mamba-2, https://arxiv.org/abs/2405.21060).
    - ``norm_first`` true: norm(y) * weight * act(gate) (RetNet and Gated DeltaNet with silu, KDA with sigmoid). Groups are
      heads where the statistics are a head's; the weight then differs by head, unless ``shared_weight``: one of a group's
      width, for all of them.

    Not a registered norm: it takes two inputs. Mixers build it and give its options in their own config.
    """

    def __init__(
        self, ctx: BuildContext, *, n_groups: int, eps: float, norm_first: bool,
        activation: Literal["silu", "sigmoid"] = "silu", shared_weight: bool = False,
    ) -> None:
        super().__init__()
        if ctx.d_model % n_groups:
            raise ctx.error(f"a gated norm of width {ctx.d_model} does not divide into {n_groups} groups")
        self.n_groups, self.eps, self.norm_first, self.activation = n_groups, eps, norm_first, activation
        width = ctx.d_model // n_groups if shared_weight else ctx.d_model
        self.weight = nn.Parameter(torch.empty(width, **ctx.factory))

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec("norm", init.constant(1.0))}

    def forward(self, y: Tensor, gate: Tensor | None) -> Tensor:
        """``y``, ``gate`` (... c) to (... c), in ``gate``'s dtype; without a gate the norm alone, in ``y``'s."""
        dtype = y.dtype if gate is None else gate.dtype
        wide = y.to(accumulation_dtype(y.dtype))
        act = None
        if gate is not None:
            gate = gate.to(wide.dtype)
            act = F.silu(gate) if self.activation == "silu" else torch.sigmoid(gate)
        if act is not None and not self.norm_first:
            wide = wide * act
        grouped: Tensor = wide.unflatten(-1, (self.n_groups, -1))
        weight = self.weight.to(wide.dtype).view(-1, grouped.shape[-1])  # [groups or 1, width]
        normed = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps) * weight).flatten(-2)
        out: Tensor = normed * act if act is not None and self.norm_first else normed
        return out.to(dtype)

    def extra_repr(self) -> str:
        return f"n_groups={self.n_groups}, eps={self.eps}, norm_first={self.norm_first}, activation={self.activation}"


class HeadRMSNorm(nn.Module):
    """Root mean square norm of each head's channels, with weights of its own for each: ``ctx.d_model`` channels in ``n_heads``
    equal heads."""

    def __init__(self, ctx: BuildContext, n_heads: int, eps: float) -> None:
        super().__init__()
        self.n_heads, self.eps = n_heads, eps
        self.weight = nn.Parameter(torch.empty(ctx.d_model, **ctx.factory))

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec("norm", init.constant(1.0))}

    def forward(self, x: Tensor) -> Tensor:
        """(... h k) to (... h k)."""
        wide = x.to(accumulation_dtype(x.dtype))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.to(wide.dtype).view(self.n_heads, -1)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"n_heads={self.n_heads}, eps={self.eps}"


class L2Clip(nn.Module):
    """Shortens each head's vector to length ``longest`` where it is longer: x min(1, longest / |x|), in float32 at least.

    ``n_heads``: first each channel, ``ctx.d_model`` wide in every head, is multiplied by a learned ``scale`` (h k).
    """

    def __init__(self, ctx: BuildContext, longest: float, n_heads: int | None = None) -> None:
        super().__init__()
        self.longest = longest
        self.scale = None if n_heads is None else nn.Parameter(torch.empty(n_heads, ctx.d_model, **ctx.factory))

    def param_specs(self) -> dict[str, ParamSpec]:
        return {} if self.scale is None else {"scale": ParamSpec("norm", init.constant(1.0))}

    def forward(self, x: Tensor) -> Tensor:
        """(... h k) to (... h k)."""
        wide = x.to(accumulation_dtype(x.dtype))
        wide = wide if self.scale is None else wide * self.scale.to(wide.dtype)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        shortened: Tensor = wide * (self.longest / (length + 1e-6)).clamp(max=1.0)
        return shortened.to(x.dtype)

    def extra_repr(self) -> str:
        return f"longest={self.longest}"


def l2_normalised(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x`` (... k) with length 1 along its last axis, x / sqrt(|x|^2 + eps); float32 at least inside, x's dtype outside."""
    wide = x.to(accumulation_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
