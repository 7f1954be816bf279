"""PaTH attention by chunks: reflections of a chunk of keys at once, queries walking over the chunks backwards.

The derivation is in the README beside this file.

Axes: b batch, m queries, s keys, n chunks of c keys, g key heads, r query heads per key head, k key dim, v value dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.ops.attention.bias import decay_of
from hybridtf.ops.attention.mask import AttentionMask, Tile, accumulate_dtype
from hybridtf.ops.attention.query_chunks import by_query_chunks
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.path_attention.reference import attended, check_path

_KEYS = 64
# A walk is some calls a chunk of keys, however many queries walk.
_FEWEST_QUERIES = 256


def path_attention_chunked(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, mask: AttentionMask, *, scale: float | None = None,
    query_chunk: int | None = None, key_chunk: int = _KEYS,
) -> Tensor:
    """The same function as :func:`path_attention_reference`, in memory linear in length. ``query_chunk``: queries at once;
    None: by the shapes. ``key_chunk``: keys whose reflections are put together."""
    check_path(q, k, v, w, beta, mask)
    if key_chunk < 1:
        raise ConfigError(f"path_attention: key_chunk must be at least 1; got {key_chunk}")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    with no_autocast(q.device):
        paths = _paths(k, w, beta, mask.k_ids, key_chunk)
        out: Tensor = by_query_chunks(_walk, q, k, v, mask, query_chunk, scale, *paths, fewest=_FEWEST_QUERIES)
        return out


class _Paths(NamedTuple):
    """What the chunks of keys do to a query that comes from behind, each (n bg c ...) with all rows' key heads side by side."""

    k: Tensor
    """Keys."""
    w: Tensor
    """(n bg k c): axes of reflection; 0 where there is no token."""
    turn: Tensor
    """(n bg c k): the query loses (q . w_l) turn_l, summed over the l that it passes."""
    between: Tensor
    """(n bg c c): the score on key j loses (q . w_l) between_lj."""


def _paths(k: Tensor, w: Tensor, beta: Tensor, ids: Tensor | None, chunk: int) -> _Paths:
    dtype = accumulate_dtype(k.dtype)
    k, w, beta = k.to(dtype), w.to(dtype), beta.to(dtype)
    if ids is not None:
        nothing = (ids <= 0)[..., None]
        w, beta = w.masked_fill(nothing[..., None], 0.0), beta.masked_fill(nothing, 0.0)
    keys, axes = (_chunks(x, chunk) for x in (k, w))
    sized = axes * _chunks(beta[..., None], chunk)
    eye = torch.eye(chunk, dtype=dtype, device=k.device)
    system = eye + (sized @ axes.mT).tril(-1)
    found = torch.linalg.solve_triangular(
        system, torch.cat([sized, (sized @ keys.mT).tril(-1)], dim=-1), upper=False, unitriangular=True
    )
    turn, between = found.split([k.shape[3], chunk], dim=-1)
    return _Paths(keys, axes.mT.contiguous(), turn, between)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """(b s g k) to (n bg c k), with zeros at the end."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk))
    return x.reshape(x.shape[0], x.shape[1] // chunk, chunk, *x.shape[2:]).permute(1, 0, 3, 2, 4).flatten(1, 2)


def _walk(
    q: Tensor, k: Tensor, v: Tensor, tile: Tile, mask: AttentionMask, scale: float, keys: Tensor, axes: Tensor, turn: Tensor,
    between: Tensor,
) -> Tensor:
    """One chunk of queries."""
    dtype, (b, m), (chunk, s) = accumulate_dtype(q.dtype), q.shape[:2], (keys.shape[2], k.shape[1])
    grouped = q.to(dtype).unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4) * scale  # [b, g, r, m, k]
    r, walker = grouped.shape[2], grouped.flatten(2, 3).flatten(0, 1)
    seen = tile.visible(mask)
    assert seen is not None  # a causal mask
    n = -(-s // chunk)
    # What a query does not pass turns nothing: later tokens, other documents, pads.
    passed = F.pad(seen, (0, -s % chunk)).to(dtype)[:, None, None].expand(b, *grouped.shape[1:4], -1)
    passes = passed.reshape(*walker.shape[:2], n, chunk).unbind(2)
    walkers, alongs = [], []
    for j in reversed(range(n)):
        along = torch.bmm(walker, axes[j]) * passes[j]
        walkers.append(walker)
        alongs.append(along)
        walker = torch.baddbmm(walker, along, turn[j], alpha=-1)
    scores = walker.new_zeros(*walker.shape[:2], 0)
    if n:
        at_chunks, along = torch.stack(walkers[::-1]), torch.stack(alongs[::-1])  # [n, bg, rm, ...]
        found = at_chunks @ keys[:n].mT - along @ between[:n]
        scores = found.permute(1, 2, 0, 3).flatten(2)[..., :s]
    scores = scores.reshape(b, q.shape[2], m, s)
    return attended(scores, v.to(dtype).repeat_interleave(r, 2), seen, decay_of(mask, tile, dtype)).to(q.dtype)
