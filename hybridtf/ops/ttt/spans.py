"""A span of ``ttt_linear``: what needs no state for all its chunks at once, then the chunks in turn. README.md derives it.

Axes: b batch, c chunks of a span, h heads, l places in a chunk (as many as a mini-batch has), p channels of a head, r = p + 1
rows of a memory. A matrix product with a memory is of inputs (... r) with a last column of ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.ops.mini_batches import Numbers, in_chunks, numbers
from hybridtf.ops.passes_op import Call, States
from hybridtf.ops.ttt.norm import fused_loss_gradient


class Chunk(NamedTuple):
    """A chunk, (b*h ...), or all of a span with one more axis c in front."""

    q: Tensor  # (l r) queries
    k: Tensor  # (l r) keys
    from_q: Tensor  # (l p) what W0 and b0 make of them
    from_k: Tensor  # (l p)
    goal: Tensor  # (l p) (norm_bias - target) norm_weight
    square: Tensor  # (1 p) norm_weight^2
    taught: Tensor  # (r l) lr k, transposed
    pairs: Tensor  # (l l) rate_i lr_j (q_i k_j + 1) over the tokens j of the same mini-batch up to i


class Mixed(NamedTuple):
    """The mini-batches that a chunk's tokens belong to: the one of its first token; the next, where that is of the state's
    document; others, of documents that begin in the chunk. (b*h ...), or one more axis c in front."""

    q_first: Tensor  # (l r) queries of the first, else 0
    q_rated: Tensor  # (l r) times the rate of their place
    k_first: Tensor  # (l r)
    taught_first: Tensor  # (r l)
    q_second: Tensor  # (l r)
    k_second: Tensor  # (l r)
    taught_last: Tensor  # (r l) of the mini-batch that the chunk ends with
    second: Tensor  # (l 1) bool
    keeps: Tensor  # (1 1) bool: the chunk's first token goes on with the state's document
    last_first: Tensor  # (1 1) bool: the last mini-batch is the first
    last_second: Tensor  # (1 1) bool: it is the second
    last_whole: Tensor  # (1 1) bool: it ends in the chunk
    first_closes: Tensor  # (1 1) the scale of a whole mini-batch where the first ends in the chunk, else 0
    last_closes: Tensor  # (1 1) the same of the last


def span(call: Call, state: States) -> tuple[Tensor, States]:
    """y (b l h p), and the memory W (b h r p) and the open mini-batch's sums dW alike after it."""
    t, m, scale, eps, shape = call.n_tokens, call["scale"].shape[0], call["scale"][-1], call["eps"], state[0].shape
    W, dW = (x.flatten(0, 1) for x in state)
    chunks, mixed = _load(call, W.dtype)
    flags, out = None if mixed is None else list(zip(*(x.unbind(0) for x in mixed), strict=True)), []
    for i, parts in enumerate(zip(*(x.unbind(0) for x in chunks), strict=True)):
        if flags is None:
            z, W, dW = _aligned(Chunk(*parts), W, scale, eps, closes=(i + 1) * m <= t)
        else:
            z, W, dW = _mixed(Chunk(*parts), Mixed(*flags[i]), W, dW, eps)
        out.append(z)
    if flags is None and t % m == 0:
        dW = torch.zeros_like(dW)
    read = torch.stack(out).unflatten(1, shape[:2])
    unit = F.layer_norm(read, read.shape[-1:], eps=eps)
    y = unit * call["norm_weight"][:, None] + call["norm_bias"][:, None]
    y = y.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :t] + call["q"].to(W.dtype)
    return y.to(call["v"].dtype), (W.view(shape), dW.view(shape))


def _aligned(x: Chunk, W: Tensor, scale: Tensor, eps: float, *, closes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk that is a mini-batch, or the start of one: the memory's answers to its queries, before the norm, the memory
    after it, and its sums."""
    g = fused_loss_gradient(torch.baddbmm(x.from_k, x.k, W), x.goal, x.square, eps)
    z = torch.baddbmm(torch.baddbmm(x.from_q, x.q, W), x.pairs, g, alpha=-1)
    dW = torch.bmm(x.taught, g)
    return (z, torch.addcmul(W, dW, scale, value=-1), dW) if closes else (z, W.clone(), dW)


def _mixed(x: Chunk, on: Mixed, W: Tensor, dW: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk with mini-batches of any documents: the same."""
    W, dW = W.masked_fill(~on.keeps, 0), dW.masked_fill(~on.keeps, 0)
    g = fused_loss_gradient(torch.baddbmm(x.from_k, on.k_first, W), x.goal, x.square, eps)
    W2 = torch.addcmul(W, torch.baddbmm(dW, on.taught_first, g), on.first_closes, value=-1)
    g2 = fused_loss_gradient(torch.baddbmm(x.from_k, on.k_second, W2), x.goal, x.square, eps)
    g = torch.where(on.second, g2, g)
    z = torch.baddbmm(torch.baddbmm(x.from_q, on.q_first, W), on.q_rated, dW, alpha=-1)
    z = torch.baddbmm(torch.baddbmm(z, on.q_second, W2), x.pairs, g, alpha=-1)
    dW = torch.baddbmm(dW.masked_fill(~on.last_first, 0), on.taught_last, g)
    W = torch.where(on.last_first, W, W2.masked_fill(~on.last_second, 0))
    return z, torch.addcmul(W, dW, on.last_closes, value=-1), dW.masked_fill(on.last_whole, 0)


def _load(call: Call, dtype: torch.dtype) -> tuple[Chunk, Mixed | None]:
    """The chunks of a span, and what their tokens belong to (None: each chunk is a mini-batch)."""
    m, masks = call["scale"].shape[0], call.masks
    q, k, v, lr, rate = (in_chunks(call[name].to(dtype), m) for name in ("q", "k", "v", "lr", "rate"))
    number, together = None, torch.ones(m, m, dtype=torch.bool, device=q.device)
    if not call["aligned"]:
        one = torch.ones_like(call["place"], dtype=torch.bool)
        real, starts = (in_chunks(x, m) for x in ((one, ~one) if masks is None else (masks.real, masks.starts)))
        q, k, v, lr = (x.masked_fill(~real.view(*real.shape, *[1] * (x.ndim - 3)), 0) for x in (q, k, v, lr))
        number = numbers(in_chunks(call["place"].detach(), m), real, starts, m)
        together = (number.of[..., :, None] == number.of[..., None, :])[:, :, None]
    q, k, v = (x.transpose(2, 3) for x in (q, k, v))
    lr, rate = lr.transpose(2, 3)[..., None], rate[:, :, None, :, None]
    weight, bias = (call[name][:, None] for name in ("norm_weight", "norm_bias"))
    goal = (bias - (v - k)) * weight
    q, k = (F.pad(x, (0, 1), value=1.0) for x in (q, k))
    start = torch.cat([call["W0"], call["b0"][:, None]], 1)
    pairs = (rate * (q @ k.mT) * lr.mT).masked_fill(~together.tril(), 0)
    taught = lr * k
    square = weight.square().expand(*q.shape[:3], -1, -1)
    chunks = (q, k, q @ start, k @ start, goal, square, taught.mT, pairs)
    mixed = None if number is None else _mixture(number, q, k, taught, rate, call["scale"][-1])
    return Chunk(*(x.flatten(1, 2) for x in chunks)), mixed


def _mixture(x: Numbers, q: Tensor, k: Tensor, taught: Tensor, rate: Tensor, scale: Tensor) -> Mixed:
    """``q``, ``k``, ``taught`` (c b h l r) where the mini-batches of :class:`Mixed` have them."""
    end, heads = x.of[..., -1:], q.shape[2]
    of_first, of_second, of_last = x.of == 0, (x.of == 1) & x.carried, x.of == end
    first_whole, last_whole = ((of & x.ends).any(-1, keepdim=True) for of in (of_first, of_last))
    first, second, last = (of[:, :, None, :, None] for of in (of_first, of_second, of_last))
    parts = (
        q * first, q * (first * rate), k * first, (taught * first).mT, q * second, k * second, (taught * last).mT,
    )
    last_second = (end == 1) & x.carried[..., -1:]
    flags = (of_second, x.keeps, end == 0, last_second, last_whole, first_whole * scale, last_whole * scale)
    spread = (flag[:, :, None, :, None].expand(-1, -1, heads, -1, -1) for flag in flags)
    return Mixed(*(z.flatten(1, 2) for z in (*parts, *spread)))
