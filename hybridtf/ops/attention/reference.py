"""The definition of attention: dense, obvious, differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.ops.attention.bias import RelativeRows, decay_of
from hybridtf.ops.attention.mask import AttentionMask, accumulate_dtype, check_inputs, whole
from hybridtf.ops.autocast import no_autocast


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, scale: float | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Softmax attention over the keys that ``mask`` shows to each query (Vaswani et al. 2017, arXiv 1706.03762).

    ``q`` (b t h k), ``k`` (b s g k), ``v`` (b s g v), ``h`` a multiple of ``g``: query head ``j`` reads key head
    ``j // (h // g)``. Returns (b t h v) in q's dtype; the arithmetic is float32, or float64 for float64 inputs.
    ``scale`` None is ``k ** -0.5``. ``dropout_p`` drops weights after the softmax. A query that sees nothing gives zero
    and has no gradient. Memory grows with ``t * s``. Raises :class:`ConfigError` for shapes that do not fit together.
    """
    check_inputs(q, k, v, mask, dropout_p)
    with no_autocast(q.device):
        return _dense(q, k, v, mask, q.shape[3] ** -0.5 if scale is None else scale, dropout_p)


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, dropout_p: float) -> Tensor:
    dtype = accumulate_dtype(q.dtype)
    repeats = q.shape[2] // k.shape[2]
    keys = k.to(dtype).repeat_interleave(repeats, 2)
    values = v.to(dtype).repeat_interleave(repeats, 2)
    scores = torch.einsum("bthk,bshk->bhts", q.to(dtype), keys) * scale
    if mask.softcap is not None:
        scores = mask.softcap * torch.tanh(scores / mask.softcap)
    if mask.slopes is not None:
        scores = scores - mask.slopes.to(dtype)[:, None, None] * whole(q, k).distance(mask)[:, None]
    relative = RelativeRows.of_queries(mask, whole(q, k), dtype)
    for added in (decay_of(mask, whole(q, k), dtype), None if relative is None else relative.bias(whole(q, k))):
        scores = scores if added is None else scores + added
    seen = whole(q, k).visible(mask)
    shown = torch.ones_like(scores, dtype=torch.bool) if seen is None else seen[:, None].expand_as(scores)
    weights = _softmax(scores.masked_fill(~shown, -torch.inf), shown, mask.sinks)
    weights = torch.nn.functional.dropout(weights, dropout_p)
    return torch.einsum("bhts,bshv->bthv", weights, values).to(q.dtype)


def _softmax(scores: Tensor, shown: Tensor, sinks: Tensor | None) -> Tensor:
    b, h, t, s = scores.shape
    alone = ~shown.any(-1, keepdim=True)
    # A row of -inf alone would be 0/0: it is given finite scores here and zero weights below.
    scores = scores.masked_fill(alone, 0.0)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(b, t, h).mT[..., None]], dim=-1)
    return scores.softmax(-1)[..., :s].masked_fill(alone, 0.0)
