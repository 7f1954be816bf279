"""mLSTM (https://arxiv.org/abs/2405.04517): a matrix memory with exponential gates, in the layer of xLSTM-7B
(https://arxiv.org/abs/2503.13427).

    q, k, v = q_proj(x) / sqrt(k), k_proj(x), v_proj(x);   i, f = cap(i_proj(x)), cap(f_proj(x)),  cap(z) = c tanh(z / c)
    m_t = max(log sigmoid(f_t) + m_{t-1}, i_t),  m_0 = 0
    [C_t, n_t] = exp(log sigmoid(f_t) + m_{t-1} - m_t) [C_{t-1}, n_{t-1}] + exp(i_t - m_t) k_t [v_t, 1]^T
    h_t = C_t^T q_t / (max(|n_t^T q_t|, exp(-m_t)) + eps);   out = out_proj(sigmoid(gate_proj(x)) * norm(h))

Axes: b batch, t time, d d_model, h heads, k key width of a head, p value width of a head.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Generator, Tensor, nn

from hybridtf.core import (
    BuildContext,
    Edges,
    Fixed,
    ParamSpec,
    RecurrentMixer,
    Segments,
    SequenceMixerConfig,
    State,
    init,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import LayerNorm, accumulation_dtype, head_width


class MLSTMConfig(SequenceMixerConfig):
    """mLSTM in the layer of xLSTM-7B: a matrix memory with exponential gates. There is no convolution and no projection up
    (those belong to the block of the first paper).

    The gates start independent of the input: what is written at exp(-10), what is kept at sigmoid(3) to sigmoid(6), head
    by head.
    """

    type: Literal["mlstm"] = "mlstm"
    source: ClassVar[str] = "https://arxiv.org/abs/2405.04517"
    n_heads: int = Field(default=8, gt=0)
    expand_k: float = Field(default=0.5, gt=0)
    """Width of all heads' queries, as of their keys, in d_model (``qk_dim_factor`` in the published code)."""
    expand_v: float = Field(default=1.0, gt=0)
    """Width of all heads' values, in d_model (``v_dim_factor`` there)."""
    gate_softcap: float = Field(default=15.0, gt=0)
    """Both gates' logarithms stay between its negative and it."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the denominator."""
    norm_eps: float = Field(default=1e-6, gt=0)
    """Of the layer norm over each head's output."""
    bias: bool = False
    """Of the projections, and of the norm; the gates of input and forgetting have one in any case."""
    chunk_size: int = Field(default=64, gt=0)
    kernel: str = "auto"

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, chunk_size=4)

    def build(self, ctx: BuildContext) -> MLSTM:
        return MLSTM(self, ctx)


class MLSTM(RecurrentMixer):
    """See :class:`MLSTMConfig`. Its state: ``S`` (b h k p+1), the memory C with n as its last column, and the maximum ``m``."""

    def __init__(self, config: MLSTMConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        heads = config.n_heads
        self.widths = {
            "d_state": head_width(ctx, heads, expand_k=config.expand_k),
            "head_dim": head_width(ctx, heads, expand_v=config.expand_v),
        }
        self.qk_dim, self.v_dim = (heads * width for width in self.widths.values())

        def linear(rows: int, columns: int = ctx.d_model, bias: bool = config.bias) -> nn.Linear:
            return nn.Linear(columns, rows, bias=bias, **ctx.factory)

        self.q_proj, self.k_proj, self.v_proj = linear(self.qk_dim), linear(self.qk_dim), linear(self.v_dim)
        self.i_proj, self.f_proj = linear(config.n_heads, bias=True), linear(config.n_heads, bias=True)
        self.gate_proj = linear(self.v_dim)
        self.norm = LayerNorm(
            ctx.child("norm", d_model=self.v_dim), config.norm_eps, config.bias, n_groups=config.n_heads
        )
        self.out_proj = linear(ctx.d_model, self.v_dim)
        sizes = {"n_heads": config.n_heads, "n_groups": config.n_heads, **self.widths}
        self.ssd = ctx.bind_kernel("ssd_stabilised", config.kernel, sizes=sizes)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {
            "i_proj.weight": ParamSpec("matrix", init.constant(0.0)),
            "f_proj.weight": ParamSpec("matrix", init.constant(0.0)),
            "i_proj.bias": ParamSpec("bias", init.constant(-10.0)),
            "f_proj.bias": ParamSpec("bias", _from_three_to_six, drawn=False),
            "out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True),
        }

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        n_heads, widths = self.config.n_heads, self.widths
        shapes: dict[str, tuple[int, ...]] = {"S": (n_heads, widths["d_state"], widths["head_dim"] + 1), "m": (n_heads,)}
        dtype = accumulation_dtype(self.ssd.dtype)
        return Fixed.empty(batch_size, shapes, max_len=max_len, dtype=dtype, device=self.ssd.device)

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        config = self.config
        q, k, v = (proj(x).unflatten(-1, (config.n_heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        log_i, f = (self._capped(proj(x)) for proj in (self.i_proj, self.f_proj))
        h, last = self.ssd(
            q * self.widths["d_state"] ** -0.5, k, v, F.logsigmoid(f), log_i,
            initial_state=None if state is None else state.data, segments=segments, eps=config.eps,
            chunk_size=config.chunk_size, n_tokens=x.shape[1],
        )
        out = self.out_proj(torch.sigmoid(self.gate_proj(x)) * self.norm(h.flatten(-2)))
        return out, None if state is None else state.advance(last, segments, x.shape[1])

    def _capped(self, gate: Tensor) -> Tensor:
        """(b t h), in float32 at least."""
        cap = self.config.gate_softcap
        return cap * torch.tanh(gate.to(accumulation_dtype(gate.dtype)) / cap)


def _from_three_to_six(bias: Tensor, generator: Generator) -> None:
    bias.copy_(torch.linspace(3.0, 6.0, len(bias)))
