"""Lower bounds of forget gates, rising with depth: one parameter for a stack (HGRN, https://arxiv.org/abs/2311.04823).

    P = softmax(table) over its rows 0..n;  bound_i = P_1 + ... + P_i;  a = bound_i + (1 - bound_i) sigmoid(f)

The first layer that has such gates owns ``table`` (one row for it and for each layer after it, whatever their mixers) and has
the bound 0. It writes the bound of each later layer as an edge of its own, which that layer reads. A layer used alone, the
last of its stack, or the only one of its kind there has nobody to hand bounds to: it owns no table, and its bound is 0.

Axes: b batch, t time, c channels of the gate, n layers after the owner.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from hybridtf.core import BuildContext, Edges, EdgeSpec, ParamSpec, init
from hybridtf.nn.norms import accumulation_dtype


class LowerBounds(nn.Module):
    """The bound of one layer's gates, over ``ctx.d_model`` channels; ``family`` names its kind, so that two kinds of
    gates in one stack have a table each.

    The mixer that holds it has its ``reads`` and ``writes``, and returns as ``Extras`` what :meth:`forward` hands on; it
    passes :meth:`unread` and :meth:`edge_specs` on, too.
    """

    def __init__(self, ctx: BuildContext, family: str) -> None:
        super().__init__()
        end = max(ctx.n_layers, ctx.layer_idx + 1)
        names = [f"{family}_bound_{ctx.d_model}_{layer}" for layer in range(ctx.layer_idx, end)]
        owner = names[0] not in ctx.edges
        self.reads: tuple[str, ...] = () if owner else (names[0],)
        self.writes: tuple[str, ...] = tuple(names[1:]) if owner else ()
        self.width = ctx.d_model
        self.table = nn.Parameter(torch.empty(len(names), ctx.d_model, **ctx.factory)) if self.writes else None

    def param_specs(self) -> dict[str, ParamSpec]:
        return {} if self.table is None else {"table": ParamSpec("state", init.constant(0.0))}

    def unread(self, edges: frozenset[str]) -> None:
        """Let the table go where no layer reads a bound: nothing would ever train it."""
        if self.table is not None and edges >= set(self.writes):
            self.table, self.writes = None, ()

    def edge_specs(self) -> dict[str, EdgeSpec]:
        """Of each bound that is read or written: a number from 0 to 1 for every channel."""

        def draw(generator: Generator, b: int, t: int) -> Tensor:
            return torch.rand(b, t, self.width, generator=generator, dtype=torch.float64)

        return {name: EdgeSpec((self.width,), draw=draw) for name in (*self.reads, *self.writes)}

    def forward(self, x: Tensor, edges: Edges | None) -> tuple[Tensor | None, dict[str, Tensor]]:
        """For x (b t ...): the layer's own bound (b t c), None for 0, and the edges to write, each (b t c)."""
        if self.reads:
            return (edges or {})[self.reads[0]], {}
        if self.table is None:
            return None, {}
        shares = self.table.to(accumulation_dtype(self.table.dtype)).softmax(0)
        bounds = shares[1:].cumsum(0)
        # Views without memory of their own. One edge a layer: of a single wide one, each layer's gradient would be as wide.
        return None, {name: bound.expand(*x.shape[:2], -1) for name, bound in zip(self.writes, bounds, strict=True)}


def log_forget(f: Tensor, bound: Tensor | None) -> Tensor:
    """log(bound + (1 - bound) sigmoid(f)), in float32 at least; exact for any f, with finite gradients."""
    wide = f.to(accumulation_dtype(f.dtype))
    free = F.logsigmoid(wide)
    if bound is None:
        return free
    limits = torch.finfo(wide.dtype)
    # A bound that rounding has brought to 0 or 1 has no logarithm to differentiate.
    bound = bound.to(wide.dtype).clamp(limits.tiny, 1 - limits.eps)
    lost = (1 - bound) * torch.sigmoid(-wide)
    small = torch.logaddexp(bound.log(), torch.log1p(-bound) + free)
    # Near 1, where that sum has no digits left, from what is forgotten.
    return torch.where(lost < 0.5, torch.log1p(-lost.clamp(max=0.5)), small)
