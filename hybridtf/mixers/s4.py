"""S4 and S4D: a linear state-space model for each channel.

    h_t = A_bar h_{t-1} + B_bar x_t,   s_t = 2 Re(C h_t) + D x_t;   y = out_proj(gelu(s)), a gated linear unit over channels

    s4   A is diagonal plus low rank and starts as HiPPO-LegS (https://arxiv.org/abs/2111.00396); :class:`~hybridtf.nn.DPLRSSM`
    s4d  A is diagonal (https://arxiv.org/abs/2206.11893); :class:`~hybridtf.nn.DiagonalSSM`

A has n states for each channel, in n / 2 conjugate pairs. The pointwise part and the gated output are those of the published
layer, since the state-space models alone mix no channels. Training, prefill and decode are one recurrence, by the op
``state_space``: S4's kernel of a fixed length, with its truncated C, is not used, so that any cut is exact.

Axes: b batch, t time, d d_model (channels), n d_state.

Both are held to ESPnet's copy of the published layer (S4 in its form of steps), and to the papers' kernels as dense sums; S4 to
its generating function too.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, Edges, ParamSpec, RecurrentMixer, Segments, SequenceMixerConfig, State, init
from hybridtf.core.init import fan_in
from hybridtf.nn import DPLRSSM, DiagonalInit, DiagonalSSM, Discretisation, PositiveRange, PowerOfTwo, accumulation_dtype


class _StateSpaceConfig(SequenceMixerConfig):
    """Options that both share."""

    d_state: int = Field(default=64, gt=0)
    """States of a channel; even."""
    dt_range: PositiveRange = (0.001, 0.1)
    """The time steps start log-evenly in this range."""
    bias: bool = True
    """Of ``out_proj``."""
    chunk_size: PowerOfTwo = 64
    kernel: str = "auto"

    @classmethod
    def tiny(cls) -> Self:
        return cls(d_state=4, chunk_size=4)


class S4Config(_StateSpaceConfig):
    """S4: a state-space model a channel, diagonal plus low rank from HiPPO, discretised by the bilinear transform."""

    source: ClassVar[str] = "https://arxiv.org/abs/2111.00396"

    type: Literal["s4"] = "s4"

    def build(self, ctx: BuildContext) -> StateSpace:
        ssm = DPLRSSM(
            ctx.child("ssm"), self.d_state, dt_range=self.dt_range, chunk_size=self.chunk_size, kernel=self.kernel
        )
        return StateSpace(self, ctx, ssm)


class S4DConfig(_StateSpaceConfig):
    """S4D: a diagonal state-space model a channel. The defaults are those of the published minimal version."""

    source: ClassVar[str] = "https://arxiv.org/abs/2206.11893"

    type: Literal["s4d"] = "s4d"
    start: DiagonalInit = "lin"
    """Where A starts: S4D-Lin, S4D-Inv or S4D-LegS."""
    discretisation: Discretisation = "zoh"

    def build(self, ctx: BuildContext) -> StateSpace:
        ssm = DiagonalSSM(
            ctx.child("ssm"), self.d_state, start=self.start, discretisation=self.discretisation, dt_range=self.dt_range,
            chunk_size=self.chunk_size, kernel=self.kernel,
        )
        return StateSpace(self, ctx, ssm)


class StateSpace(RecurrentMixer):
    """See :class:`S4Config` and :class:`S4DConfig`. Its state: n real numbers for each channel, float32 at least."""

    def __init__(self, config: _StateSpaceConfig, ctx: BuildContext, ssm: DPLRSSM | DiagonalSSM) -> None:
        super().__init__()
        self.config, self.ssm = config, ssm
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
        y, state = self.ssm(x, segments, state)
        wide = accumulation_dtype(x.dtype)
        y = F.gelu(y + self.D.to(wide) * x.to(wide)).to(x.dtype)
        return F.glu(self.out_proj(y), dim=-1), state
