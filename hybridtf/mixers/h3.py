"""H3: two state-space models between multiplications (https://arxiv.org/abs/2212.14052, algorithm 1).

    q, k, v = q_proj(x), k_proj(x), v_proj(x)
    k' = shift(k) + shift_D k                   (a shift SSM: the last d_state inputs, weighted)
    S = ssm(k' v^T) + D k' v^T                  (a diagonal SSM, one for each head, on each of its head_dim^2 products)
    y = out_proj(S^T q)

A shift SSM whose B is the first unit vector is a short convolution of d_state taps, its C. The published code also trains B,
which adds no freedom, from that start. Both states are of fixed size.

Axes: b batch, t time, d d_model, h heads, e and f places in a head (of k and of v).

The diagonal model is held to ESPnet's copy of the published one, the shift to torch's convolution; all of it to the paper's
algorithm 1 with dense matrices over time.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, Edges, Fixed, ParamSpec, RecurrentMixer, Segments, SequenceMixerConfig, State, init
from hybridtf.core.init import fan_in
from hybridtf.nn import DiagonalInit, DiagonalSSM, Discretisation, PositiveRange, PowerOfTwo, ShortConv, accumulation_dtype


class H3Config(SequenceMixerConfig):
    """H3: a shift and a diagonal state-space model between multiplications. The defaults are the published code's."""

    source: ClassVar[str] = "https://arxiv.org/abs/2212.14052"

    type: Literal["h3"] = "h3"
    d_state: int = Field(default=64, gt=0)
    """States of the diagonal SSM, and taps of the shift; even."""
    head_dim: int = Field(default=1, gt=0)
    """Must divide d_model; each head has head_dim^2 products."""
    start: DiagonalInit = "lin"
    """Where A starts."""
    discretisation: Discretisation = "bilinear"
    dt_range: PositiveRange = (0.001, 0.1)
    """The time steps start log-evenly in this range."""
    bias: bool = True
    """Of the four projections."""
    chunk_size: PowerOfTwo = 64
    kernel: str = "auto"
    conv_kernel: str = "auto"

    @classmethod
    def tiny(cls) -> Self:
        return cls(d_state=4, head_dim=2, chunk_size=4)

    def build(self, ctx: BuildContext) -> H3:
        return H3(self, ctx)


class H3(RecurrentMixer):
    """See :class:`H3Config`. Its state: the shift's window, and re and im (b e*f h n/2) of the diagonal SSM."""

    def __init__(self, config: H3Config, ctx: BuildContext) -> None:
        super().__init__()
        self.config, d = config, ctx.d_model
        if d % config.head_dim:
            raise ctx.error(f"d_model = {d} is not divisible by head_dim = {config.head_dim}")
        self.n_heads = d // config.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d, d, bias=config.bias, **ctx.factory) for _ in range(3))
        self.shift = ShortConv(ctx.child("shift"), config.d_state, bias=False, activation=None, kernel=config.conv_kernel)
        self.shift_D = nn.Parameter(torch.empty(d, **ctx.factory))
        self.ssm = DiagonalSSM(
            ctx.child("ssm", d_model=self.n_heads), config.d_state, start=config.start,
            discretisation=config.discretisation, dt_range=config.dt_range, chunk_size=config.chunk_size,
            kernel=config.kernel,
        )
        self.D = nn.Parameter(torch.empty(self.n_heads, **ctx.factory))
        self.out_proj = nn.Linear(d, d, bias=config.bias, **ctx.factory)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {
            "shift_D": ParamSpec("state", init.normal(1.0)),
            "D": ParamSpec("state", init.normal(1.0)),
            "out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True),
        }

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        shape = (self.config.head_dim**2, *self.ssm.shape)
        dtype, device = accumulation_dtype(self.shift.short_conv.dtype), self.shift.short_conv.device
        ssm = Fixed.empty(batch_size, {"re": shape, "im": shape}, dtype=dtype, device=device)
        return {"shift": self.shift.init_state(batch_size), "ssm": ssm}

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        shifted, shift = self.shift(k, segments, None if state is None else state["shift"])
        k = shifted + self.shift_D.to(k.dtype) * k
        wide = accumulation_dtype(x.dtype)
        q, k, v = (z.to(wide).unflatten(-1, (self.n_heads, self.config.head_dim)) for z in (q, k, v))
        products = torch.einsum("bthe,bthf->befth", k, v)
        kept, after = self._remember(products, segments, None if state is None else state["ssm"])
        kept = kept + self.D.to(wide) * products
        y = torch.einsum("befth,bthe->btfh", kept, q).flatten(2)
        out = self.out_proj(y.to(x.dtype))
        if state is None or after is None:
            return out, None
        ssm = state["ssm"].advance(after, segments, x.shape[1])
        return out, {"shift": shift, "ssm": ssm}

    def _remember(
        self, products: Tensor, segments: Segments | None, state: Fixed | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The diagonal SSM over products (b e f t h): each pair of places is a row of its own."""
        b, e, f = products.shape[:3]
        rows = None
        if segments is not None:
            rows = segments.rows(torch.arange(b, device=products.device).repeat_interleave(e * f))
        before = None if state is None else (state["re"].flatten(0, 1), state["im"].flatten(0, 1))
        y, (re, im) = self.ssm.run(products.flatten(0, 2), rows, before)
        return y.unflatten(0, (b, e, f)), {"re": re.unflatten(0, (b, e * f)), "im": im.unflatten(0, (b, e * f))}
