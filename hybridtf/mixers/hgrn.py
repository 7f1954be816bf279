"""HGRN: a gated linear recurrence whose forget gates have lower bounds that rise with depth
(https://arxiv.org/abs/2311.04823), real-valued as flash-linear-attention has it.

    a = bound + (1 - bound) sigmoid(f_proj(x));  u = (1 - a) silu(i_proj(x));  h_t = a_t h_{t-1} + u_t
    y = out_proj(norm(h) * silu(gate_proj(x)))

The paper's state is complex, with a fixed phase for each channel; the published models and HGRN2 have the real one. The bounds
of all such layers of a stack are one table, see :class:`~hybridtf.nn.LowerBounds`; the first layer's are 0.

Axes: b batch, t time, d d_model, c channels of the recurrence.

No outside layer was run (it needs a GPU): the recurrence is held to fla's plain loop, and what is around it is spelled out in
the tests.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Edges,
    EdgeSpec,
    Extras,
    ParamSpec,
    RecurrentMixer,
    Segments,
    SequenceMixerConfig,
    State,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import GatedRMSNorm, LowerBounds, Scan, ShortConvs, idle_beside, log_forget


class HGRNConfig(SequenceMixerConfig):
    """HGRN: an elementwise recurrence whose forget gates have lower bounds that rise with depth. The defaults are those of
    flash-linear-attention."""

    source: ClassVar[str] = "https://arxiv.org/abs/2311.04823"

    type: Literal["hgrn"] = "hgrn"
    expand: float = Field(default=1.0, gt=0)
    """Channels of the recurrence for each of d_model."""
    lower_bound: bool = True
    """Forget gates have lower bounds. False: none, in this layer."""
    d_conv: int = Field(default=0, ge=0, examples=[4])
    """Taps of short convolutions on f and i, without an activation; 0: none."""
    eps: float = Field(default=1e-5, gt=0)
    kernel: str = "auto"
    conv_kernel: str = "auto"

    _without_convolution = idle_beside({"d_conv": 0}, "conv_kernel")

    @classmethod
    def tiny(cls) -> Self:
        return cls(expand=1.5)

    def build(self, ctx: BuildContext) -> HGRN:
        return HGRN(self, ctx)


class HGRN(RecurrentMixer):
    """See :class:`HGRNConfig`. Its state: h (b c), float32 at least, and the convolutions' windows."""

    def __init__(self, config: HGRNConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, width = config, round(config.expand * ctx.d_model)
        if width < 1:
            raise ctx.error(f"expand * d_model = {config.expand * ctx.d_model} leaves no channels")
        self.i_proj, self.f_proj, self.gate_proj = (nn.Linear(ctx.d_model, width, bias=False, **ctx.factory) for _ in range(3))
        inner = ctx.child("inner", d_model=width)
        self.conv = None
        if config.d_conv:
            widths = {"i": width, "f": width}
            self.conv = ShortConvs(inner, widths, config.d_conv, activation=None, kernel=config.conv_kernel)
        self.bounds = LowerBounds(inner, "hgrn") if config.lower_bound else None
        if self.bounds is not None:
            self.reads, self.writes = self.bounds.reads, self.bounds.writes
        self.scan = Scan(ctx, (width,), config.kernel)
        self.norm = GatedRMSNorm(inner, n_groups=1, eps=config.eps, norm_first=True)
        self.out_proj = nn.Linear(width, ctx.d_model, bias=False, **ctx.factory)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}

    def edge_specs(self) -> dict[str, EdgeSpec]:
        return {} if self.bounds is None else self.bounds.edge_specs()

    def unread(self, edges: frozenset[str]) -> None:
        if self.bounds is not None:
            self.bounds.unread(edges)
            self.writes = self.bounds.writes

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        rnn = self.scan.init_state(batch_size)
        return {"rnn": rnn} if self.conv is None else {"conv": self.conv.init_state(batch_size), "rnn": rnn}

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Any, ...]:
        given = {"i": self.i_proj(x), "f": self.f_proj(x)}
        after: dict[str, State] = {}
        if self.conv is not None:
            given, after["conv"] = self.conv(given, segments, None if state is None else state["conv"])
        bound, written = (None, {}) if self.bounds is None else self.bounds(x, edges)
        log_a = log_forget(given["f"], bound)
        u = F.silu(given["i"].to(log_a.dtype)) * -torch.expm1(log_a)
        h, after["rnn"] = self.scan(u, segments, None if state is None else state["rnn"], log_a=log_a)
        y = self.out_proj(self.norm(h, self.gate_proj(x)))
        out = (y, None if state is None else after)
        return (*out, Extras(written)) if self.extra_results() else out
