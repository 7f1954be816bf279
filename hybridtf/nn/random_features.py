"""Positive orthogonal random features of the softmax kernel, FAVOR+ (https://arxiv.org/abs/2009.14794).

    phi_i(x) = exp(w_i.x - |x|^2 / 2) / sqrt(n);   E[phi(q).phi(k)] = exp(q.k)

Axes: b batch, t time, h heads, k head_dim, n features.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from hybridtf.core import BuildContext, ParamSpec, Segments
from hybridtf.core.init import Init
from hybridtf.nn.norms import accumulation_dtype
from hybridtf.ops.autocast import no_autocast

NO_BOUND = -(2.0**23)
"""Below every exponent: the stabiliser of a document that has no key yet. Whole numbers up to its size are exact in float32."""


def orthogonal_rows(regularised: bool) -> Init:
    """Rows that are orthogonal within each block of as many as they are wide, of the lengths of normal vectors; all of the
    square root of their width where ``regularised``."""

    def fill(tensor: Tensor, generator: Generator) -> None:
        width = tensor.shape[1]
        for block in tensor.split(width):
            columns, triangle = torch.linalg.qr(torch.randn(width, width, generator=generator))
            # The algorithm's signs are not even-handed: without this the estimate of the kernel is biased.
            columns = columns * triangle.diagonal().sign()
            block.copy_(columns.T[: len(block)])
        lengths = torch.randn(tensor.shape, generator=generator).norm(dim=1, keepdim=True)
        tensor.mul_(width**0.5 if regularised else lengths)

    return fill


class RandomFeatures(nn.Module):
    """``n_features`` directions w (n k), shared by all heads: drawn once from the seed, saved, and never trained."""

    def __init__(self, ctx: BuildContext, width: int, n_features: int, *, regularised: bool) -> None:
        super().__init__()
        self.regularised = regularised
        self.directions = nn.Parameter(torch.empty(n_features, width, **ctx.factory), requires_grad=False)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"directions": ParamSpec("state", orthogonal_rows(self.regularised))}

    @torch.no_grad()
    def redraw(self, seed: int) -> None:
        """Other directions, from ``seed`` alone. States made with the old ones are of no use afterwards."""
        drawn = torch.empty(self.directions.shape)
        orthogonal_rows(self.regularised)(drawn, torch.Generator().manual_seed(seed))
        self.directions.copy_(drawn)

    def exponents(self, x: Tensor) -> Tensor:
        """w.x - |x|^2 / 2 of ``x`` (b t h k), (b t h n), in float32 at least."""
        x = x.to(accumulation_dtype(x.dtype))
        with no_autocast(x.device):
            return x @ self.directions.to(x.dtype).T - x.square().sum(-1, keepdim=True) / 2


def running_bound(exponents: Tensor, segments: Segments | None, before: Tensor) -> Tensor:
    """(b t h) a whole number: the largest of a document's exponents (b t h n) so far, rounded up.

    ``before`` (b h): the bound of the document that the state holds. Nothing looks ahead, so that cuts do not change it.
    """
    highest = exponents.detach().amax(-1).ceil().nan_to_num().clamp(NO_BOUND + 1, -NO_BOUND).to(torch.int64)
    if segments is None:
        return torch.maximum(highest.cummax(1).values, before.to(torch.int64)[:, None]).to(exponents.dtype)
    # A step between documents that is larger than any exponent lets one running maximum serve them all.
    number, step = segments.starts.to(torch.int64).cumsum(1)[..., None], int(-4 * NO_BOUND)
    first = torch.where(number == 0, before.to(torch.int64)[:, None], int(NO_BOUND))
    highest = torch.where(segments.real[..., None], torch.maximum(highest, first), first)
    return ((highest + number * step).cummax(1).values - number * step).to(exponents.dtype)
