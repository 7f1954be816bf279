"""Mixers without a state: one with edges and a loss, one split over a mesh.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Context,
    Edges,
    EdgeSpec,
    Extras,
    Segments,
    SequenceMixer,
    SequenceMixerConfig,
    State,
)

NO_EDGES: Edges = MappingProxyType({})


class EdgesConfig(SequenceMixerConfig):
    """Gates its input by the embedding, hands the gate on, and is fined for its size."""

    type: Literal["double_edges"] = "double_edges"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> EdgesMixer:
        return EdgesMixer(ctx)


class EdgesMixer(SequenceMixer):
    """See :class:`EdgesConfig`."""

    causal_only = False
    reads = ("embedding",)
    writes = ("double_gate",)
    losses = ("double_power",)

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(ctx.d_model, ctx.d_model, **ctx.factory)

    def edge_specs(self) -> dict[str, EdgeSpec]:
        return {"double_gate": EdgeSpec((self.gate_proj.out_features,))}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return ()

    def forward(
        self, x: Tensor, *, edges: Edges = NO_EDGES, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> tuple[Tensor, State | None, Extras]:
        gate = self.gate_proj(edges["embedding"]).sigmoid()
        power = gate.square().mean(-1)
        if segments is None:
            loss = (power.sum(), torch.tensor(power.numel(), device=x.device))
        else:
            loss = (torch.where(segments.real, power, torch.zeros_like(power)).sum(), segments.real.sum())
        return x * gate, state, Extras({"double_gate": gate}, {"double_power": loss})


class MeshConfig(SequenceMixerConfig):
    """A projection whose channels are split over the ranks of ``ctx.mesh``."""

    type: Literal["double_mesh"] = "double_mesh"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> MeshMixer:
        return MeshMixer(ctx)


class MeshMixer(SequenceMixer):
    """See :class:`MeshConfig`. Each rank holds ``d_model / ranks`` channels and the results are summed."""

    causal_only = False

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        ranks = 1 if ctx.mesh is None else ctx.mesh.size()
        if ctx.d_model % ranks:
            raise ctx.error(f"d_model {ctx.d_model} must be divisible by the {ranks} ranks of the mesh")
        self.group = None if ctx.mesh is None else ctx.mesh.get_group()
        self.in_proj = nn.Linear(ctx.d_model, ctx.d_model // ranks, bias=False, **ctx.factory)
        self.out_proj = nn.Linear(ctx.d_model // ranks, ctx.d_model, bias=False, **ctx.factory)

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return ()

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        y = self.out_proj(self.in_proj(x).tanh())
        if self.group is not None:
            dist.all_reduce(y, group=self.group)
        return y, state
