"""TTT-Linear (https://arxiv.org/abs/2407.04620): the memory of a head is a linear model that trains on the tokens it reads.

    q, k = rope(q_proj(x)), rope(k_proj(x));  v = v_proj(x);  lr = base_lr sigmoid(lr_proj(x)) / p
    g_s = gradient of |norm(k_s W + b) - (v_s - k_s)|^2 / 2 in k_s W + b
    W_t = W - r_i sum_s lr_s k_s^T g_s;  b_t = b - r_i sum_s lr_s g_s;  y_t = q_t + norm(q_t W_t + b_t)
    out = out_proj(post_norm(y) * gelu(gate_proj(x)))

W and b are those of the start of the mini-batch, s its tokens up to t, i the place of t among them, r_i = max(1/i + a_i, 0)
with a_i learned. A document starts at W0 and b0, both learned, and with a mini-batch of its own; rope turns by the place in the
mini-batch. The norm is a layer norm with weights for each head. Without ``output_gate`` the last factor is left out.

The published layer has two forms: separate projections and no gate in its Transformer backbone; with ``d_conv`` and
``output_gate`` in its Mamba backbone, where queries and keys are one projection and differ by a short convolution. (That
backbone has one more short convolution before the layer, which belongs to the block.)

Axes: b batch, t time, d d_model, h heads, p channels of a head, m tokens of a mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Fixed,
    ParamSpec,
    Segments,
    SequenceMixerConfig,
    init,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import (
    LayerNorm,
    MemoryMixer,
    RopeConfig,
    ShortConvs,
    accumulation_dtype,
    head_width,
    idle_beside,
    token_positions,
    told,
)


class TTTLinearConfig(SequenceMixerConfig):
    """Test-time training with a linear model for a memory."""

    source: ClassVar[str] = "https://arxiv.org/abs/2407.04620"

    type: Literal["ttt_linear"] = "ttt_linear"
    n_heads: int = Field(gt=0)
    mini_batch: int = Field(default=16, gt=0)
    """Tokens whose gradients are taken at the same weights, counted from the document's start."""
    base_lr: float = Field(default=1.0, gt=0)
    """The largest learning rate of a token, times the width of a head."""
    rope_theta: float = Field(default=10000.0, gt=0)
    d_conv: int = Field(default=0, ge=0, examples=[4])
    """Taps of the short convolutions (with bias) that make queries and keys of one projection; 0: a projection each."""
    output_gate: bool = False
    """Gate the output by gelu (tanh form) of a projection."""
    eps: float = Field(default=1e-6, gt=0)
    kernel: str = "auto"
    conv_kernel: str = "auto"

    _without_convolution = idle_beside({"d_conv": 0}, "conv_kernel")

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, mini_batch=4)

    def build(self, ctx: BuildContext) -> TTTLinear:
        return TTTLinear(self, ctx)


class TTTLinear(MemoryMixer):
    """See :class:`TTTLinearConfig`. Its state: W (b h p+1 p), what was learned beyond W0 and, in the last row, b0 at the start
    of the mini-batch; dW alike, the sums over the open mini-batch; and the windows of convolutions, if any."""

    op = "memory"

    def __init__(self, config: TTTLinearConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, heads, width = config, config.n_heads, ctx.d_model
        p = self.head_dim = head_width(ctx, heads)
        self.q_proj = nn.Linear(width, width, bias=False, **ctx.factory)
        self.k_proj = self.conv = None
        if not config.d_conv:
            self.k_proj = nn.Linear(width, width, bias=False, **ctx.factory)
        else:
            place, widths = ctx.child("conv"), {"q": width, "k": width}
            self.conv = ShortConvs(place, widths, config.d_conv, bias=True, activation=None, kernel=config.conv_kernel)
        self.v_proj = nn.Linear(width, width, bias=False, **ctx.factory)
        self.lr_proj = nn.Linear(width, heads, bias=True, **ctx.factory)
        self.gate_proj = nn.Linear(width, width, bias=False, **ctx.factory) if config.output_gate else None
        self.out_proj = nn.Linear(width, width, bias=False, **ctx.factory)
        self.norm_weight, self.norm_bias, self.b0 = (nn.Parameter(torch.empty(heads, p, **ctx.factory)) for _ in range(3))
        self.W0 = nn.Parameter(torch.empty(heads, p, p, **ctx.factory))
        self.place_bias = nn.Parameter(torch.empty(config.mini_batch, **ctx.factory))
        self.post_norm = LayerNorm(ctx.child("post_norm"), config.eps, True)
        rope = RopeConfig(theta=config.rope_theta, interleaved=True)
        self.position = rope.build(ctx.child("rope_theta", d_model=p))
        sizes = {"n_heads": heads, "head_dim": p, "mini_batch": config.mini_batch}
        self.memory = ctx.bind_kernel("ttt_linear", config.kernel, sizes=sizes)

    def param_specs(self) -> dict[str, ParamSpec]:
        zero = init.constant(0.0)
        return {
            "norm_weight": ParamSpec("norm", init.constant(1.0)), "norm_bias": ParamSpec("bias", zero),
            "W0": ParamSpec("matrix", init.normal(0.02)), "b0": ParamSpec("bias", zero),
            "place_bias": ParamSpec("state", zero), "lr_proj.weight": ParamSpec("matrix", init.normal(0.02)),
            "out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True),
        }

    def memory_shapes(self) -> dict[str, tuple[int, ...]]:
        h, p = self.b0.shape
        return dict.fromkeys(("W", "dW"), (h, p + 1, p))

    def projected(self, x: Tensor) -> dict[str, Tensor]:
        q = self.q_proj(x)
        return {"q": q, "k": q if self.k_proj is None else self.k_proj(x)}

    def recur(
        self, x: Tensor, given: Mapping[str, Tensor], segments: Segments | None, memory: Fixed | None, **more: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        config, wide = self.config, accumulation_dtype(x.dtype)
        q, k, v = (z.unflatten(-1, (config.n_heads, -1)) for z in (given["q"], given["k"], self.v_proj(x)))
        places = token_positions(x, segments, memory) % config.mini_batch
        q, k = told(self.position, q, k, places, segments, memory)
        lr = torch.sigmoid(self.lr_proj(x).to(wide)) * (config.base_lr / self.head_dim)
        before = None
        if memory is not None:
            before = {"W": memory["W"], "dW": memory["dW"], "n": memory.length % config.mini_batch}
        y, after = self.memory(
            q, k, v, lr, norm_weight=self.norm_weight, norm_bias=self.norm_bias, W0=self.W0, b0=self.b0,
            scale=self._rates(wide), eps=config.eps, initial_state=before, segments=segments, n_tokens=x.shape[1],
        )
        y = self.post_norm(y.flatten(-2))
        out = self.out_proj(y if self.gate_proj is None else y * F.gelu(self.gate_proj(x), approximate="tanh"))
        return out, {"W": after["W"], "dW": after["dW"]}

    def _rates(self, dtype: torch.dtype) -> Tensor:
        """(m) what the sum of gradients is multiplied by at each place of a mini-batch."""
        bias = self.place_bias.to(dtype)
        return (1 / torch.arange(1, len(bias) + 1, dtype=dtype, device=bias.device) + bias).clamp(min=0)
