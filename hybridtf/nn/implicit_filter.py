"""Hyena's filter: a small network from the place of a tap to its value (https://arxiv.org/abs/2302.10866, section 3.3).

    z_k = (k / (L - 1), cos(2 pi f k / L), -sin(2 pi f k / L)) for bands f;  w_k = MLP(z_k) (exp(-|delta| k / (L - 1)) + shift)

L is the model's ``max_seq_len``: places are counted from the start of the filter and divided by a length that no call changes.
The network's activation is sin(freq v) with a learned freq that its layers share.

Axes: w taps, e embedding, o hidden width, c channels of the filter.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtf.core import BuildContext, ParamSpec, init
from hybridtf.nn.norms import accumulation_dtype
from hybridtf.ops.autocast import no_autocast


class ImplicitFilter(nn.Module):
    """Taps for ``ctx.d_model`` channels, at most ``ctx.max_seq_len`` of them."""

    def __init__(
        self, ctx: BuildContext, *, width: int, n_inner: int, d_embed: int, frequency: float, decay: tuple[float, float],
        target: float, shift: float,
    ) -> None:
        super().__init__()
        if d_embed < 3 or not d_embed % 2:
            raise ctx.error(f"the embedding of a place has an odd width of at least 3 (one, cosines, sines); got {d_embed}")
        self.max_len, self.channels, self.d_embed = ctx.max_seq_len, ctx.d_model, d_embed
        self.frequency, self.decay, self.target, self.shift = frequency, decay, target, shift
        sizes = [d_embed, *[width] * (n_inner + 1)]
        # Not nn.Linear: whatever the model's dtype, taps side by side differ by less than bfloat16 can tell.
        pairs = itertools.pairwise(sizes)
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(after, before, **ctx.factory)) for before, after in pairs)
        self.biases = nn.ParameterList(nn.Parameter(torch.empty(size, **ctx.factory)) for size in sizes[1:])
        self.freq = nn.Parameter(torch.empty(width, **ctx.factory))
        self.last = nn.Parameter(torch.empty(ctx.d_model, width, **ctx.factory))

    def param_specs(self) -> dict[str, ParamSpec]:
        specs = {"freq": ParamSpec("state", init.constant(self.frequency)), "last": ParamSpec("matrix", init.fan_in(self.last))}
        for i, weight in enumerate(self.weights):
            bound = weight.shape[1] ** -0.5
            specs[f"weights.{i}"] = ParamSpec("matrix", init.uniform(-bound, bound))
            specs[f"biases.{i}"] = ParamSpec("bias", init.uniform(-bound, bound))
        return specs

    def forward(self, n_taps: int) -> Tensor:
        """The first ``n_taps`` taps (c w), float32 at least."""
        with no_autocast(self.freq.device):
            dtype = accumulation_dtype(self.freq.dtype)
            places = torch.arange(n_taps, device=self.freq.device, dtype=dtype)
            share = places / max(self.max_len - 1, 1)
            h = self._embedded(places, share)
            for weight, bias in zip(self.weights, self.biases, strict=True):
                h = torch.sin(self.freq.to(dtype) * F.linear(h, weight.to(dtype), bias.to(dtype)))
            taps = F.linear(h, self.last.to(dtype))
            slow, fast = (abs(math.log(self.target)) / part for part in self.decay)
            rates = torch.linspace(slow, fast, self.channels, device=taps.device, dtype=dtype)
            return (taps * (torch.exp(-share[:, None] * rates) + self.shift)).T

    def _embedded(self, places: Tensor, share: Tensor) -> Tensor:
        n_bands = (self.d_embed - 1) // 2
        bands = torch.linspace(1e-4, max(n_bands - 1, 1e-4), n_bands, device=places.device, dtype=places.dtype)
        angle = 2 * math.pi * places[:, None] / self.max_len * bands
        return torch.cat([share[:, None], angle.cos(), -angle.sin()], 1)
