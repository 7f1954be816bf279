"""S4D: a diagonal state-space model for each channel (https://arxiv.org/abs/2206.11893).

    h_t = A_bar h_{t-1} + B_bar x_t,   s_t = 2 Re(C h_t) + D x_t;   y = out_proj(gelu(s)), a gated linear unit over channels

A is diagonal and complex, n / 2 conjugate pairs of n states a channel; :class:`~hybridtf.nn.DiagonalSSM` has the equations. The
pointwise part and the gated output are those of the published layer, since the state-space models alone mix no channels.

Axes: b batch, t time, d d_model (channels), n d_state.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import BuildContext, Edges, ParamSpec, RecurrentMixer, Segments, SequenceMixerConfig, State, init
from hybridtf.core.init import fan_in
from hybridtf.nn import DiagonalInit, DiagonalSSM, Discretisation, accumulation_dtype


class S4DConfig(SequenceMixerConfig):
    """S4D; the defaults are those of the published minimal version."""

    source: ClassVar[str] = "https://arxiv.org/abs/2206.11893"

    type: Literal["s4d"] = "s4d"
    d_state: int = Field(default=64, gt=0)
    """States of a channel; even."""
    start: DiagonalInit = "lin"
    """Where A starts: S4D-Lin, S4D-Inv or S4D-LegS."""
    discretisation: Discretisation = "zoh"
    dt_range: tuple[float, float] = (0.001, 0.1)
    """The time steps start log-evenly in this range."""
    bias: bool = True
    """Of ``out_proj``."""
    chunk_size: int = Field(default=64, gt=0)
    """A power of 2."""
    kernel: str = "auto"

    @model_validator(mode="after")
    def _rising(self) -> Self:
        low, high = self.dt_range
        if not 0 < low <= high:
            raise ValueError(f"dt_range = {list(self.dt_range)} must be two rising positive numbers")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(d_state=4, chunk_size=4)

    def build(self, ctx: BuildContext) -> S4D:
        return S4D(self, ctx)


class S4D(RecurrentMixer):
    """See :class:`S4DConfig`. Its state: re and im (b d n/2), float32 at least."""

    def __init__(self, config: S4DConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.ssm = DiagonalSSM(
            ctx.child("ssm"), config.d_state, start=config.start, discretisation=config.discretisation,
            dt_range=config.dt_range, chunk_size=config.chunk_size, kernel=config.kernel,
        )
        self.D = nn.Parameter(torch.empty(ctx.d_model, **ctx.factory))
        self.splits = {"out_proj": {"value": ctx.d_model, "gate": ctx.d_model}}
        self.out_proj = nn.Linear(ctx.d_model, 2 * ctx.d_model, bias=config.bias, **ctx.factory)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {
            "D": ParamSpec("state", init.normal(1.0)),
            "out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True),
        }

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return self.ssm.init_state(batch_size)

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        y, (re, im) = self.ssm(x, segments, None if state is None else (state["re"], state["im"]))
        wide = accumulation_dtype(x.dtype)
        y = F.gelu(y + self.D.to(wide) * x.to(wide)).to(x.dtype)
        out = F.glu(self.out_proj(y), dim=-1)
        return out, None if state is None else state.advance({"re": re, "im": im}, segments, x.shape[1])
