"""Products of queries and keys with the decay between them. Every exponent is at most 0.

Axes: c chunks, b batch, g key heads, r value heads a key head, l tokens or rows of a chunk, k key width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.ops.exponential import exp
from hybridtf.ops.gated_delta_rule.inverse import joined, padded_rows


class Scores(NamedTuple):
    """What the tokens of a chunk are to each other and to the states around it. A size of 1 is shared."""

    among_keys: Tensor
    """(c b g r L L) decayed k_i.k_j, rows L = l n; entries on and above the diagonal are not to be used."""
    of_queries: Tensor
    """(c b g r l L) decayed q_i.k_j for keys up to the token's own, else 0."""
    before: Tensor | None
    """(c b g r l 1) or (c b g r l k): the decay from the chunk's start through each token. None: 1."""
    after: Tensor | None
    """The same from each token to the chunk's end, itself excluded."""
    total: Tensor
    """(c b g r 1 1) or (c b g r k 1): the decay of the whole chunk."""


def plain_scores(q: Tensor, k: Tensor, log_a: Tensor | None, n: int) -> Scores:
    """With one decay a head, or none: q (c b g 1 l k), k (c b g 1 L k), log_a (c b g r l 1)."""
    among, of_queries = _products(k, k), _products(q, k)
    lower = torch.ones(q.shape[-2], q.shape[-2], dtype=q.dtype, device=q.device).tril()
    if log_a is None:
        return Scores(among, of_queries * rows_of(lower, n, -1), None, None, q.new_ones(q.shape[0], 1, 1, 1, 1, 1))
    # Sums in float64, differences before rounding: in float32 weak decays after strong ones would lose their digits.
    sums = log_a.double().cumsum(-2)
    pair = rows_of(exp((sums - sums.mT).to(q.dtype) * lower) * lower, n, -1)
    last = sums[..., -1:, :]
    before, after, total = (exp(x.to(q.dtype)) for x in (sums, last - sums, last))
    return Scores(among * rows_of(pair, n, -2), of_queries * pair, before, after, total)


def _products(x: Tensor, y: Tensor) -> Tensor:
    """x yᵀ; ``matmul`` would copy yᵀ of more axes than three."""
    found: Tensor = torch.bmm(x.flatten(0, 3), y.flatten(0, 3).mT).unflatten(0, x.shape[:4])
    return found


def rows_of(x: Tensor, n: int, dim: int) -> Tensor:
    """Tokens as their rows along ``dim``."""
    return x if n == 1 else x.repeat_interleave(n, dim)


def channel_scores(q: Tensor, k: Tensor, log_a: Tensor, n: int) -> Scores:
    """With a decay for each key channel: q (c b g 1 l k), k (c b g 1 L k), log_a (c b g r l k).

    A product of a row in a block and a key in the block before it is decayed in two parts, from the key to the border and
    from the border to the row. Blocks are joined in pairs, from size 1 up, so that each pair of tokens meets at one border.
    """
    rows = k.shape[-2]
    if n > 1:  # a token decays at its first row and is read at its last
        log_a = F.pad(log_a[..., None, :], (0, 0, 0, n - 1)).flatten(-3, -2)
        q = F.pad(q[..., None, :], (0, 0, n - 1, 0)).flatten(-3, -2)
    spare = padded_rows(rows) - rows
    both = F.pad(torch.stack([k, q]), (0, 0, 0, spare))  # [2, c, b, g, 1, L, k]
    keys = both[0]
    # [c, b, g, r, blocks, size, k]: sums from a block's start through each row, and from a row, itself excluded, to the end.
    into = F.pad(log_a, (0, 0, 0, spare))[..., None, :]
    out = torch.zeros_like(into)
    found = (both * keys).sum(-1).expand(-1, -1, -1, -1, log_a.shape[3], -1)[..., None, None]
    for _ in range(padded_rows(rows).bit_length() - 1):
        size = into.shape[-2]
        (into_1, into_2), (out_1, out_2) = (x.unflatten(-3, (-1, 2)).unbind(-3) for x in (into, out))
        left = keys.unflatten(-2, (-1, 2, size))[..., 0, :, :] * exp(out_1)
        right = both.unflatten(-2, (-1, 2, size))[..., 1, :, :] * exp(into_2)
        first, second = found.unflatten(-3, (-1, 2)).unbind(-3)
        found = joined(first, right @ left.mT, second)
        into = torch.cat([into_1, into_2 + into_1[..., -1:, :]], -2)
        out = torch.cat([out_1 + into_2[..., -1:, :], out_2], -2)
    among, of_queries = found.squeeze(-3)[..., :rows, :rows]
    before, after = (exp(x.squeeze(-3)[..., :rows, :][..., n - 1 :: n, :]) for x in (into, out))
    return Scores(among, of_queries[..., n - 1 :: n, :], before, after, before[..., -1:, :].mT)
