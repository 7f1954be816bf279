"""Multi-head latent attention of DeepSeek-V2 and V3 (https://arxiv.org/abs/2405.04434, section 2.1).

    c_t, r_t  = kv_a_proj(x_t)                 c: norm, then held (r_kv); r: the one rotary key of all heads, held (d_r)
    k_th, v_th = [kv_b_proj(c_t)_h, r_t]       q_th = [q_h, rotated q'_h]: of x_t, or of its normed latent (q_lora_rank)
    y_t = out( sum_s softmax_s(scale q_th . k_sh) v_sh ),   s <= t in t's document
    with a gate of each head:  y_th times sigmoid(gate_proj(x_t)_h) before out

The state holds [c_t, r_t] alone. Where few queries look at what it holds, ``kv_b_proj`` is absorbed into them.

Axes: b batch, t time, s held tokens, d d_model, h heads, r kv_lora_rank + qk_rope_head_dim, v v_dim.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, Growing, Ring, Segments
from hybridtf.nn import LatentConfig, LatentMixer, Projected


class MLAConfig(LatentConfig):
    """Multi-head latent attention: keys and values from a held low-rank latent, rotary positions on channels of their own.

    Widths are DeepSeek-V3's; queries are of x itself unless ``q_lora_rank`` is given, as in V2-Lite. Held of a token:
    kv_lora_rank + qk_rope_head_dim numbers.
    """

    type: Literal["mla"] = "mla"
    source: ClassVar[str] = "https://arxiv.org/abs/2405.04434"
    time_exponent: ClassVar[float] = 2.0

    head_gate: bool = False
    """Multiplies each head's output by sigmoid(gate_proj(x)), one number a head (Ling)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """On the attention weights, in training."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, q_lora_rank=5, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=4, v_dim=3)

    def build(self, ctx: BuildContext) -> MLA:
        return MLA(self, ctx)


class MLA(LatentMixer):
    """See :class:`MLAConfig`. Its state is a ``Growing`` of ``latent`` (b s r)."""

    def __init__(self, config: MLAConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, features={"dropout"} if config.dropout else set())
        self.dropout = config.dropout
        self.gate_proj = nn.Linear(ctx.d_model, config.n_heads, bias=False, **ctx.factory) if config.head_gate else None

    def project(
        self, x: Tensor, positions: Tensor, segments: Segments | None, leaf: Growing | Ring | None
    ) -> Projected:
        found = super().project(x, positions, segments, leaf)
        return found if self.gate_proj is None else found._replace(gate=self.gate_proj(x))

    def leave(self, y: Tensor, gate: Tensor | None) -> Tensor:
        return super().leave(y if gate is None else y * torch.sigmoid(gate)[..., None], None)
