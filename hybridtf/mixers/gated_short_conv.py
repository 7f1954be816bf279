"""The double-gated short convolution of LFM2 (its ``Lfm2ShortConv``).

    B, C, v = in_proj(x);  y = out_proj(C * conv(B * v))

``conv`` is causal and depthwise, without an activation: both gates are products, and nothing else is nonlinear.

Axes: b batch, t time, d d_model.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, Edges, ParamSpec, RecurrentMixer, Segments, SequenceMixerConfig, State
from hybridtf.core.init import fan_in
from hybridtf.nn import ShortConv


class GatedShortConvConfig(SequenceMixerConfig):
    """LFM2's short convolution between two products with gates. The defaults are its published ones."""

    source: ClassVar[str] = "https://arxiv.org/abs/2511.23404"

    type: Literal["gated_short_conv"] = "gated_short_conv"
    d_conv: int = Field(default=3, gt=0)
    """Taps (``conv_L_cache`` there)."""
    bias: bool = False
    """Of the convolution and of both projections (``conv_bias`` there)."""
    conv_kernel: str = "auto"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> GatedShortConv:
        return GatedShortConv(self, ctx)


class GatedShortConv(RecurrentMixer):
    """See :class:`GatedShortConvConfig`. Its state: the last ``d_conv - 1`` products B * v."""

    def __init__(self, config: GatedShortConvConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.splits = {"in_proj": {"b": ctx.d_model, "c": ctx.d_model, "v": ctx.d_model}}
        self.in_proj = nn.Linear(ctx.d_model, 3 * ctx.d_model, bias=config.bias, **ctx.factory)
        self.conv = ShortConv(
            ctx.child("conv"), config.d_conv, bias=config.bias, activation=None, kernel=config.conv_kernel
        )
        self.out_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=config.bias, **ctx.factory)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return self.conv.init_state(batch_size)

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        b, c, v = self.in_proj(x).chunk(3, dim=-1)
        y, state = self.conv(b * v, segments, state)
        return self.out_proj(c * y), state
