"""``indexed_attention`` and ``indexed_mla``: DeepSeek Sparse Attention (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556), and
kin.

    I_tj = sum_i w_ti relu(q_ti . k_j) / sqrt(d_i n_i)       q: n_i heads, of x_t or of the queries' latent; k_j: one key
    C_t  = the ``index_top_k`` tokens j <= t with the highest I_tj;    y_t = out( softmax attention of every head to C_t )

The indexer's inputs carry no graph. It learns from the loss ``indexer_kl`` = KL(p_t || softmax over C_t of I_t), where p_t is
the attention's own weight on C_t, summed over heads and made to sum to 1. With index_top_k >= length this is full attention,
and the loss the published one of the dense warm-up. Published code turns the indexer's queries and keys by a Hadamard matrix
for 8-bit numbers; that changes no product and is left out. With ``index_pool`` whole blocks of tokens are scored and chosen,
and the open block is always seen (GLM-5-Next: ``indexed_mla`` without positions, index_pool 4); the loss is then over chosen
blocks. The preset ``qsa`` is Qwen4's: gated attention in heads, whose indexer's keys are averaged over a block, then normed and
told the position of its first token; heads of the indexer are added up without weights. Scores take t^2, attention
t * index_top_k.

A choice can serve several layers (``index_choice``: GLM-5's "full" and "shared" indexers, https://arxiv.org/abs/2603.12201).
One with ``write`` hands it on as the edge ``indexer_choice``; those with ``read`` have no indexer, nor its keys, nor its loss.
The writer is taught by its own attention alone.

Axes: b batch, t time, s held tokens, d d_model, h heads, n choices, r kv_lora_rank + qk_rope_head_dim.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, Component, NormConfig, ParamSpec, Preset, init, raw_weight
from hybridtf.nn import HeadsConfig, HeadsMixer, IndexedConfig, IndexedMixer, LatentConfig, LatentMixer, accumulation_dtype
from hybridtf.ops.block_sparse_attention import Held


class IndexedAttentionConfig(IndexedConfig, HeadsConfig):
    """Attention in heads, grouped or not, to the tokens that a lightning indexer chooses. Positions on queries and keys."""

    type: Literal["indexed_attention"] = "indexed_attention"
    source: ClassVar[str] = "https://arxiv.org/abs/2512.02556"
    time_exponent: ClassVar[float] = 2.0

    qk_norm: Component[NormConfig] | None = None
    """A norm of each head's queries and keys, before positions."""
    output_gate: bool = False
    """Multiplies the heads' output by sigmoid(gate_proj(x)) before ``out_proj``."""
    qkv_bias: bool = False
    out_bias: bool = False

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=6, index_n_heads=8, index_head_dim=4, index_top_k=6)

    def build(self, ctx: BuildContext) -> IndexedAttention:
        return IndexedAttention(self, ctx)


class IndexedAttention(IndexedMixer, HeadsMixer):
    """See :class:`IndexedAttentionConfig`. Its state is a ``Growing`` of keys, values and the indexer's keys; with blocks, the
    tokens of the open one and the keys of complete ones lie beside it."""

    def __init__(self, config: IndexedAttentionConfig, ctx: BuildContext) -> None:
        HeadsMixer.__init__(
            self, config, ctx, qkv_bias=config.qkv_bias, out_bias=config.out_bias, qk_norm=config.qk_norm, sites=("qk",)
        )
        self.config = config
        inner = config.n_heads * self.head_dim
        self.gate_proj = nn.Linear(ctx.d_model, inner, bias=config.qkv_bias, **ctx.factory) if config.output_gate else None
        self.add_indexer(config, ctx, ctx.d_model, config.index_head_dim)

    def held_shapes(self) -> dict[str, tuple[int, ...]]:
        return {**HeadsMixer.held_shapes(self), **self.index_shapes()}

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.q_proj(x), None if self.gate_proj is None else self.gate_proj(x)

    def look(self, q: Tensor, held: Held, index: Tensor) -> tuple[Tensor, Tensor]:
        k, v = held.data["k"].to(q.dtype), held.data["v"].to(q.dtype)
        y, mass = self.attention(q, k, v, index, held.places, n_tokens=q.shape[1])
        return y, mass


class IndexedMLAConfig(IndexedConfig, LatentConfig):
    """Multi-head latent attention to the tokens that a lightning indexer chooses. Defaults are DeepSeek-V3.2's.

    The indexer's queries come of the queries' latent, where there is one; ``index_position`` is told on its first
    ``qk_rope_head_dim`` channels, in halves where the attention's are interleaved.
    """

    type: Literal["indexed_mla"] = "indexed_mla"
    source: ClassVar[str] = "https://arxiv.org/abs/2512.02556"
    time_exponent: ClassVar[float] = 2.0

    q_lora_rank: int | None = Field(default=None, gt=0)
    """Width of the queries' latent (1536 in V3.2). None: queries, and those of the indexer, of x itself."""
    sinks: bool = False
    """A learned logit per head that takes weight and gives nothing (HY-V4)."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(
            n_heads=2, q_lora_rank=5, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=4, v_dim=3, index_n_heads=8,
            index_head_dim=6, index_top_k=5,
        )

    def build(self, ctx: BuildContext) -> IndexedMLA:
        return IndexedMLA(self, ctx)


class IndexedMLA(IndexedMixer, LatentMixer):
    """See :class:`IndexedMLAConfig`. Its state is a ``Growing`` of ``latent`` (b s r) and the indexer's keys.

    ``kv_b_proj`` is absorbed into the queries, so that one latent is gathered for all heads; where it is no plain Linear, keys
    and values are made of all held tokens first.
    """

    def __init__(self, config: IndexedMLAConfig, ctx: BuildContext) -> None:
        LatentMixer.__init__(self, config, ctx)
        self.sinks = nn.Parameter(torch.zeros(config.n_heads, **ctx.factory)) if config.sinks else None
        self.add_indexer(config, ctx, config.q_lora_rank or ctx.d_model, config.qk_rope_head_dim)

    def param_specs(self) -> dict[str, ParamSpec]:
        specs = super().param_specs()
        return specs if self.sinks is None else {**specs, "sinks": ParamSpec("state", init.normal(0.02))}

    def held_shapes(self) -> dict[str, tuple[int, ...]]:
        return {**LatentMixer.held_shapes(self), **self.index_shapes()}

    def look(self, q: Tensor, held: Held, index: Tensor) -> tuple[Tensor, Tensor]:
        latent, weight = held.data["latent"].to(q.dtype), raw_weight(self.kv_b_proj)
        options: dict[str, Any] = {"scale": self.scale, "n_tokens": q.shape[1]}
        if self.sinks is not None:
            options["outside"] = self.sinks.to(accumulation_dtype(q.dtype)).expand(q.shape[:3])
        if weight is None:
            y, mass, *_ = self.attention(q, *self.made(latent), index, held.places, **options)
            return y, mass
        q, of_values = self.absorbed(q, weight)
        values = latent[..., : self.config.kv_lora_rank]
        y, mass, *_ = self.attention(q, latent[:, :, None], values[:, :, None], index, held.places, **options)
        return torch.einsum("bthr,hvr->bthv", y, of_values), mass


UNIT_NORM = {"type": "rms_norm", "unit_offset": True}

PRESETS = (
    Preset("qsa", "indexed_attention", {
        "output_gate": True, "qk_norm": UNIT_NORM, "index_pooling": "mean", "index_weights": False, "index_q_norm": UNIT_NORM,
        "index_k_norm": UNIT_NORM,
    }, requires=("index_pool",)),
)
