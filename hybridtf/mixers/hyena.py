"""Hyena: multiplications and long convolutions in turn (https://arxiv.org/abs/2302.10866).

    x_0, ..., x_{n-1}, v = conv(in_proj(u))          (a short convolution; n is ``order``)
    v = w_i * (x_i v) + bias_i x_i v                 for i = n-1, ..., 1;  w_i * is a causal convolution over the document
    y = out_proj(x_0 v)

:class:`~hybridtf.nn.ImplicitFilter` gives the filters w_i. They are functions of the place over ``max_seq_len``: a document
that is longer is refused. The state grows: it holds what each long convolution has been given. A whole sequence takes time
n log^2 n, a decode step time in proportion to the tokens so far: that many taps are computed and summed over.

Axes: b batch, t time, d d_model.

Of order 2 it is held to NeMo's copy of the published operator, with torch's convolutions where it calls kernels; of any order
to the operator written anew with torch's FFT.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Edges,
    Growing,
    LengthError,
    ParamSpec,
    RecurrentMixer,
    Segments,
    SequenceMixerConfig,
    State,
    init,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import ImplicitFilter, ShortConv, token_positions


class HyenaConfig(SequenceMixerConfig):
    """Hyena: multiplications and implicit long convolutions in turn. The defaults are the published operator's."""

    source: ClassVar[str] = "https://arxiv.org/abs/2302.10866"

    type: Literal["hyena"] = "hyena"
    order: int = Field(default=2, ge=2)
    """Multiplications; one less long convolutions."""
    filter_width: int = Field(default=64, gt=0)
    """Hidden width of the filter's network."""
    n_inner: int = Field(default=2, ge=0)
    """Its layers between the first and the last."""
    d_embed: int = Field(default=3, ge=3, examples=[5])
    """Numbers that tell it a place; odd."""
    frequency: float = Field(default=1.0, gt=0)
    """Where the frequency of its sines starts."""
    decay: tuple[float, float] = (1.5, 0.3)
    """Parts of ``max_seq_len`` after which the slowest and the fastest channel's window has decayed to ``decay_target``."""
    decay_target: float = Field(default=0.01, gt=0, lt=1)
    shift: float = Field(default=0.0, ge=0)
    """What windows decay to."""
    d_conv: int = Field(default=3, gt=0)
    bias: bool = True
    """Of both projections."""
    kernel: str = "auto"
    conv_kernel: str = "auto"

    @model_validator(mode="after")
    def _positive(self) -> Self:
        if min(self.decay) <= 0:
            raise ValueError(f"decay = {list(self.decay)} must be two positive numbers")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(filter_width=4, n_inner=1, shift=0.1)

    def build(self, ctx: BuildContext) -> Hyena:
        return Hyena(self, ctx)


class Hyena(RecurrentMixer):
    """See :class:`HyenaConfig`. Its state: the short convolution's window, and the inputs (b s d) of each long one."""

    def __init__(self, config: HyenaConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, self.d_model, self.max_len, self.where = config, ctx.d_model, ctx.max_seq_len, ctx.where
        self.n_long = config.order - 1
        wide = (config.order + 1) * ctx.d_model
        self.splits = {"in_proj": {**{f"x{i}": ctx.d_model for i in range(config.order)}, "v": ctx.d_model}}
        self.in_proj = nn.Linear(ctx.d_model, wide, bias=config.bias, **ctx.factory)
        self.conv = ShortConv(
            ctx.child("conv", d_model=wide), config.d_conv, bias=True, activation=None, kernel=config.conv_kernel
        )
        self.filter = ImplicitFilter(
            ctx.child("filter", d_model=self.n_long * ctx.d_model), width=config.filter_width, n_inner=config.n_inner,
            d_embed=config.d_embed, frequency=config.frequency, decay=config.decay, target=config.decay_target,
            shift=config.shift,
        )
        self.filter_bias = nn.Parameter(torch.empty(self.n_long, ctx.d_model, **ctx.factory))
        self.out_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=config.bias, **ctx.factory)
        self.long_conv = ctx.bind_kernel("long_conv", config.kernel, sizes={"channels": ctx.d_model})

    def param_specs(self) -> dict[str, ParamSpec]:
        return {
            "filter_bias": ParamSpec("state", init.normal(1.0)),
            "out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True),
        }

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        where: dict[str, Any] = {"dtype": self.long_conv.compute_dtype, "device": self.long_conv.device}
        long = tuple(
            Growing.empty(batch_size, {"v": (self.d_model,)}, max_len=max_len, **where) for _ in range(self.n_long)
        )
        return {"conv": self.conv.init_state(batch_size), "long": long}

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        leaves: tuple[Growing | None, ...] = (None,) * self.n_long if state is None else state["long"]
        self._check_length(x, segments, leaves[0])
        wide, conv = self.conv(self.in_proj(x), segments, None if state is None else state["conv"])
        *gates, v = wide.split(self.d_model, dim=-1)
        reach = x.shape[1] if leaves[0] is None or leaves[0].untouched else leaves[0].capacity + x.shape[1]
        # The published filter holds the channels' convolutions side by side: channel by channel, not order by order.
        taps = self.filter(min(max(reach, 1), self.max_len)).unflatten(0, (self.d_model, self.n_long))
        after = []
        for i, (gate, leaf) in enumerate(zip(reversed(gates[1:]), leaves, strict=True)):
            v, grown = self._convolve(gate * v, taps[:, i], self.filter_bias[i], segments, leaf)
            after.append(grown)
        out = self.out_proj(gates[0] * v)
        return out, None if state is None else {"conv": conv, "long": tuple(after)}

    def _convolve(
        self, v: Tensor, taps: Tensor, bias: Tensor, segments: Segments | None, leaf: Growing | None
    ) -> tuple[Tensor, Growing | None]:
        past, length = (None, None) if leaf is None or leaf.untouched else (leaf["v"].to(v.dtype), leaf.length)
        y = self.long_conv(v, taps, past, length, segments=segments, n_tokens=v.shape[1])
        y = y + bias.to(v.dtype) * v
        return y, None if leaf is None else leaf.append({"v": v}, segments)

    def _check_length(self, x: Tensor, segments: Segments | None, leaf: Growing | None) -> None:
        if torch.compiler.is_compiling() or x.is_meta or not x.shape[0] * x.shape[1]:
            return
        positions = token_positions(x, segments, leaf)
        if segments is not None:
            positions = positions.masked_fill(~segments.real, 0)
        longest = int(positions.max()) + 1
        if longest > self.max_len:
            raise LengthError(
                f"{self.where}: a document of {longest} tokens is longer than hyena's filter (max_seq_len = {self.max_len})"
            )
