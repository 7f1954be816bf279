"""The definition of attention to chosen tokens: a dense mask, a softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.attention.mask import accumulate_dtype
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.block_sparse_attention import Places
from hybridtf.ops.gather_attention.shapes import check_call, outside_of, placed, slots_of


def gather_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, places: Places | None = None, *, segments: Segments | None = None,
    scale: float | None = None, outside: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Softmax attention of each query to the tokens of its document that ``index`` names by position, none later than it.

    ``q`` (b t h k), ``k`` (b s g k), ``v`` (b s g v): query head i reads key head i // (h / g). ``index`` (b t c n), int64,
    c = 1 (all heads share) or g, -1 for none; those of one query differ.
    ``places`` says where queries and documents lie; None: the
    keys are the call's own, in documents by ``segments``. ``scale`` None is ``k ** -0.5``.

    ``outside`` (b t h): the logarithm of the sum over what else the query sees, somewhere else: one more column of the softmax,
    that carries no value.

    Returns y (b t h v), and the weights (b t c n) that fell on each choice, summed over the heads that share it, without a
    gradient, in float32 at least; with ``outside`` also the weight (b t h) that fell on it, with a gradient. A query that sees
    nothing gives zero. Memory grows with ``t * s``.
    """
    check_call(q, k, v, index)
    outside = outside_of(outside, q, segments)
    q, k, v, places = placed(q, k, v, places, segments)
    dtype, (b, t, h, width), (s, g) = accumulate_dtype(q.dtype), q.shape, k.shape[1:3]
    c = index.shape[2]
    with no_autocast(q.device):
        keys, values = (x.to(dtype).repeat_interleave(h // g, 2) for x in (k, v))
        slots = slots_of(index, places, s)
        chosen = torch.zeros(b, t, c, s + 1, dtype=torch.bool, device=q.device)
        chosen = chosen.scatter(-1, torch.where(slots < 0, s, slots), True)[..., :s]
        seen = chosen.transpose(1, 2).repeat_interleave(h // c, 1)
        scores = torch.einsum("bthk,bshk->bhts", q.to(dtype), keys) * (width**-0.5 if scale is None else scale)
        column = torch.full_like(scores[..., :1], -torch.inf)
        if outside is not None:
            column = outside.to(dtype).transpose(1, 2)[..., None]
        scores = torch.cat([scores.masked_fill(~seen, -torch.inf), column], -1)
        alone = (scores == -torch.inf).all(-1, keepdim=True)
        weights, share = scores.masked_fill(alone, 0.0).softmax(-1).masked_fill(alone, 0.0).split([s, 1], -1)
        shared = weights.detach().unflatten(1, (c, h // c)).sum(2).transpose(1, 2)
        mass = torch.cat([shared, shared.new_zeros(b, t, c, 1)], -1).gather(-1, torch.where(slots < 0, s, slots))
        y = torch.einsum("bhts,bshv->bthv", weights, values).to(q.dtype)
        return (y, mass) if outside is None else (y, mass, share[..., 0].transpose(1, 2))
