"""The definition of block sparse attention: a dense mask, a softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.ops.attention.mask import accumulate_dtype
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.block_sparse_attention.rule import Places, SparseRule, check_call


def block_sparse_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, places: Places, rule: SparseRule, *, marked: Tensor | None = None,
    blocks: Tensor | None = None, scale: float | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over the keys of a query's document that ``rule`` shows, or that are ``marked`` (b s, bool), or that
    lie in one of the query's ``blocks`` (b t c n, int64; -1: none; blocks of ``rule.block`` tokens from the document's
    start; c = 1, g or h), under ``rule.causal`` only up to the query.

    ``q`` (b t h k), ``k`` (b s g k), ``v`` (b s g v): query head i reads key head i // (h / g). Returns (b t h v) in q's
    dtype. ``scale`` None is ``k ** -0.5``. A query that sees nothing gives zero. Memory grows with ``t * s``.

    ``return_lse``: also the logarithm of the sum of the exponentiated scores (b t h), in float32 at least, -inf for nothing; it
    has a gradient, so that a caller can make one softmax of this one and another.
    """
    check_call(q, k, v, places, rule, marked, blocks)
    dtype = accumulate_dtype(q.dtype)
    h, g = q.shape[2], k.shape[2]
    with no_autocast(q.device):
        keys, values = (x.to(dtype).repeat_interleave(h // g, 2) for x in (k, v))
        scores = torch.einsum("bthk,bshk->bhts", q.to(dtype), keys) * (q.shape[3] ** -0.5 if scale is None else scale)
        seen = _seen(places, rule, marked, blocks, k.shape[1], h)
        alone = ~seen.any(-1, keepdim=True)
        scores = scores.masked_fill(~seen, -torch.inf).masked_fill(alone, 0.0)
        weights = scores.softmax(-1).masked_fill(alone, 0.0)
        y = torch.einsum("bhts,bshv->bthv", weights, values).to(q.dtype)
        if not return_lse:
            return y
        return y, scores.logsumexp(-1).masked_fill(alone[..., 0], -torch.inf).transpose(1, 2)


def _seen(
    places: Places, rule: SparseRule, marked: Tensor | None, blocks: Tensor | None, s: int, h: int
) -> Tensor:
    """(b h t s) bool."""
    p, first, start, count = (x[:, :, None] for x in (places.position, places.first, places.start, places.count))
    place = torch.remainder(torch.arange(s, device=p.device) - first, max(s, 1))
    j = place + start
    shown = torch.zeros(1, dtype=torch.bool, device=p.device)
    for clause in rule.clauses:
        shown = shown | rule.shows(clause, p, j, start + count)
    if marked is not None:
        shown = shown | marked[:, None]
    within = place < count
    if rule.causal:
        within = within & (j <= p)
    seen = (within & shown)[:, None].expand(-1, h, -1, -1)
    if blocks is not None:
        at = torch.div(j, rule.block, rounding_mode="floor")
        chosen = torch.zeros(*blocks.shape[:3], s, dtype=torch.bool, device=p.device)
        for one in blocks.unbind(-1):
            chosen = chosen | (one[..., None] == at[:, :, None])
        chosen = chosen.transpose(1, 2).repeat_interleave(h // blocks.shape[2], 1)
        seen = seen | (chosen & within[:, None])
    return seen
