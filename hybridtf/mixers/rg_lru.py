"""The gated linear recurrences of Griffin (https://arxiv.org/abs/2402.19427).

    rg_lru:             y = out_proj(rg_lru(in_proj(x)))
    griffin_recurrent:  y = out_proj(gelu(gate_proj(x)) * rg_lru(conv(in_proj(x))))

The second is the temporal block of RecurrentGemma (its ``linear_y``, ``linear_x`` and ``linear_out`` are ``gate_proj``,
``in_proj`` and ``out_proj``). The first is the recurrence alone between two projections: what is left of the block without
its convolution and its gate. :class:`~hybridtf.nn.RGLRU` has the equations.

Axes: b batch, t time, d d_model, c d_inner.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Context,
    ParamSpec,
    Segments,
    SequenceMixer,
    SequenceMixerConfig,
    State,
    check_call,
    with_history,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import RGLRU, Activation, ShortConv, activation


class _RecurrenceConfig(SequenceMixerConfig):
    """Options of the recurrence that both mixers share."""

    n_heads: int = Field(gt=0)
    """Diagonal blocks of the two gates' matrices; must divide ``d_inner``."""
    d_inner: int | None = Field(default=None, gt=0)
    """Channels of the recurrence. None: d_model."""
    a_range: tuple[float, float] = (0.9, 0.999)
    """exp(-softplus(Lambda)) starts in this range; at gate r the decay is the (decay_power r)-th power of it."""
    decay_power: float = Field(default=8.0, gt=0)
    """The constant c of the paper."""
    kernel: str = "auto"

    @model_validator(mode="after")
    def _rising(self) -> Self:
        low, high = self.a_range
        if not 0 < low <= high < 1:
            raise ValueError(f"a_range = {list(self.a_range)} must be two rising numbers between 0 and 1")
        return self

    def recurrence(self, ctx: BuildContext, width: int) -> RGLRU:
        """The recurrence over ``width`` channels."""
        return RGLRU(
            ctx.child("rg_lru", d_model=width), self.n_heads, a_range=self.a_range, decay_power=self.decay_power,
            kernel=self.kernel,
        )


class RGLRUConfig(_RecurrenceConfig):
    """RG-LRU: Griffin's gated diagonal recurrence, between an input and an output projection."""

    type: Literal["rg_lru"] = "rg_lru"
    source: ClassVar[str] = "https://arxiv.org/abs/2402.19427"
    bias: bool = False
    """Of both projections."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, d_inner=8)

    def build(self, ctx: BuildContext) -> RGLRUMixer:
        return RGLRUMixer(self, ctx)


class GriffinRecurrentConfig(_RecurrenceConfig):
    """Griffin's recurrent block: the RG-LRU behind a short convolution, gated. Its defaults are RecurrentGemma's."""

    type: Literal["griffin_recurrent"] = "griffin_recurrent"
    source: ClassVar[str] = "https://arxiv.org/abs/2402.19427"
    d_conv: int = Field(default=4, gt=0)
    conv_bias: bool = True
    bias: bool = True
    """Of the three projections."""
    activation: Activation = "gelu_tanh"
    """Of the gate branch."""
    conv_kernel: str = "auto"

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, d_inner=8)

    def build(self, ctx: BuildContext) -> GriffinRecurrent:
        return GriffinRecurrent(self, ctx)


class RGLRUMixer(SequenceMixer):
    """See :class:`RGLRUConfig`. Its state: h (b c), float32 at least."""

    def __init__(self, config: RGLRUConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        width = config.d_inner or ctx.d_model
        self.in_proj = nn.Linear(ctx.d_model, width, bias=config.bias, **ctx.factory)
        self.rg_lru = config.recurrence(ctx, width)
        self.out_proj = nn.Linear(width, ctx.d_model, bias=config.bias, **ctx.factory)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return self.rg_lru.init_state(batch_size)

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        check_call(self, x, segments, state)
        h, state = self.rg_lru(self.in_proj(x), segments, state, keep)
        return self.out_proj(h), state


class GriffinRecurrent(SequenceMixer):
    """See :class:`GriffinRecurrentConfig`. Its state: the convolution's window, and h (b c) in float32 at least."""

    def __init__(self, config: GriffinRecurrentConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, self.activation = config, activation(config.activation)
        width = config.d_inner or ctx.d_model
        self.gate_proj = nn.Linear(ctx.d_model, width, bias=config.bias, **ctx.factory)
        self.in_proj = nn.Linear(ctx.d_model, width, bias=config.bias, **ctx.factory)
        self.conv = ShortConv(
            ctx.child("conv", d_model=width), config.d_conv, bias=config.conv_bias, activation=None, kernel=config.conv_kernel
        )
        self.rg_lru = config.recurrence(ctx, width)
        self.out_proj = nn.Linear(width, ctx.d_model, bias=config.bias, **ctx.factory)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return {"conv": self.conv.init_state(batch_size), "rnn": self.rg_lru.init_state(batch_size)}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        check_call(self, x, segments, state)
        gate, inner = self.activation(self.gate_proj(x)), self.in_proj(x)
        window, held = (None, None) if state is None else (state["conv"], state["rnn"])
        # Only the convolution walks through the last tokens to remember them; the recurrence gives all its states.
        inner, conv = with_history(self.conv, inner, segments, window, keep, self.conv.init_state)
        h, rnn = self.rg_lru(inner, segments, held, keep)
        return self.out_proj(gate * h), None if state is None else {"conv": conv, "rnn": rnn}
