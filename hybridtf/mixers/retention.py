"""Linear attention that forgets: one matrix a head, which keeps a share a_t of itself at each token, and no normaliser.

    S_t = a_t S_{t-1} + k_t v_t^T;   y_t = S_t^T q_t;   out = out_proj(norm(y_t) * act(gate_proj(x_t)))

- ``retnet`` (https://arxiv.org/abs/2307.08621): q, k rotated by position; a = 1 - 2^(-5 - i) for head i; a norm of each head.
- ``lightning_attention`` (https://arxiv.org/abs/2401.04658, https://arxiv.org/abs/2501.08313): silu on q, k, v; a by head and
  layer; one norm over all heads, and a sigmoid.
- ``simple_gla`` (https://arxiv.org/abs/2405.05254): a_t = sigmoid(decay_proj(x_t))^(1 / 16); short convolutions; a norm of
  each head.

Axes: b batch, t time, d d_model, h heads, k key width, p value width.

lightning_attention is held to the layer of transformers. No outside layer was run for retnet and simple_gla: their recurrences
are held to fla's, and what is around them is spelled out in the tests.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, Fixed, QueryKeyPosition, Segments, SequenceMixerConfig
from hybridtf.nn import (
    Alibi,
    GatedRMSNorm,
    LayerNorm,
    LinearHeads,
    MemoryConfig,
    RMSNorm,
    RopeConfig,
    Written,
    accumulation_dtype,
    head_width,
    idle_beside,
    retention_log_decay,
    short_convs,
    token_positions,
    told,
)


def rotation(ctx: BuildContext, width: int, theta: float) -> QueryKeyPosition:
    """Pairs of neighbours turned by position, as in RetNet and Gated RetNet: the rotation of xPos, without its scaling."""
    place = ctx.child("position", d_model=width)
    built = RopeConfig(theta=theta, interleaved=True).build_at(place, "qk")
    assert isinstance(built, QueryKeyPosition)
    return built


class RetNetConfig(SequenceMixerConfig):
    """RetNet: multi-scale retention, linear attention with a fixed decay a head, rotation and a swish gate."""

    type: Literal["retnet"] = "retnet"
    source: ClassVar[str] = "https://arxiv.org/abs/2307.08621"
    n_heads: int = Field(default=8, gt=0)
    expand_v: float = Field(default=2.0, gt=0)
    """Width of all heads' values together, in units of d_model."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotation."""
    output_norm: Literal["group_norm", "rms_norm"] = "group_norm"
    """Of each head, before the gate. ``group_norm``: that of the paper. ``rms_norm``: without mean, weight and bias, as the
    published code."""
    eps: float = Field(default=1e-6, gt=0)
    """Of the norm."""
    chunk_size: int = Field(default=64, gt=0)
    kernel: str = "auto"

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, expand_v=1.5, chunk_size=4)

    def build(self, ctx: BuildContext) -> RetNet:
        return RetNet(self, ctx)


class RetNet(LinearHeads):
    """See :class:`RetNetConfig`. Its state is one matrix S (b h k p) a head.

    The sums by which published code divides scores and read-outs to keep them small cancel in the norm, and are left out.
    Its frequencies are spaced over [1, 1 / theta] with both ends; here they are those of RoPE, which the paper cites.
    """

    def __init__(self, config: RetNetConfig, ctx: BuildContext) -> None:
        heads = config.n_heads
        k_dim, v_dim = head_width(ctx, heads), head_width(ctx, heads, expand_v=config.expand_v)
        super().__init__(
            ctx, n_heads=heads, k_dim=k_dim, v_dim=v_dim, chunk_size=config.chunk_size, kernel=config.kernel
        )
        self.config = config
        self.gate_proj = nn.Linear(ctx.d_model, heads * v_dim, bias=False, **ctx.factory)
        self.position = rotation(ctx, k_dim, config.rope_theta)
        self.output_norm: LayerNorm | RMSNorm
        if config.output_norm == "group_norm":
            place = ctx.child("output_norm", d_model=heads * v_dim)
            self.output_norm = LayerNorm(place, config.eps, bias=True, n_groups=heads)
        else:
            self.output_norm = RMSNorm(ctx.child("output_norm", d_model=v_dim), config.eps, weight=False)

    def written(self, q: Tensor, k: Tensor, x: Tensor, segments: Segments | None, state: Fixed | None) -> Written:
        q, k = told(self.position, q, k, token_positions(x, segments, state), segments, state)
        wide = accumulation_dtype(q.dtype)
        return Written(q, k * self.k_dim**-0.5, retention_log_decay(self.n_heads, q.new_empty(0, dtype=wide)))

    def finished(self, y: Tensor, x: Tensor) -> Tensor:
        norm, gate = self.output_norm, self.gate_proj(x)
        y = norm(y.flatten(-2)) if isinstance(norm, LayerNorm) else norm(y).flatten(-2)
        return F.silu(gate) * y.to(gate.dtype)


class LightningAttentionConfig(SequenceMixerConfig):
    """Lightning attention as in MiniMax-01: linear attention with fixed decays by head and layer, and a gated norm. Defaults
    are those of MiniMax-Text-01."""

    type: Literal["lightning_attention"] = "lightning_attention"
    source: ClassVar[str] = "https://arxiv.org/abs/2501.08313"
    n_heads: int = Field(default=64, gt=0)
    head_dim: int = Field(default=128, gt=0)
    eps: float = Field(default=1e-6, gt=0)
    """Of the norm."""
    chunk_size: int = Field(default=64, gt=0)
    kernel: str = "auto"

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, head_dim=3, chunk_size=4)

    def build(self, ctx: BuildContext) -> LightningAttention:
        return LightningAttention(self, ctx)


class LightningAttention(LinearHeads):
    """See :class:`LightningAttentionConfig`. Its state is one matrix S (b h k p) a head. Queries are not scaled.

    ln a = -slope (1 - layer / (n_layers - 1)), the slopes of ALiBi by head: the last layer forgets next to nothing.
    """

    def __init__(self, config: LightningAttentionConfig, ctx: BuildContext) -> None:
        heads, width = config.n_heads, config.head_dim
        super().__init__(
            ctx, n_heads=heads, k_dim=width, v_dim=width, chunk_size=config.chunk_size, kernel=config.kernel
        )
        self.config = config
        self.gate_proj = nn.Linear(ctx.d_model, heads * width, bias=False, **ctx.factory)
        place = ctx.child("output_norm", d_model=heads * width)
        self.output_norm = GatedRMSNorm(place, n_groups=1, eps=config.eps, norm_first=True, activation="sigmoid")
        self.slopes = Alibi(8.0)
        # The published small numbers, which keep the quotient defined for one layer and the last layer's decay above 0.
        self.depth_factor = 1 - ctx.layer_idx / (max(ctx.n_layers, ctx.layer_idx + 1) - 1 + 1e-5) + 1e-5

    def projected(self, x: Tensor) -> dict[str, Tensor]:
        return {role: F.silu(given) for role, given in super().projected(x).items()}

    def written(self, q: Tensor, k: Tensor, x: Tensor, segments: Segments | None, state: Fixed | None) -> Written:
        log_a = self.slopes(self.n_heads, x.device) * -self.depth_factor
        return Written(q, k, log_a.to(accumulation_dtype(q.dtype)))

    def finished(self, y: Tensor, x: Tensor) -> Tensor:
        normed: Tensor = self.output_norm(y.flatten(-2), self.gate_proj(x))
        return normed


class SimpleGLAConfig(MemoryConfig):
    """Simple GLA: linear attention with one decay a head that the token gives, and short convolutions. Gated RetNet is
    ``rotary`` with ``d_conv`` = 0."""

    type: Literal["simple_gla"] = "simple_gla"
    source: ClassVar[str] = "https://arxiv.org/abs/2405.05254"
    n_heads: int = Field(default=4, gt=0)
    expand_k: float = Field(default=1.0, gt=0)
    """Width of all heads' keys together, in units of d_model."""
    expand_v: float = Field(default=1.0, gt=0)
    gate_normaliser: float = Field(default=16.0, gt=0)
    """The root that is taken of the sigmoid: the larger, the slower the head forgets."""
    d_conv: int = Field(default=4, ge=0)
    """Taps of short convolutions (with silu) on queries, keys and values; 0: none."""
    conv_bias: bool = False
    rotary: bool = False
    """Turn queries and keys by position."""

    _without_convolution = idle_beside({"d_conv": 0}, "conv_bias", "conv_kernel")

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, expand_v=1.5, chunk_size=4)

    def build(self, ctx: BuildContext) -> SimpleGLA:
        return SimpleGLA(self, ctx)


class SimpleGLA(LinearHeads):
    """See :class:`SimpleGLAConfig`. Its state: one matrix S (b h k p) a head, and the convolutions' windows."""

    def __init__(self, config: SimpleGLAConfig, ctx: BuildContext) -> None:
        heads = config.n_heads
        k_dim, v_dim = head_width(ctx, heads, expand_k=config.expand_k), head_width(ctx, heads, expand_v=config.expand_v)
        super().__init__(
            ctx, n_heads=heads, k_dim=k_dim, v_dim=v_dim, chunk_size=config.chunk_size, kernel=config.kernel
        )
        self.config = config
        self.root = config.gate_normaliser
        self.decay_proj = nn.Linear(ctx.d_model, heads, **ctx.factory)
        self.gate_proj = nn.Linear(ctx.d_model, heads * v_dim, bias=False, **ctx.factory)
        self.output_norm = GatedRMSNorm(
            ctx.child("output_norm", d_model=heads * v_dim), n_groups=heads, eps=config.eps, norm_first=True,
            shared_weight=True,
        )
        self.position = rotation(ctx, k_dim, 10000.0) if config.rotary else None
        self.conv = short_convs(
            ctx.child("conv"), {"q": heads * k_dim, "k": heads * k_dim, "v": heads * v_dim}, config.d_conv,
            bias=config.conv_bias, kernel=config.conv_kernel,
        )

    def written(self, q: Tensor, k: Tensor, x: Tensor, segments: Segments | None, state: Fixed | None) -> Written:
        if self.position is not None:
            q, k = told(self.position, q, k, token_positions(x, segments, state), segments, state)
        gate = self.decay_proj(x)
        log_a = F.logsigmoid(gate.to(accumulation_dtype(gate.dtype))) / self.root
        return Written(q * self.k_dim**-0.5, k, log_a)

    def finished(self, y: Tensor, x: Tensor) -> Tensor:
        normed: Tensor = self.output_norm(y.flatten(-2), self.gate_proj(x))
        return normed
