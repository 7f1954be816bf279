"""Chunks of ``dplr`` as matrices: scores between the tokens of a chunk, and what a chunk does to its state.

Everything is made by halving: a chunk of 2^m tokens from its two halves. README.md has the derivation.

Axes: b batch, n chunks, h heads, l places of a chunk, k key width, p value width, g = b n h.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """A span in chunks, all in one dtype, zeros at pads and beyond the end: (b n h l ...)."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_w: Tensor
    u: Tensor
    r: Tensor


class Documents(NamedTuple):
    """What documents are to chunks: ``ids`` (b n l), and ``before`` (b n), the document that a chunk's incoming state has."""

    ids: Tensor
    before: Tensor


class Scores(NamedTuple):
    """Rows read and columns write. ``solve`` (g l l): what the reads r of a chunk come to, given what each finds by itself,
    (1 - r u)^-1. ``pairs`` (g l 2 l 2): products with decays of r and q with u and k, of tokens with earlier ones."""

    solve: Tensor
    pairs: Tensor


class Decays(NamedTuple):
    """Products of decays inside a chunk, so that none is a quotient: (g l k), (g l k), (g 1 k).

    ``earlier``: from the chunk's start to before a token. ``later``: after a token to the chunk's end. ``total``: all.
    """

    earlier: Tensor
    later: Tensor
    total: Tensor


def scores(x: Tensor, y: Tensor, decay: Tensor, ids: Tensor | None) -> tuple[Scores, Decays]:
    """``x`` (g l 2 k): r and decay q. ``y`` (g l 2 k): u and k. ``decay`` (g l k or 1), ``ids`` (g l), l a power of 2."""
    blocks = x.shape[0] * x.shape[1]
    found = Scores(x.new_ones(blocks, 1, 1), x.new_zeros(blocks, 1, 2, 1, 2))
    now = Decays(torch.ones_like(decay), torch.ones_like(decay), decay)
    size = 1
    while size < x.shape[1]:
        found = _joined(found, _across(x, y, now, ids, size))
        now = _longer(now, size)
        size *= 2
    return found, now


def _halves(z: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(g l ...) in blocks of 2 size: their first and second halves, (g l/(2 size) size ...)."""
    first, second = z.unflatten(1, (-1, 2, size)).unbind(2)
    return first, second


def _across(x: Tensor, y: Tensor, decays: Decays, ids: Tensor | None, size: int) -> Tensor:
    """Products of a block's second half with its first, (blocks size 2 size 2): both decays run to or from the middle."""
    reads = _halves(x, size)[1] * _halves(decays.earlier, size)[1][..., None, :]
    writes = _halves(y, size)[0] * _halves(decays.later, size)[0][..., None, :]
    product = reads.reshape(-1, 2 * size, x.shape[-1]) @ writes.reshape(-1, 2 * size, x.shape[-1]).mT
    pairs: Tensor = product.unflatten(2, (size, 2)).unflatten(1, (size, 2))
    if ids is None:
        return pairs
    first, second = (half.reshape(-1, size) for half in _halves(ids, size))
    return pairs * (second[:, :, None] == first[:, None, :])[:, :, None, :, None]


def _joined(found: Scores, pairs: Tensor) -> Scores:
    """Blocks of twice the size, from their halves and the products between these."""
    solve_1, solve_2 = found.solve.unflatten(0, (-1, 2)).unbind(1)
    pairs_1, pairs_2 = found.pairs.unflatten(0, (-1, 2)).unbind(1)
    corner = solve_2 @ pairs[:, :, 0, :, 0] @ solve_1
    return Scores(_block(solve_1, corner, solve_2, (1, 2)), _block(pairs_1, pairs, pairs_2, (1, 3)))


def _block(first: Tensor, corner: Tensor, second: Tensor, dims: tuple[int, int]) -> Tensor:
    """The matrix [[first, 0], [corner, second]] of matrices over ``dims``."""
    above = torch.cat([first, torch.zeros_like(first)], dims[1])
    return torch.cat([above, torch.cat([corner, second], dims[1])], dims[0])


def _longer(decays: Decays, size: int) -> Decays:
    """The products over blocks of twice the size. ``total`` is (g blocks k)."""
    first, second = decays.total.unflatten(1, (-1, 2)).unbind(2)
    before_1, before_2 = _halves(decays.earlier, size)
    after_1, after_2 = _halves(decays.later, size)
    earlier = torch.stack([before_1, before_2 * first[:, :, None]], 2).flatten(1, 3)
    later = torch.stack([after_1 * second[:, :, None], after_2], 2).flatten(1, 3)
    return Decays(earlier, later, first * second)


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
    reads, writes = torch.stack([r, q * decay], -2), torch.stack([u, k], -2)
    (solve, pairs), decays = scores(reads, writes, decay, ids)
    # What q reads of its own token has not decayed.
    q_u, q_k = (pairs[:, :, 1, :, i] + torch.diag_embed((q * z).sum(-1)) for i, z in enumerate((u, k)))
    reads = reads * decays.earlier[..., None, :]
    writes = writes * decays.later[..., None, :]
    keep = decays.total.expand(-1, 1, k.shape[-1])
    if documents is not None and ids is not None:
        before = _per_head(documents.before, heads)[:, None]
        last = ids[:, -1:]
        reads = reads * (ids == before)[..., None, None]
        writes = writes * (ids == last)[..., None, None]
        keep = keep * (last == before)[..., None]
    W, U = solve @ reads[:, :, 0], solve @ (pairs[:, :, 0, :, 1] @ v)
    A = torch.baddbmm(torch.diag_embed(keep[:, 0]), writes[:, :, 0].mT, W)
    B = torch.baddbmm(writes[:, :, 1].mT @ v, writes[:, :, 0].mT, U)
    return Chunk(A, B, W, U, reads[:, :, 1], q_u, q_k @ v)


def _per_head(z: Tensor, heads: int) -> Tensor:
    """(b n ...) repeated for each head: (g ...)."""
    return z[:, :, None].expand(-1, -1, heads, *z.shape[2:]).flatten(0, 2)
