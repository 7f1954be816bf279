"""``convolved``: a channel mixer whose output goes through a short convolution with a residual (Inkling, Inkling 2).

    y_t = s (z_t + sum_j w_j z_{t-j}),   z = channel_mixer(x);   s = 1, or 1 / sqrt(n + 1) with n taps (``scaled``)

With ``learned_scale``, z is multiplied by a learned number first (Inkling).

Held to transformers' layers of Inkling 2 (tests/blocks/test_inkling2_loop.py).
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    ChannelMixer,
    ChannelMixerConfig,
    Component,
    ParamSpec,
    Segments,
    State,
    active,
    check_call,
    init,
)
from hybridtf.nn import ResidualConv


class ConvolvedConfig(ChannelMixerConfig):
    """A channel mixer, then a causal convolution of each channel that is added to what it gave."""

    type: Literal["convolved"] = "convolved"

    channel_mixer: Component[ChannelMixerConfig]
    d_conv: int = Field(default=4, gt=1)
    """Taps."""
    scaled: bool = False
    """Divides by the root of the number of terms (Inkling 2)."""
    learned_scale: bool = False
    """Multiplies by a learned number, 1 at the start, what goes into the convolution (Inkling)."""

    @classmethod
    def tiny(cls) -> Self:
        mixer: Any = active()["channel_mixers"].get("glu").tiny()
        return cls(channel_mixer=mixer, d_conv=3)

    def build(self, ctx: BuildContext) -> Convolved:
        return Convolved(self, ctx)


class Convolved(ChannelMixer):
    """See :class:`ConvolvedConfig`. Its state is a dict: the channel mixer's, and the convolution's window."""

    def __init__(self, config: ConvolvedConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.channel_mixer = part = config.channel_mixer.build(ctx.child("channel_mixer"))
        self.scale = nn.Parameter(torch.empty(1, **ctx.factory)) if config.learned_scale else None
        self.out_conv = ResidualConv(ctx.child("out_conv"), config.d_conv, scaled=config.scaled)
        self.cannot, self.losses_cannot, self.reads, self.writes = part.cannot, part.losses_cannot, part.reads, part.writes
        self.losses, self.takes, self.uses_max_len = part.losses, part.takes, part.uses_max_len

    def param_specs(self) -> dict[str, ParamSpec]:
        return {} if self.scale is None else {"scale": ParamSpec("norm", init.constant(1.0))}

    def unread(self, edges: frozenset[str]) -> None:
        self.channel_mixer.unread(edges)
        self.writes = self.channel_mixer.writes

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        inner = self.channel_mixer.init_state(batch_size, max_len)
        return {"channel_mixer": inner, "out_conv": self.out_conv.init_state(batch_size)}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, keep: int = 0, **edges: Any
    ) -> tuple[Any, ...]:
        """x (b t d) to y (b t d), the state after it, and what else the channel mixer returns."""
        check_call(self, x, segments, state)
        inner, window = (None, None) if state is None else (state["channel_mixer"], state["out_conv"])
        z, inner, *extras = self.channel_mixer(x, segments=segments, state=inner, keep=keep, **edges)
        z = z if self.scale is None else z * self.scale.to(z.dtype)
        y, window = self.out_conv.remembered(z, segments, window, keep)
        return (y, None if state is None else {"channel_mixer": inner, "out_conv": window}, *extras)
