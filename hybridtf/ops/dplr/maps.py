"""Chunks of ``dplr`` as matrices: what a chunk does to its state, and what it answers. README.md has the derivation.

Axes: n chunks, b batch, h heads, l places of a chunk, k key width, p value width, g = n b h.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtf.ops.dplr.pairs import halved
from hybridtf.ops.gated_delta_rule.inverse import unit_inverse


class Tokens(NamedTuple):
    """A span in chunks, all in one dtype, zeros at pads and beyond the end: (n b h l ...)."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_w: Tensor
    u: Tensor
    r: Tensor


class Documents(NamedTuple):
    """What documents are to chunks: ``ids`` (n b l), and ``before`` (n b), the document that a chunk's incoming state has."""

    ids: Tensor
    before: Tensor


class Chunk(NamedTuple):
    """Chunks as affine maps: S_out = A S + B, the reads E = W S + U, and y = Q S + q_u E + Y. All (g ...)."""

    A: Tensor
    B: Tensor
    W: Tensor
    U: Tensor
    Q: Tensor
    q_u: Tensor
    Y: Tensor


def chunk_maps(tokens: Tokens, documents: Documents | None) -> Chunk:
    """What each chunk does, from its tokens alone."""
    heads = tokens.k.shape[2]
    q, k, v, log_w, u, r = (z.flatten(0, 2) for z in tokens)
    ids = None if documents is None else _per_head(documents.ids, heads)
    decay = log_w.exp()
    reads, writes = torch.stack([r, q * decay], 1), torch.stack([u, k], 1)
    # What q reads of its own token has not decayed, and r reads nothing of it.
    of_q = (q[:, None] * writes).sum(-1)
    own = torch.stack([torch.zeros_like(of_q), of_q], 1)
    apart = None if ids is None else ids[:, :, None] != ids[:, None, :]
    products, into, onto, keep = halved(reads, writes, decay, own, apart)
    (ru, rk), (qu, qk) = (rows.unbind(1) for rows in products.unbind(1))
    if documents is not None and ids is not None:
        before = _per_head(documents.before, heads)[:, None]
        last = ids[:, -1:]
        into = into * (ids == before)[..., None]
        onto = onto * (ids == last)[..., None]
        keep = keep * (last == before)[..., None]
    solve = unit_inverse(-ru)
    W, U = solve @ (r * into), solve @ (rk @ v)
    written_u, written_k = (u * onto).mT, (k * onto).mT
    A = torch.baddbmm(torch.diag_embed(keep.expand(-1, 1, k.shape[-1])[:, 0]), written_u, W)
    B = torch.baddbmm(written_k @ v, written_u, U)
    return Chunk(A, B, W, U, q * (decay * into), qu, qk @ v)


def _per_head(z: Tensor, heads: int) -> Tensor:
    """(n b ...) repeated for each head: (g ...)."""
    return z[:, :, None].expand(-1, -1, heads, *z.shape[2:]).flatten(0, 2)
