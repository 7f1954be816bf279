"""Arguments of ``gated_delta_rule`` in chunks, and what documents do to the scores of a chunk.

Axes: c chunks, b batch, l tokens of a chunk, n sub-steps, L = l n rows, g key heads, r value heads a key head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.ops.gated_delta_rule.scores import Scores
from hybridtf.ops.gated_delta_rule.shapes import sizes_of
from hybridtf.ops.passes_op import Call, Masks


def in_chunks(call: Call, name: str, length: int, dtype: torch.dtype) -> Tensor:
    """An argument in whole chunks, heads before rows: q (c b g 1 l k), k (c b g 1 L k), v (c b g r L p), beta (c b g r L 1),
    log_a (c b g r l 1) or (c b g r l k). What is not a real token is zeros: it decays nothing and writes nothing.
    """
    x: Tensor = call[name]
    size = sizes_of(call["k"], call["v"])
    if call.masks is not None:
        x = x.masked_fill(~call.masks.real.view(size.b, size.t, *[1] * (x.ndim - 2)), 0)
    x = x.to(dtype)
    if missing := -size.t % length:  # padding by nothing is a copy
        x = F.pad(x, (*[0] * (2 * x.ndim - 4), 0, missing))
    steps = size.n if name in ("k", "v", "beta") else 1
    heads = 1 if name in ("q", "k") else size.r
    width = 1 if name == "beta" or (name == "log_a" and x.ndim == 3) else x.shape[-1]
    x = x.reshape(size.b, x.shape[1] // length, length, steps, size.g, heads, width)
    return x.permute(1, 0, 4, 5, 2, 3, 6).flatten(4, 5).contiguous()  # else every product would copy it


def with_documents(scores: Scores, masks: Masks, length: int, n: int) -> Scores:
    """Pairs of one document; what its incoming state reaches; what is left at its end. Factors of 0 and 1, never log 0."""
    spare = -masks.ids.shape[1] % length
    ids = torch.cat([masks.ids, masks.ids[:, -1:].expand(-1, spare)], 1).unflatten(1, (-1, length)).transpose(0, 1)
    last = ids[..., -1:]  # [c, b, 1]
    entered = torch.cat([masks.before[None, :, None], last[:-1]])
    pairs = (ids[..., :, None] == ids[..., None, :]).repeat_interleave(n, -1)[:, :, None, None]
    reached, left, kept = (x[:, :, None, None, :, None] for x in (ids == entered, ids == last, last == entered))
    return Scores(
        scores.among_keys * pairs.repeat_interleave(n, -2), scores.of_queries * pairs,
        reached.to(scores.total.dtype) if scores.before is None else scores.before * reached,
        left.to(scores.total.dtype) if scores.after is None else scores.after * left,
        scores.total * kept,
    )
