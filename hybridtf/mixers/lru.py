"""The Linear Recurrent Unit (https://arxiv.org/abs/2303.06349): a diagonal complex recurrence that all channels share.

    lambda = exp(-exp(nu_log) + i exp(theta_log));  gamma = exp(gamma_log)
    h_t = lambda h_{t-1} + gamma (B x_t);   y_t = Re(C h_t) + D x_t

|lambda| starts evenly over a ring, its phase evenly in [0, max_phase], and gamma at sqrt(1 - |lambda|^2). Stable whatever is
learned, since |lambda| < 1. Normalisation, gelu and gated linear unit around it belong to the block.

Axes: b batch, t time, d d_model, n d_state (complex).

Held to the layer of lru-pytorch with a diagonal D, and to the paper's system, simulated with whole matrices.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Generator, Tensor, nn

from hybridtf.core import BuildContext, Edges, ParamSpec, RecurrentMixer, Segments, SequenceMixerConfig, State, init
from hybridtf.nn import ComplexScan, accumulation_dtype


class LRUConfig(SequenceMixerConfig):
    """The Linear Recurrent Unit: a stable complex diagonal recurrence. The ring's defaults are the paper's whole disc."""

    source: ClassVar[str] = "https://arxiv.org/abs/2303.06349"

    type: Literal["lru"] = "lru"
    d_state: int | None = Field(default=None, gt=0)
    """Complex states. None: d_model."""
    r_range: tuple[float, float] = (0.0, 1.0)
    """|lambda| starts in this ring."""
    max_phase: float = Field(default=2 * math.pi, gt=0)
    """The phase starts below this."""
    kernel: str = "auto"

    @model_validator(mode="after")
    def _ring(self) -> Self:
        low, high = self.r_range
        if not 0 <= low < high <= 1:
            raise ValueError(f"r_range = {list(self.r_range)} must be two rising numbers from 0 to 1")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(d_state=5, r_range=(0.3, 0.9))

    def build(self, ctx: BuildContext) -> LRU:
        return LRU(self, ctx)


class LRU(RecurrentMixer):
    """See :class:`LRUConfig`. Its state: re and im (b n), float32 at least."""

    def __init__(self, config: LRUConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, n = config, config.d_state or ctx.d_model
        self.polar = nn.Parameter(torch.empty(3, n, **ctx.factory))
        """Rows: nu_log, theta_log and gamma_log, of one parameter since gamma starts from nu's draw."""
        self.B_re, self.B_im = (nn.Parameter(torch.empty(n, ctx.d_model, **ctx.factory)) for _ in range(2))
        self.C_re, self.C_im = (nn.Parameter(torch.empty(ctx.d_model, n, **ctx.factory)) for _ in range(2))
        self.D = nn.Parameter(torch.empty(ctx.d_model, **ctx.factory))
        self.scan = ComplexScan(ctx, (n,), config.kernel)

    def param_specs(self) -> dict[str, ParamSpec]:
        n, d = self.B_re.shape
        b, c = ParamSpec("matrix", init.normal((2 * d) ** -0.5)), ParamSpec("matrix", init.normal(n**-0.5), residual=True)
        return {
            "polar": ParamSpec("state", _on_ring(self.config.r_range, self.config.max_phase)),
            "B_re": b, "B_im": b, "C_re": c, "C_im": c, "D": ParamSpec("state", init.normal(1.0), residual=True),
        }

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return self.scan.init_state(batch_size)

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        wide = accumulation_dtype(x.dtype)
        nu_log, theta_log, gamma_log = self.polar.to(wide)
        inputs, gamma = x.to(wide), gamma_log.exp()
        u = F.linear(inputs, self.B_re.to(wide)) * gamma, F.linear(inputs, self.B_im.to(wide)) * gamma
        h, state = self.scan(u, segments, state, log_a=(-nu_log.exp(), theta_log.exp()))
        y = F.linear(h[0], self.C_re.to(wide)) - F.linear(h[1], self.C_im.to(wide)) + self.D.to(wide) * inputs
        return y.to(x.dtype), state


def _on_ring(r_range: tuple[float, float], max_phase: float) -> init.Init:
    """|lambda|^2 even over the ring's squares, so that lambda is even over its area; the phase even; gamma from |lambda|."""
    low, high = r_range

    def fill(tensor: Tensor, generator: Generator) -> None:
        even = torch.empty_like(tensor[:2]).uniform_(generator=generator)
        # Not the edges themselves: a magnitude of 0 or 1 has no logarithm here.
        squared = (low**2 + even[0] * (high**2 - low**2)).clamp(1e-12, 1 - 1e-6)
        tensor[0] = (-squared.log() / 2).log()
        tensor[1] = (max_phase * even[1].clamp(min=1e-6)).log()
        tensor[2] = (1 - squared).log() / 2

    return fill
