"""sLSTM (https://arxiv.org/abs/2405.04517): scalar memories with exponential gates, whose gates see the last output.

    x' = silu(conv(x));  i, f, z, o = [i_proj(x'), f_proj(x'), z_proj(x), o_proj(x)] + h_{t-1} weight_hh + bias
    m_t = max(log sigmoid(f) + m_{t-1}, i);  keep = exp(log sigmoid(f) + m_{t-1} - m_t);  write = exp(i - m_t)
    c_t = keep c_{t-1} + write tanh(z);  n_t = keep n_{t-1} + write;  h_t = sigmoid(o) c_t / n_t;  out = norm(h)

A document's first token has m_t = i: nothing is kept there yet. All matrices are block-diagonal, one block a head; the norm is
over each head's channels. A nonlinear recurrence: tokens are walked one by one, in a compiled loop (the op ``slstm``).

Axes: b batch, t time, d d_model, h heads, p channels of a head.

Held to the published layer, states too (xlstm, its plain backend).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Generator, Tensor, nn

from hybridtf.core import (
    BuildContext,
    Edges,
    Fixed,
    Law,
    ParamSpec,
    RecurrentMixer,
    Segments,
    SequenceMixerConfig,
    State,
    init,
)
from hybridtf.nn import HeadLinear, LayerNorm, ShortConv, accumulation_dtype, head_width, idle_beside, layer_depth
from hybridtf.ops.slstm import STATES


class SLSTMConfig(SequenceMixerConfig):
    """sLSTM: scalar memories with exponential gates that see the last output, as the published layer. Its width is d_model,
    and it ends in the norm: no projection follows.

    The recurrent matrix starts at 0. The forget gate's bias starts at 5 for a head's first channel and falls to -7 at its last,
    as 5 - 12 s^(0.3 + 1.3 r) with s from 0 to 1 over the channels and r from 0 to 1 over the layers; other biases at 0.
    """

    type: Literal["slstm"] = "slstm"
    source: ClassVar[str] = "https://arxiv.org/abs/2405.04517"
    n_heads: int = Field(default=4, gt=0)
    d_conv: int = Field(default=4, ge=0)
    """Taps of the convolution before the gates of input and forgetting. 0: none."""
    eps: float = Field(default=1e-5, gt=0)
    """Of the norm."""
    chunk_size: int = Field(default=64, gt=0)
    """Tokens that are computed again at a time for their gradients."""
    kernel: str = "auto"
    conv_kernel: str = "auto"

    _without_convolution = idle_beside({"d_conv": 0}, "conv_kernel")

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, chunk_size=4)

    def build(self, ctx: BuildContext) -> SLSTM:
        return SLSTM(self, ctx)


class SLSTM(RecurrentMixer):
    """See :class:`SLSTMConfig`. Its state: the convolution's window, and ``h``, ``c``, ``n`` and ``m`` (b heads p) of the cell.

    The recurrent matrix is multiplied within the loop over time and not called, so it is a parameter: ``weight_hh``
    (heads p 4p), gates i, f, z, o side by side.
    """

    cannot: Mapping[Law, str] = {"context_parallel": "a nonlinear step has no summary: each token needs the state before it"}

    def __init__(self, config: SLSTMConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        heads = config.n_heads
        self.head_dim = p = head_width(ctx, heads)
        self.rising = layer_depth(ctx)[0]
        self.conv = None
        if config.d_conv:
            self.conv = ShortConv(
                ctx.child("conv", d_model=ctx.d_model), config.d_conv, bias=True, activation="silu", kernel=config.conv_kernel
            )
        self.i_proj, self.f_proj, self.z_proj, self.o_proj = (
            HeadLinear(ctx.child(f"{gate}_proj"), heads, bias=False) for gate in "ifzo"
        )
        self.weight_hh = nn.Parameter(torch.empty(heads, p, 4 * p, **ctx.factory))
        self.bias = nn.Parameter(torch.empty(heads, 4 * p, **ctx.factory))
        self.norm = LayerNorm(ctx.child("norm"), config.eps, False, n_groups=heads)
        self.slstm = ctx.bind_kernel("slstm", config.kernel, sizes={"n_heads": heads, "head_dim": p})

    def param_specs(self) -> dict[str, ParamSpec]:
        return {
            "weight_hh": ParamSpec("matrix", init.constant(0.0)),
            "bias": ParamSpec("bias", self._start_bias, drawn=False),
            "norm.weight": ParamSpec("norm", init.constant(1.0), residual=True),
        }

    def _start_bias(self, bias: Tensor, generator: Generator) -> None:
        p = self.head_dim
        place = torch.arange(p, dtype=torch.float32) / max(p - 1, 1)
        bias.zero_()
        bias[:, p : 2 * p] = 5.0 - 12.0 * place ** (0.3 + 1.3 * self.rising)

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        shapes = dict.fromkeys(STATES, (self.config.n_heads, self.head_dim))
        dtype = accumulation_dtype(self.slstm.dtype)
        cell = Fixed.empty(batch_size, shapes, dtype=dtype, device=self.slstm.device)
        return {"cell": cell} if self.conv is None else {"conv": self.conv.init_state(batch_size), "cell": cell}

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        after: dict[str, State] = {}
        mixed = x
        if self.conv is not None:
            mixed, after["conv"] = self.conv(x, segments, None if state is None else state["conv"])
        pairs = ((self.i_proj, mixed), (self.f_proj, mixed), (self.z_proj, x), (self.o_proj, x))
        gates = torch.cat([proj(y).unflatten(-1, (self.config.n_heads, -1)) for proj, y in pairs], -1)  # [b, t, h, 4p]
        h, last = self.slstm(
            gates.to(accumulation_dtype(x.dtype)) + self.bias, self.weight_hh,
            initial_state=None if state is None else state["cell"].data, segments=segments,
            chunk_size=self.config.chunk_size, n_tokens=x.shape[1],
        )
        out = self.norm(h.flatten(-2).to(x.dtype))
        if state is None:
            return out, None
        after["cell"] = state["cell"].advance(last, segments, x.shape[1])
        return out, after
