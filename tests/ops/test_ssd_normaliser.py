"""The carried column of ones of ``ssd``."""

from __future__ import annotations

import torch

from hybridtf.ops.ssd import normalised, ssd_chunked, with_ones
from tests.ops.ssd_cases import inputs, random_segments


def test_an_average_by_the_decayed_weights_of_the_document() -> None:
    x, segments = inputs(0, 3, 19, h=2), random_segments(0, 3, 19)
    q, k = (z.detach().abs().requires_grad_() for z in (x.q, x.k))
    got = normalised(ssd_chunked(q, k, with_ones(x.v), x.log_a, segments=segments, chunk_size=8)[0])
    same = segments.real[:, :, None] & (segments.ids[:, :, None] == segments.ids[:, None, :])
    total = x.log_a.masked_fill(~segments.real[..., None], 0).cumsum(1)
    decay = (total[:, :, None] - total[:, None]).masked_fill(~same.tril()[..., None], -torch.inf).exp()
    weight = torch.einsum("btn,bsn->bts", q[:, :, 0], k[:, :, 0])[..., None] * decay
    sums = weight.sum(2)
    want = torch.einsum("btsh,bshp->bthp", weight, x.v) / torch.where(sums == 0, 1, sums)[..., None]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad((y * weights).sum(), (q, k, x.v, x.log_a)) for y in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_where_nothing_was_weighed_the_average_and_its_gradient_are_zero() -> None:
    y = torch.tensor([[2.0, 4.0, 2.0], [0.0, 0.0, 0.0], [3.0, -3.0, 0.0]], requires_grad=True)
    out = normalised(y)
    assert out.tolist() == [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    grad = torch.autograd.grad(out.sum(), y)[0]
    assert grad.tolist() == [[0.5, 0.5, -1.5], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert normalised(y, 2.0)[1:].tolist() == [[0.0, 0.0], [1.5, -1.5]]
