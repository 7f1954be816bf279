"""Alternating updates (https://arxiv.org/abs/2301.13310): one of several streams goes through a layer, the others follow.

    m(x) = tanh(R norm(x) / d)                            (s) numbers of the active stream a
    p_k = x_k + sum_j P(m(x_a))[k, j] x_j                 what each stream is predicted to be
    x'_k = p_k + (1 + C(m(y))_k) (y - p_a),  y = layer(p_a)

P (s*s, s) and C (s, s) start at 0: the active stream is then the residual stream of the layer alone. The numbers are made in
float32 at least.

Axes: b batch, t time, s or j, k streams, d d_model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtf.core import BuildContext, NormConfig, ParamSpec, init
from hybridtf.nn.norms import accumulation_dtype
from hybridtf.ops.autocast import no_autocast


class AlternatingUpdates(nn.Module):
    """:meth:`predict` and :meth:`correct` around one layer."""

    def __init__(self, ctx: BuildContext, n_streams: int, active: int, norm: NormConfig) -> None:
        super().__init__()
        self.active, self.n_streams, self.d_model = active, n_streams, ctx.d_model
        self.norm = norm.build(ctx.child("norm"))
        self.router = nn.Parameter(torch.empty(n_streams, ctx.d_model, **ctx.factory))
        self.prediction = nn.Parameter(torch.empty(n_streams * n_streams, n_streams, **ctx.factory))
        self.correction = nn.Parameter(torch.empty(n_streams, n_streams, **ctx.factory))

    def param_specs(self) -> dict[str, ParamSpec]:
        zero = {name: ParamSpec("matrix", init.constant(0.0)) for name in ("prediction", "correction")}
        return {"router": ParamSpec("matrix", init.normal(self.d_model**0.5)), **zero}

    def _numbers(self, x: Tensor) -> Tensor:
        """(b t d) to (b t s)."""
        normed: Tensor = self.norm(x)
        return F.linear(normed / self.d_model, self.router.to(x.dtype)).tanh()

    def predict(self, x: Tensor) -> Tensor:
        """Streams (b t s d) to (b t s d)."""
        with no_autocast(x.device):
            wide = x.to(accumulation_dtype(x.dtype))
            mix = F.linear(self._numbers(wide[..., self.active, :]), self.prediction.to(wide.dtype))
            table: Tensor = mix.unflatten(-1, (self.n_streams, -1))
            return (wide + table @ wide).to(x.dtype)

    def correct(self, p: Tensor, y: Tensor) -> Tensor:
        """Predicted streams (b t s d) and what the layer made of the active one (b t d), to (b t s d)."""
        with no_autocast(p.device):
            wide, made = p.to(accumulation_dtype(p.dtype)), y.to(accumulation_dtype(p.dtype))
            take = 1.0 + F.linear(self._numbers(made), self.correction.to(wide.dtype))
            news = made - wide[..., self.active, :]
            return (wide + take[..., None] * news[..., None, :]).to(p.dtype)
