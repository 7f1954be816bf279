"""The base of mixers over a low-rank latent of keys and values: DeepSeek-V2 and V3's
(https://arxiv.org/abs/2405.04434, section 2.1).

    c_t, r_t  = kv_a_proj(x_t)                 c: norm, then held (r_kv); r: the one rotary key of all heads, held (d_r)
    k_th, v_th = [kv_b_proj(c_t)_h, r_t]       q_th = [q_h, rotated q'_h]: of x_t, or of its normed latent (q_lora_rank)
    y_t = out( sum_s softmax_s(scale q_th . k_sh) v_sh ),   s <= t in t's document

The state holds [c_t, r_t] alone. Where few queries look at what it holds, ``kv_b_proj`` is absorbed: with its rows K_h and V_h,
q_h . K_h c = (K_h^T q_h) . c and sum_s w_s V_h c_s = V_h sum_s w_s c_s, so that nothing is made of the held tokens.

Axes: b batch, t time, s held tokens, d d_model, h heads, r kv_lora_rank, n qk_nope_head_dim, v v_dim.
"""

from __future__ import annotations

import math
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Component,
    Growing,
    NormConfig,
    ParamSpec,
    PositionConfig,
    QueryKeyPosition,
    Ring,
    Segments,
    SequenceMixerConfig,
    raw_weight,
)
from hybridtf.core.init import fan_in
from hybridtf.nn.norms import RMSNormConfig
from hybridtf.nn.positions import RopeConfig, YarnScaling, told
from hybridtf.nn.softmax_mixer import Held, Projected, SoftmaxMixer
from hybridtf.ops.attention import AttentionMask


class LatentConfig(SequenceMixerConfig):
    """What all mixers over latents are told. Defaults are DeepSeek-V3's."""

    n_heads: int = Field(gt=0)
    q_lora_rank: int | None = Field(default=None, gt=0)
    """Width of the queries' latent (1536 in V3). None: queries of x itself (V2-Lite)."""
    kv_lora_rank: int = Field(default=512, gt=0)
    qk_nope_head_dim: int = Field(default=128, gt=0)
    """Channels of a head's queries and keys that tell no position."""
    qk_rope_head_dim: int = Field(default=64, ge=0)
    """Channels of a head's queries that do, and of the one key for all heads. 0, with position ``none``: there are none."""
    v_dim: int = Field(default=128, gt=0)
    position: Component[PositionConfig] = Field(default_factory=lambda: RopeConfig(interleaved=True))
    """Told on ``qk_rope_head_dim`` channels; ``none`` leaves them as they are (Kimi Linear)."""
    norm: Component[NormConfig] = Field(default_factory=RMSNormConfig)
    """Of both latents."""
    q_latent_scale: float = Field(default=1.0, gt=0)
    """Multiplies the queries' latent once it is normed ((d_model / q_lora_rank) ** 0.5 in LongCat-Flash)."""
    kv_latent_scale: float = Field(default=1.0, gt=0)
    """The same of keys' and values', which is held so ((d_model / kv_lora_rank) ** 0.5 in LongCat-Flash)."""
    scale: float | None = Field(default=None, gt=0)
    """Of the scores. None: (qk_nope_head_dim + qk_rope_head_dim) ** -0.5, times (0.1 mscale_all_dim ln(factor) + 1) squared
    where positions are stretched by ``yarn`` with an mscale_all_dim."""
    bias: bool = False
    """On kv_a_proj, q_a_proj and out_proj."""
    output_gate: Literal["none", "input", "latent"] = "none"
    """Multiplies the heads' output by sigmoid(gate_proj(c)) before ``out_proj``. ``input``: c is x (HY-V4); ``latent``: c is
    the queries' latent, normed and as it was, side by side, and ``q_b_proj`` reads both as well (A.X-K2)."""
    kernel: str = "auto"

    @model_validator(mode="after")
    def _has_a_latent(self) -> Self:
        if self.output_gate == "latent" and self.q_lora_rank is None:
            raise ValueError("output_gate = 'latent' is of the queries' latent: give q_lora_rank")
        if self.q_latent_scale != 1.0 and self.q_lora_rank is None:
            raise ValueError("q_latent_scale is of the queries' latent: give q_lora_rank")
        return self


class LatentMixer(SoftmaxMixer):
    """Its state is a ``Growing`` of ``latent`` (b s r + d_r). ``features``: what is asked of the kernel."""

    op = "attention"
    """The op that scores."""

    def __init__(self, config: LatentConfig, ctx: BuildContext, *, features: set[str] | None = None) -> None:
        super().__init__()
        self.config, self.causal = config, ctx.causal
        h, rank, rope = config.n_heads, config.kv_lora_rank, config.qk_rope_head_dim
        self.qk_dim = config.qk_nope_head_dim + rope
        self._queries(config, ctx)
        self.kv_a_proj = nn.Linear(ctx.d_model, rank + rope, bias=config.bias, **ctx.factory)
        self.kv_a_norm = config.norm.build(ctx.child("kv_a_norm", d_model=rank))
        per_head = config.qk_nope_head_dim + config.v_dim
        self.kv_b_proj = nn.Linear(rank, h * per_head, bias=False, **ctx.factory)
        self.out_proj = nn.Linear(h * config.v_dim, ctx.d_model, bias=config.bias, **ctx.factory)
        self.splits = {"kv_a_proj": {"latent": rank, "k_rope": rope}}
        self.place(config.position.build_at(ctx.child("position", d_model=rope), "qk"))
        if isinstance(self.position, QueryKeyPosition) and self.position.span(ctx.param_dtype) is not None:
            raise ctx.error(f"{config.position.type_name()!r} is told again at each read, which a latent cannot be; use 'rope'")
        self.scale = self.qk_dim**-0.5 * _stretch(config.position) if config.scale is None else config.scale
        sizes = {"n_heads": h, "n_kv_heads": h, "head_dim": self.qk_dim, "v_dim": config.v_dim}
        asked = (features or set()) | (set() if ctx.causal else {"non_causal"})
        self.attention = ctx.bind_kernel(self.op, config.kernel, sizes=sizes, features=asked)

    def _queries(self, config: LatentConfig, ctx: BuildContext) -> None:
        wide, rank = config.n_heads * self.qk_dim, config.q_lora_rank
        both = config.output_gate == "latent"
        self.q_proj = nn.Linear(ctx.d_model, wide, bias=False, **ctx.factory) if rank is None else None
        if rank is not None:
            self.q_a_proj = nn.Linear(ctx.d_model, rank, bias=config.bias, **ctx.factory)
            self.q_a_norm = config.norm.build(ctx.child("q_a_norm", d_model=rank))
            self.q_b_proj = nn.Linear(2 * rank if both else rank, wide, bias=False, **ctx.factory)
        self.gate_proj: nn.Linear | None = None
        if config.output_gate != "none":
            read = 2 * rank if both and rank is not None else ctx.d_model
            self.gate_proj = nn.Linear(read, config.n_heads * config.v_dim, bias=False, **ctx.factory)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}

    def held_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"latent": (self.config.kv_lora_rank + self.config.qk_rope_head_dim,)}

    def project(
        self, x: Tensor, positions: Tensor, segments: Segments | None, leaf: Growing | Ring | None
    ) -> Projected:
        config = self.config
        flat, gate, source = self._asked(x)
        q, q_rope = flat.unflatten(-1, (config.n_heads, self.qk_dim)).split(
            [config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1
        )
        latent, k_rope = self.kv_a_proj(x).split([*self.splits["kv_a_proj"].values()], dim=-1)
        q_rope, k_rope = told(self.position, q_rope, k_rope[:, :, None], positions, segments, leaf)
        held = torch.cat([_times(self.kv_a_norm(latent), config.kv_latent_scale), k_rope[:, :, 0]], dim=-1)
        return Projected(torch.cat([q, q_rope], dim=-1), {"latent": held}, gate, source)

    def _asked(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """(b t d) to the queries of all heads side by side, the gates where there are any, and what the queries are of."""
        of_latent = self.config.output_gate == "latent"
        gate = None if self.gate_proj is None or of_latent else self.gate_proj(x)
        if self.q_proj is not None:
            return self.q_proj(x), gate, x
        plain = self.q_a_proj(x)
        source = _times(self.q_a_norm(plain), self.config.q_latent_scale)
        if self.gate_proj is None or not of_latent:
            return self.q_b_proj(source), gate, source
        both = torch.cat([source, plain], dim=-1)
        return self.q_b_proj(both), self.gate_proj(both), source

    def read(self, q: Tensor, held: Held, mask: AttentionMask) -> Tensor:
        latent = held["latent"]
        weight = raw_weight(self.kv_b_proj) if self._absorbs(q.shape[1], latent.shape[1]) else None
        if weight is None:
            return self.run(q, *self.made(latent), mask)
        q, of_values = self.absorbed(q, weight)
        # One key head that all share. The latent is its own value: what the rotary channels give is dropped at the end.
        y = self.run(q, latent[:, :, None], latent[:, :, None], mask)
        return torch.einsum("bthr,hvr->bthv", y[..., : self.config.kv_lora_rank], of_values)

    def _absorbs(self, n_queries: int, n_held: int) -> bool:
        """Whether it is cheaper not to make keys and values: multiplications per held token and head."""
        c = self.config
        made = c.kv_lora_rank * (c.qk_nope_head_dim + c.v_dim) + n_queries * (self.qk_dim + c.v_dim)
        return n_queries < n_held and n_queries * (2 * c.kv_lora_rank + c.qk_rope_head_dim) < made

    def made(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (b s h k) and values (b s h v) of what is held (b s r + d_r)."""
        config = self.config
        compressed, k_rope = latent.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        k, v = self.kv_b_proj(compressed).unflatten(-1, (config.n_heads, -1)).split(
            [config.qk_nope_head_dim, config.v_dim], dim=-1
        )
        return torch.cat([k, k_rope[:, :, None].expand(-1, -1, config.n_heads, -1)], dim=-1), v

    def absorbed(self, q: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (b t h k) to queries of latents (b t h r + d_r) by the ``weight`` of ``kv_b_proj``, and its rows for values
        (h v r)."""
        c = self.config
        per_head = weight.to(q.dtype).unflatten(0, (c.n_heads, -1))
        of_keys, of_values = per_head.split([c.qk_nope_head_dim, c.v_dim], dim=1)
        q, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        return torch.cat([torch.einsum("bthn,hnr->bthr", q, of_keys), q_rope], dim=-1), of_values

    def leave(self, y: Tensor, gate: Tensor | None) -> Tensor:
        y = y.flatten(-2)
        out: Tensor = self.out_proj(y if gate is None else y * torch.sigmoid(gate))
        return out


def _times(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale


def _stretch(position: PositionConfig) -> float:
    """What YaRN's mscale_all_dim makes of the scores: cos and sin carry only the ratio to it."""
    scaling = position.scaling if isinstance(position, RopeConfig) else None
    if not isinstance(scaling, YarnScaling) or scaling.mscale_all_dim is None or scaling.factor <= 1:
        return 1.0
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2
