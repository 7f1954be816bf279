"""``edge_gate``: a gate made from the token on what an edge brings (Gemma 3n and 4: embeddings of a token for each layer).

    y = out_proj(act(gate_proj(x)) * e)

Axes: b batch, t time, d d_model, e width of the edge.

Held to transformers' Gemma 4 (tests/interop/test_oracles.py).
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    ChannelMixer,
    ChannelMixerConfig,
    Edges,
    EdgeSpec,
    ParamSpec,
    Segments,
    State,
    check_call,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import Activation, activation

LAYER_INPUT = "layer_input"
"""The edge ``layer_input_I`` is what a stem with ``layer_inputs`` gives to layer I."""


class EdgeGateConfig(ChannelMixerConfig):
    """y = out_proj(act(gate_proj(x)) * e), with e an edge."""

    type: Literal["edge_gate"] = "edge_gate"
    edge: str = Field(default=LAYER_INPUT, pattern=r"^[a-z][a-z0-9_]*$", examples=["embedding"])
    """What the stem or an earlier layer wrote; ``layer_input``: what the stem's ``layer_inputs`` gives to this layer."""
    d_edge: int | None = Field(default=None, gt=0)
    """Width of the edge. None: d_model."""
    activation: Activation = "silu"

    @classmethod
    def tiny(cls) -> Self:
        return cls(edge="embedding")

    def build(self, ctx: BuildContext) -> EdgeGate:
        return EdgeGate(self, ctx)


class EdgeGate(ChannelMixer):
    """See :class:`EdgeGateConfig`."""

    def __init__(self, config: EdgeGateConfig, ctx: BuildContext) -> None:
        super().__init__()
        if config.edge == LAYER_INPUT and ctx.n_visits > 1:
            raise ctx.error(
                f"edge = {LAYER_INPUT!r} is what the stem gives to one layer, and {ctx.n_visits} visit this shared block, "
                "which would all read the first one's: take shared = true out, or name one edge for all"
            )
        self.config, self.act = config, activation(config.activation)
        self.edge = f"{LAYER_INPUT}_{ctx.layer_idx}" if config.edge == LAYER_INPUT else config.edge
        self.reads = (self.edge,)
        self.width = config.d_edge or ctx.d_model
        self.gate_proj = nn.Linear(ctx.d_model, self.width, bias=False, **ctx.factory)
        self.out_proj = nn.Linear(self.width, ctx.d_model, bias=False, **ctx.factory)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}

    def edge_specs(self) -> dict[str, EdgeSpec]:
        return {self.edge: EdgeSpec((self.width,))}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, keep: int = 0,
        edges: Edges | None = None,
    ) -> tuple[Tensor, State | None]:
        """x (b t d) and the edge (b t e) to (b t d)."""
        check_call(self, x, segments, state)
        e = (edges or {})[self.edge]
        return self.out_proj(self.act(self.gate_proj(x)) * e.to(x.dtype)), state
