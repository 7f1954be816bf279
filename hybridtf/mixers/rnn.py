"""Classic recurrent layers: ``rnn``, ``lstm`` and ``gru``, each one layer in one direction of ``torch.nn``'s class.

    h_t = cell(in_proj(x_t), weight_hh h_{t-1} + bias_hh);  y_t = h_t, or out_proj(h_t)

Sources: Elman's network (https://doi.org/10.1207/s15516709cog1402_1); LSTM with a forget gate
(https://doi.org/10.1162/089976600300015015); GRU (https://arxiv.org/abs/1406.1078).

Axes: b batch, t time, d d_model, h d_hidden.

The tests hold whole layers to those of ``torch.nn``, gradients too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Generator, Tensor, nn

from hybridtf.core import (
    BuildContext,
    Edges,
    Fixed,
    Law,
    ParamSpec,
    RecurrentMixer,
    Segments,
    SequenceMixerConfig,
    State,
    init,
    raw_weight,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import accumulation_dtype
from hybridtf.ops.rnn import GATES, STATES, Cell


class RecurrentConfig(SequenceMixerConfig):
    """Options of all three cells."""

    d_hidden: int | None = Field(default=None, gt=0)
    """Width of the state. None: d_model."""
    bias: bool = True
    """Of ``in_proj`` and of the recurrent product, as in ``torch.nn``."""
    out_proj: bool = False
    """A projection from d_hidden to d_model, without bias. Where the two differ there is one in any case."""
    kernel: str = "auto"

    cell: ClassVar[Cell]

    @classmethod
    def tiny(cls) -> Self:
        return cls(d_hidden=5)

    @property
    def used_cell(self) -> Cell:
        """The op's name of the recurrence."""
        return self.cell

    @property
    def used_forget_bias(self) -> float:
        """What the forget gate's bias starts at."""
        return 0.0


class RNNConfig(RecurrentConfig):
    """A plain recurrent layer: h_t = tanh(W x_t + U h_{t-1} + b), or relu."""

    type: Literal["rnn"] = "rnn"
    source: ClassVar[str] = "https://doi.org/10.1207/s15516709cog1402_1"
    nonlinearity: Literal["tanh", "relu"] = "tanh"

    @property
    def used_cell(self) -> Cell:
        return self.nonlinearity

    def build(self, ctx: BuildContext) -> Recurrent:
        return Recurrent(self, ctx)


class LSTMConfig(RecurrentConfig):
    """Long short-term memory with a forget gate (https://doi.org/10.1162/089976600300015015), no peepholes."""

    type: Literal["lstm"] = "lstm"
    source: ClassVar[str] = "https://doi.org/10.1162/089976600300015015"
    forget_bias: float | None = None
    """What the forget gate's bias starts at. None: 1, so that the memory starts open, where there are biases."""

    cell: ClassVar[Cell] = "lstm"

    @model_validator(mode="after")
    def _bias_to_start(self) -> Self:
        if self.forget_bias is not None and not self.bias:
            raise ValueError("forget_bias is the start of a bias, and bias is false")
        return self

    @property
    def used_forget_bias(self) -> float:
        return 1.0 if self.forget_bias is None else self.forget_bias

    def build(self, ctx: BuildContext) -> Recurrent:
        return Recurrent(self, ctx)


class GRUConfig(RecurrentConfig):
    """Gated recurrent unit (https://arxiv.org/abs/1406.1078), the reset gate after the product, as ``torch.nn.GRU``."""

    type: Literal["gru"] = "gru"
    source: ClassVar[str] = "https://arxiv.org/abs/1406.1078"

    cell: ClassVar[Cell] = "gru"

    def build(self, ctx: BuildContext) -> Recurrent:
        return Recurrent(self, ctx)


class Recurrent(RecurrentMixer):
    """The mixer of all three configs. Its state is h (b h), and c (b h) for ``lstm``.

    ``in_proj.weight``, ``in_proj.bias``, ``weight_hh`` and ``bias_hh`` are ``weight_ih_l0``, ``bias_ih_l0``,
    ``weight_hh_l0`` and ``bias_hh_l0`` of ``torch.nn.RNN``, ``LSTM`` and ``GRU``. The recurrent matrix is multiplied
    within the loop over time and not called, so it is a parameter and no ``nn.Linear``: adapters reach ``in_proj``.
    """

    cannot: Mapping[Law, str] = {"context_parallel": "a nonlinear step has no summary: each token needs the state before it"}

    def __init__(self, config: RecurrentConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, self.cell = config, config.used_cell
        self.d_hidden = config.d_hidden or ctx.d_model
        gates = GATES[self.cell]
        rows = len(gates) * self.d_hidden
        self.splits = {name: dict.fromkeys(gates, self.d_hidden) for name in ("in_proj", "weight_hh")}
        self.in_proj = nn.Linear(ctx.d_model, rows, bias=config.bias, **ctx.factory)
        self.weight_hh = nn.Parameter(torch.empty(rows, self.d_hidden, **ctx.factory))
        self.bias_hh = nn.Parameter(torch.empty(rows, **ctx.factory)) if config.bias else None
        projected = config.out_proj or self.d_hidden != ctx.d_model
        self.out_proj = nn.Linear(self.d_hidden, ctx.d_model, bias=False, **ctx.factory) if projected else None
        sizes = {"d_model": ctx.d_model, "d_hidden": self.d_hidden}
        self.rnn = ctx.bind_kernel("rnn", config.kernel, sizes=sizes, features={self.cell})

    def param_specs(self) -> dict[str, ParamSpec]:
        specs = {"weight_hh": ParamSpec("matrix", init.orthogonal(len(GATES[self.cell])))}
        if self.bias_hh is not None:
            specs["in_proj.bias"] = ParamSpec("bias", self._start_bias, drawn=False)
            specs["bias_hh"] = ParamSpec("bias", init.constant(0.0))
        if self.out_proj is not None:
            specs["out_proj.weight"] = ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)
        return specs

    def _start_bias(self, bias: Tensor, generator: Generator) -> None:
        bias.zero_()
        if self.cell == "lstm":
            bias[self.d_hidden : 2 * self.d_hidden] = self.config.used_forget_bias

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        shapes = dict.fromkeys(STATES[self.cell], (self.d_hidden,))
        return Fixed.empty(batch_size, shapes, dtype=accumulation_dtype(self.rnn.dtype), device=self.rnn.device)

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        weight = raw_weight(self.in_proj)
        # torch's loops multiply with a weight; what is more than a weight is called, and costs a product more there.
        given = x if weight is not None else self.in_proj(x)
        y, last = self.rnn(
            given, self.weight_hh, cell=self.cell, weight_ih=weight, bias_ih=None if weight is None else self.in_proj.bias,
            bias_hh=self.bias_hh, initial_state=None if state is None else state.data, segments=segments,
            n_tokens=x.shape[1],
        )
        y = y.to(x.dtype)
        out = y if self.out_proj is None else self.out_proj(y)
        return out, None if state is None else state.advance(last, segments, x.shape[1])
